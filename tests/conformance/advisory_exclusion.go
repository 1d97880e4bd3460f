package conformance

import (
	"context"
	"errors"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

func advisoryExclusion(t *testing.T, h *Harness) {
	d := h.Database(t)
	mine, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	key := dblock.NewKey("projector", "orders")

	for range 3 {
		lock := mustLock(t, mine, key)
		mustBeHeld(t, others, key)
		mustBeFree(t, others, dblock.NewKey("projector", "invoices"))
		if err := lock.Check(testContext(t)); err != nil {
			t.Errorf("check while held: %v", err)
		}
		mustRelease(t, lock)
		mustBeFree(t, others, key)
	}

	// A waiter gets the key when the holder gives it back.
	lock := mustLock(t, mine, key)
	granted := passes(testContext(t), others, key)
	d.waiting(t, key, 1)
	mustRelease(t, lock)
	if err := <-granted; err != nil {
		t.Errorf("the waiter: %v", err)
	}
	d.nothingLeft(t)
}

func advisoryBlocker(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("report", "2026-11")
	lock := mustLock(t, newLocker(t, d.DB, &advisory.Options{Application: "billing"}), key)
	defer mustRelease(t, lock)

	err := mustBeHeld(t, newLocker(t, d.Open(t)), key)
	var details *dblock.Error
	if !errors.As(err, &details) || details.Blocker == nil {
		t.Fatalf("no blocker in %v", err)
	}
	if details.Blocker.Session != d.holder(t, key) {
		t.Errorf("blocker %+v, the server shows session %d", details.Blocker, d.holder(t, key))
	}
	t.Log(err)
}

// Counting: what a holder does three times it must undo three times in the
// database; dblock does not let it begin.
func advisoryReentry(t *testing.T, h *Harness) {
	d := h.Database(t)
	l := newLocker(t, d.DB)
	key := dblock.NewKey("job")
	lock := mustLock(t, l, key, key, key)
	mustBeHeld(t, l, key)
	mustRelease(t, lock)
	mustBeFree(t, newLocker(t, d.Open(t)), key)
	d.nothingLeft(t)
}

func advisoryPanic(t *testing.T, h *Harness) {
	d := h.Database(t)
	l := newLocker(t, d.DB)
	key := dblock.NewKey("job")
	func() {
		defer func() {
			if r := recover(); r != "boom" {
				t.Errorf("recovered %v", r)
			}
		}()
		_ = l.Do(testContext(t), func(context.Context) error { panic("boom") }, key)
	}()
	mustBeFree(t, newLocker(t, d.Open(t)), key)
}

func advisoryClose(t *testing.T, h *Harness) {
	d := h.Database(t)
	l, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	key, busy := dblock.NewKey("job"), dblock.NewKey("busy")
	lock := mustLock(t, l, key)
	foreign := mustLock(t, others, busy)
	waiter := make(chan error)
	for range 2 { // one of them in the database
		go func() {
			_, err := l.Lock(testContext(t), busy)
			waiter <- err
		}()
	}
	d.waiting(t, busy, 1)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-waiter; !errors.Is(err, dblock.ErrClosed) {
			t.Errorf("a waiter: %v", err)
		}
	}
	if err := lock.Err(); !errors.Is(err, dblock.ErrClosed) {
		t.Errorf("the holder: %v", err)
	}
	mustRelease(t, foreign)
	d.nothingLeft(t)
	mustBeFree(t, others, key, busy)
}
