package conformance

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

func advisoryContext(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("job")
	holder := newLocker(t, d.DB)
	lock := mustLock(t, holder, key)
	waiter := newLocker(t, d.Open(t))

	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := waiter.Lock(ctx, key)
	if !errors.Is(err, dblock.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("deadline: %v", err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	result := make(chan error)
	go func() {
		_, err := waiter.Lock(ctx, dblock.NewKey("another"), key)
		result <- err
	}()
	d.waiting(t, key, 1)
	cancel()
	if err := <-result; !errors.Is(err, dblock.ErrCanceled) || !errors.Is(err, context.Canceled) {
		t.Errorf("cancel: %v", err)
	}
	for what, call := range map[string]func(context.Context, ...dblock.Key) (*advisory.Lock, error){"lock": waiter.Lock, "try": waiter.TryLock} {
		if _, err := call(ctx, dblock.NewKey("free")); !errors.Is(err, dblock.ErrCanceled) {
			t.Errorf("%s with a context that has ended: %v", what, err)
		}
	}

	if err := lock.Check(testContext(t)); err != nil {
		t.Errorf("the holder: %v", err)
	}
	mustRelease(t, lock)
	d.nothingLeft(t)
	mustBeFree(t, waiter, key, dblock.NewKey("another"))
}

var (
	// limits are shorter than a unit of some server, and no multiple of one.
	limits = []time.Duration{1, 400 * time.Microsecond, 200 * time.Millisecond, 500 * time.Millisecond, 1500 * time.Millisecond}
	// longLimits wait, and do not fail as numbers that are too large; 0 is no limit.
	longLimits = []time.Duration{0, 24 * 365 * 100 * time.Hour, math.MaxInt64}
)

func advisoryLimits(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("job")
	lock := mustLock(t, newLocker(t, d.DB), key)
	db := d.Open(t)
	for _, limit := range limits {
		began := time.Now()
		_, err := newLocker(t, db, &advisory.Options{WaitLimit: limit}).Lock(testContext(t), key)
		if waited := time.Since(began); !errors.Is(err, dblock.ErrTimeout) || waited < limit {
			t.Errorf("limit %v: after %v: %v", limit, waited, err)
		}
	}

	if _, err := advisory.New(db, &advisory.Options{WaitLimit: -1}); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("a negative limit: %v", err)
	}
	for _, limit := range longLimits {
		l := newLocker(t, db, &advisory.Options{WaitLimit: limit})
		granted := passes(testContext(t), l, key)
		d.waiting(t, key, 1)
		mustRelease(t, lock)
		if err := <-granted; err != nil {
			t.Errorf("limit %v: %v", limit, err)
		}
		lock = mustLock(t, newLocker(t, d.DB), key)
	}
	mustRelease(t, lock)
	d.nothingLeft(t)
}

func advisoryCancelledWaiter(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("job")
	lock := mustLock(t, newLocker(t, d.DB), key)
	second, third := newLocker(t, d.Open(t)), newLocker(t, d.Open(t))

	ctx, cancel := context.WithCancel(t.Context())
	cancelled := make(chan error)
	go func() {
		_, err := second.Lock(ctx, key)
		cancelled <- err
	}()
	d.waiting(t, key, 1)
	granted := passes(testContext(t), third, key)
	d.waiting(t, key, 2)
	cancel()
	if err := <-cancelled; !errors.Is(err, dblock.ErrCanceled) {
		t.Errorf("the cancelled waiter: %v", err)
	}
	mustRelease(t, lock)
	if err := <-granted; err != nil {
		t.Errorf("the waiter behind it: %v", err)
	}
	d.nothingLeft(t)
}
