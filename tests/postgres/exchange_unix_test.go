//go:build unix

package postgres_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect/postgres"
)

// No context ends an exchange, but it ends by itself.
func TestAnExchangeEndsAtItsDeadline(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		s := session(t, db)
		exchange(t, s, keys(1), nil)
		pid := int(s.ID())
		must(t, syscall.Kill(pid, syscall.SIGSTOP))
		t.Cleanup(func() { must(t, syscall.Kill(pid, syscall.SIGCONT)) })
		began := time.Now()
		_, _, err := s.Exchange(began.Add(time.Second), keys(2), nil)
		if err == nil || time.Since(began) > 20*time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
	})
}
