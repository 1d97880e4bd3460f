package conformance

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

func advisoryTransaction(t *testing.T, h *Harness) {
	d := h.Database(t)
	l, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	keys := accounts(2)
	for _, commit := range []bool{true, false} {
		tx := d.Begin(t, nil)
		err := l.LockTx(testContext(t), tx, keys...)
		if !d.DB.Features().Transaction {
			if !errors.Is(err, dblock.ErrUnsupported) || !strings.Contains(err.Error(), "rowlock") {
				t.Errorf("%v", err)
			}
			if err := tx.Rollback(testContext(t)); err != nil {
				t.Error(err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			mustBeHeld(t, others, k)
		}
		if err := l.TryLockTx(testContext(t), tx, keys...); err != nil {
			t.Errorf("what the transaction holds already: %v", err)
		}
		end := tx.Rollback
		if commit {
			end = tx.Commit
		}
		if err := end(testContext(t)); err != nil {
			t.Fatal(err)
		}
		mustBeFree(t, others, keys...)
	}
	d.nothingLeft(t)
}

func advisoryTransactionFailure(t *testing.T, h *Harness) {
	d := h.Database(t)
	if !d.DB.Features().Transaction {
		return // shown above: refused
	}
	limited := newLocker(t, d.DB, &advisory.Options{WaitLimit: 200 * time.Millisecond})
	others := newLocker(t, d.Open(t))
	keys := accounts(3)
	lock := mustLock(t, others, keys[1])

	tx := d.Begin(t, nil)
	if err := limited.TryLockTx(testContext(t), tx, keys...); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("try: %v", err)
	}
	if err := limited.LockTx(testContext(t), tx, keys...); !errors.Is(err, dblock.ErrTimeout) {
		t.Errorf("wait limit: %v", err)
	}
	// None of the others is kept, and the transaction goes on.
	mustBeFree(t, others, keys[0], keys[2])
	if _, err := tx.ExecContext(testContext(t), "CREATE TABLE went_on (id int)"); err != nil {
		t.Errorf("the transaction after a failed acquire: %v", err)
	}
	mustRelease(t, lock)
	if err := limited.LockTx(testContext(t), tx, keys...); err != nil {
		t.Errorf("once free: %v", err)
	}
	if err := tx.Commit(testContext(t)); err != nil {
		t.Error(err)
	}
	if _, err := d.SQL.ExecContext(testContext(t), "INSERT INTO went_on VALUES (1)"); err != nil {
		t.Errorf("what the transaction did is not there: %v", err)
	}
	d.nothingLeft(t)
}

func advisoryTransactionBlocker(t *testing.T, h *Harness) {
	d := h.Database(t)
	if !d.DB.Features().Transaction {
		return // shown above: refused
	}
	limited := newLocker(t, d.DB, &advisory.Options{WaitLimit: 200 * time.Millisecond})
	keys := accounts(3)
	lock := mustLock(t, newLocker(t, d.Open(t), &advisory.Options{Application: "night shift"}), keys[1])
	holder := d.holder(t, keys[1])

	tx := d.Begin(t, nil)
	if err := limited.LockTx(testContext(t), tx, keys[0], keys[2]); err != nil { // which are not in its way
		t.Fatal(err)
	}
	for class, call := range map[error]func(context.Context, dblock.Tx, ...dblock.Key) error{
		dblock.ErrNotAcquired: limited.TryLockTx, dblock.ErrTimeout: limited.LockTx,
	} {
		err := call(testContext(t), tx, keys...)
		var e *dblock.Error
		if !errors.Is(err, class) || !errors.As(err, &e) || e.Blocker == nil {
			t.Errorf("%v, want %v and who holds the key", err, class)
			continue
		}
		if b := e.Blocker; b.Session != holder || b.Application != "night shift" || b.Since.IsZero() || b.State == "" {
			t.Errorf("%v: in the way is %+v, want session %d", err, *b, holder)
		}
	}
	mustRelease(t, lock)
}

func advisoryTransactionLimits(t *testing.T, h *Harness) {
	d := h.Database(t)
	if !d.DB.Features().Transaction {
		return // shown above: refused
	}
	key := dblock.NewKey("job")
	others := newLocker(t, d.Open(t))
	lock := mustLock(t, others, key)
	for _, limit := range limits {
		tx := d.Begin(t, nil)
		began := time.Now()
		err := newLocker(t, d.DB, &advisory.Options{WaitLimit: limit}).LockTx(testContext(t), tx, key)
		if waited := time.Since(began); !errors.Is(err, dblock.ErrTimeout) || waited < limit {
			t.Errorf("limit %v: after %v: %v", limit, waited, err)
		}
		rollback(t, tx)
	}
	for _, limit := range longLimits {
		tx := d.Begin(t, nil)
		l := newLocker(t, d.DB, &advisory.Options{WaitLimit: limit})
		granted := make(chan error, 1)
		go func() { granted <- l.LockTx(testContext(t), tx, key) }()
		d.waiting(t, key, 1)
		mustRelease(t, lock)
		if err := <-granted; err != nil {
			t.Errorf("limit %v: %v", limit, err)
		}
		rollback(t, tx)
		lock = mustLock(t, others, key)
	}
	mustRelease(t, lock)
}
