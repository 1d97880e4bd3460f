package conformance

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

func advisoryKilled(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("projector")
	l := newLocker(t, d.DB)
	others := newLocker(t, d.Open(t))

	// While nobody asks.
	lock := mustLock(t, l, key)
	killed := time.Now()
	d.kill(t, d.holder(t, key))
	select {
	case <-lock.Done():
		t.Logf("noticed after %v", time.Since(killed).Round(time.Millisecond))
	case <-testContext(t).Done():
		t.Fatal("not noticed")
	}
	successor := mustLock(t, others, key)
	for what, err := range map[string]error{
		"Err": lock.Err(), "cause": context.Cause(lock.Context()),
		"Check": lock.Check(testContext(t)), "Release": lock.Release(testContext(t)),
	} {
		if !errors.Is(err, dblock.ErrLost) {
			t.Errorf("%s after the loss: %v", what, err)
		}
	}
	t.Log(lock.Err())
	if err := successor.Check(testContext(t)); err != nil {
		t.Errorf("the successor: %v", err)
	}
	mustRelease(t, successor)

	// While the work runs, with the loss found by the next question.
	workErr := errors.New("stopped")
	err := l.Do(testContext(t), func(ctx context.Context) error {
		d.kill(t, d.holder(t, key))
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, dblock.ErrLost) {
			t.Errorf("cause: %v", cause)
		}
		return workErr
	}, key)
	if !errors.Is(err, workErr) || !errors.Is(err, dblock.ErrLost) {
		t.Errorf("Do: %v", err)
	}
	lock = mustLock(t, l, key)
	d.kill(t, d.holder(t, key))
	if err := lock.Check(testContext(t)); !errors.Is(err, dblock.ErrLost) {
		t.Errorf("Check at once: %v", err)
	}
	lock = mustLock(t, l, key)
	d.kill(t, d.holder(t, key))
	if err := lock.Release(testContext(t)); !errors.Is(err, dblock.ErrLost) {
		t.Errorf("Release at once: %v", err)
	}
	d.nothingLeft(t) // the server tells the client first, and then frees the key
	mustBeFree(t, others, key)
}

// The server's idle timeouts end what gives no sign of life; a hold does.
func advisoryKeepAlive(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("job")
	l := newLocker(t, d.DB, &advisory.Options{KeepAlive: 300 * time.Millisecond})
	lock := mustLock(t, l, key)
	select {
	case <-lock.Done():
		t.Fatalf("lost: %v", lock.Err())
	case <-time.After(12 * time.Second): // twice the silence after which the server ends such a session
	}
	if err := lock.Check(testContext(t)); err != nil {
		t.Errorf("check: %v", err)
	}
	mustRelease(t, lock)
}
