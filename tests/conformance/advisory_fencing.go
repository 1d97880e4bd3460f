package conformance

import (
	"errors"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/rowlock"
)

func advisoryFencing(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	fenced := &advisory.Options{Fencing: true}
	a, b := newLocker(t, d.DB, fenced), newLocker(t, d.Open(t), fenced)
	key, other := dblock.NewKey("projector"), dblock.NewKey("another")

	var last int64
	grant := func(lock *advisory.Lock) {
		t.Helper()
		if lock.Token() <= last {
			t.Errorf("number %d after %d", lock.Token(), last)
		}
		last = lock.Token()
	}
	for range 3 {
		lock := mustLock(t, a, key)
		grant(lock)
		mustBeHeld(t, b, key)
		mustRelease(t, lock)
		lock, err := b.TryLock(testContext(t), key)
		if err != nil {
			t.Fatal(err)
		}
		grant(lock)
		mustRelease(t, lock)
	}

	// Killed before it could release: the number is not given again.
	lost := mustLock(t, a, key)
	grant(lost)
	d.kill(t, d.holder(t, key))
	<-lost.Done()
	lock := mustLock(t, b, key)
	grant(lock)
	mustRelease(t, lock)

	// Each key of a call has its own.
	both := mustLock(t, a, other, key, other)
	ofKey, ok := both.TokenOf(key)
	if !ok || ofKey <= last || both.Token() <= 0 {
		t.Errorf("numbers %d and %d after %d", both.Token(), ofKey, last)
	}
	mustRelease(t, both)
	if d.DB.Features().Shared {
		shared := mustLock(t, a, key.Shared())
		if shared.Token() <= ofKey {
			t.Errorf("shared: number %d after %d", shared.Token(), ofKey)
		}
		mustRelease(t, shared)
	}
	d.nothingLeft(t)
}

// The lock table serves row locks too: an advisory lock's number waits for no
// transaction that holds the key's row.
func advisoryFencingBesideRows(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	key := dblock.NewKey("account", "1")
	tx := d.Begin(t, nil)
	if err := rowlock.New(d.DB).Lock(testContext(t), tx, key); err != nil {
		t.Fatal(err)
	}
	fenced := newLocker(t, d.Open(t), &advisory.Options{Fencing: true})
	lock, err := fenced.TryLock(testContext(t), key)
	if err != nil {
		t.Fatalf("while a transaction holds the row: %v", err)
	}
	if lock.Token() <= 0 {
		t.Errorf("number %d", lock.Token())
	}
	mustRelease(t, lock)
	if err := tx.Rollback(testContext(t)); err != nil {
		t.Error(err)
	}
}

func advisoryFencingSetup(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("job")
	l := newLocker(t, d.DB, &advisory.Options{Fencing: true, Table: "absent"})
	for what, call := range map[string]func() error{
		"lock": func() error { _, err := l.Lock(testContext(t), key); return err },
		"try":  func() error { _, err := l.TryLock(testContext(t), key); return err },
		"several": func() error {
			_, err := l.Lock(testContext(t), key, dblock.NewKey("another"))
			return err
		},
	} {
		if err := call(); !errors.Is(err, dblock.ErrSetup) || !strings.Contains(err.Error(), "setup") || !strings.Contains(err.Error(), "absent") {
			t.Errorf("%s: %v", what, err)
		}
	}
	d.nothingLeft(t)
	mustBeFree(t, newLocker(t, d.Open(t)), key)
}
