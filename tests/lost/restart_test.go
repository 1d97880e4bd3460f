package lost

import (
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock/advisory"
)

func TestARestartedServersHoldersHearOfItAndLockAnew(t *testing.T) {
	private(t, processes(), func(way) []string { return nil }, func(t *testing.T, w way, d *database) {
		for _, end := range []struct {
			what string
			do   func(testing.TB)
		}{{"server crashed, heard", d.server.Kill}, {"server shut down, heard", d.server.Stop}} {
			all := keys(10)
			l := newLocker(t, d.db)
			locks := make([]*advisory.Lock, len(all))
			for i, key := range all {
				locks[i] = mustLock(t, l, key)
			}
			var heard figures
			var waits sync.WaitGroup
			began := time.Now()
			for i, lock := range locks {
				waits.Go(func() {
					select {
					case <-lock.Done():
						heard.add(time.Since(began))
					case <-time.After(time.Minute):
						t.Errorf("%v: not heard", all[i])
					}
				})
			}
			end.do(t)
			d.server.Restart(t)
			waits.Wait()
			heard.within(t, end.what, time.Second)
			for i, lock := range locks {
				next := mustLock(t, l, all[i])
				neverHeldAgain(t, lock)
				must(t, next.Check(testContext(t)))
				must(t, next.Release(testContext(t)))
			}
			d.nothingLeft(t)
		}
	})
}
