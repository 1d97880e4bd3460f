package conformance

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

// refusesDoTx shows that a database without locks of transactions says so.
func (d *Database) refusesDoTx(t testing.TB, l *advisory.Locker) bool {
	t.Helper()
	if d.DB.Features().Transaction {
		return false
	}
	err := advisory.DoTx(testContext(t), l, func(context.Context, dblock.Tx) error {
		t.Error("ran without a lock")
		return nil
	}, dblock.NewKey("job"))
	if !errors.Is(err, dblock.ErrUnsupported) || !strings.Contains(err.Error(), "rowlock") {
		t.Errorf("%v", err)
	}
	return true
}

func advisoryDoTx(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	l, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	if d.refusesDoTx(t, l) {
		return
	}
	keys := accounts(3)
	insert := func(ctx context.Context, tx dblock.Tx) error { return execute(ctx, tx, insertWork) }

	var successor sync.WaitGroup
	err := advisory.DoTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error {
		for _, k := range keys {
			if holder, session := d.holder(t, k), d.sessionOf(t, tx); holder != session {
				t.Errorf("session %d holds %s, and session %d does the work", holder, k, session)
			}
			_ = mustBeHeld(t, others, k)
		}
		if err := l.TryLockTx(ctx, tx, keys...); err != nil {
			t.Errorf("what the transaction holds already: %v", err)
		}
		successor.Go(func() {
			lock, err := others.Lock(testContext(t), keys[0])
			if err != nil {
				t.Error(err)
				return
			}
			d.mustHaveDone(t, 1) // committed before the key was free
			if err := lock.Release(testContext(t)); err != nil {
				t.Error(err)
			}
		})
		d.waiting(t, keys[0], 1)
		return insert(ctx, tx)
	}, keys...)
	if err != nil {
		t.Error(err)
	}
	successor.Wait()
	mustBeFree(t, others, keys...)

	failure := errors.New("no")
	err = advisory.DoTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error {
		if err := insert(ctx, tx); err != nil {
			t.Error(err)
		}
		return failure
	}, keys...)
	if err != failure {
		t.Errorf("%v, want the function's own error", err)
	}
	mustBeFree(t, others, keys...)

	func() {
		defer func() {
			if got := recover(); got != "boom" {
				t.Errorf("recovered %v, want the function's panic", got)
			}
		}()
		_ = advisory.DoTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error {
			if err := insert(ctx, tx); err != nil {
				t.Error(err)
			}
			panic("boom")
		}, keys...)
	}()
	mustBeFree(t, others, keys...)

	for name, end := range endings {
		err := advisory.DoTx(testContext(t), l, end, keys...) // gets the driver's own transaction
		if !errors.Is(err, dblock.ErrClosed) || !strings.Contains(err.Error(), "ended the transaction itself") {
			t.Errorf("%s: %v, want %v with the reason", name, err, dblock.ErrClosed)
		}
	}
	d.mustHaveDone(t, 1)
	d.nothingLeft(t)
}

func advisoryDoTxWait(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	if l := newLocker(t, d.DB); d.refusesDoTx(t, l) {
		return
	}
	others := newLocker(t, d.Open(t), &advisory.Options{Application: "night shift"})
	keys := accounts(3)
	lock := mustLock(t, others, keys[1])
	never := func(context.Context, dblock.Tx) error {
		t.Error("ran without the lock")
		return nil
	}
	// The others are free afterwards, and nobody waits.
	check := func(what string, err error, class error) {
		t.Helper()
		if !errors.Is(err, class) {
			t.Errorf("%s: %v, want %v", what, err, class)
		}
		eventually(t, "no transaction is open", func() bool { return d.number(t, openTransactions[d.DB.Name()]) == 0 })
		mustBeFree(t, others, keys[0], keys[2])
	}

	wait := func(ctx context.Context, l *advisory.Locker) <-chan error {
		result := make(chan error, 1)
		go func() { result <- advisory.DoTx(ctx, l, never, keys...) }()
		d.waiting(t, keys[1], 1)
		return result
	}
	l := newLocker(t, d.DB)
	ctx, cancel := context.WithCancel(testContext(t))
	result := wait(ctx, l)
	cancel()
	check("cancel", <-result, dblock.ErrCanceled)

	ctx, cancel = context.WithTimeout(testContext(t), 100*time.Millisecond)
	defer cancel()
	check("deadline", advisory.DoTx(ctx, l, never, keys...), dblock.ErrTimeout)

	ctx, cancel = context.WithCancel(testContext(t))
	result = wait(ctx, l)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	d.waiting(t, keys[1], 1) // Close leaves it alone
	cancel()
	check("closed during the wait", <-result, dblock.ErrCanceled)
	check("closed before", advisory.DoTx(testContext(t), l, never, keys...), dblock.ErrClosed)

	began := time.Now()
	const limit = 200 * time.Millisecond
	limited := newLocker(t, d.DB, &advisory.Options{WaitLimit: limit})
	err := advisory.DoTx(testContext(t), limited, never, keys...)
	check("wait limit", err, dblock.ErrTimeout)
	if waited := time.Since(began); waited < limit || waited > 30*time.Second {
		t.Errorf("gave up after %v, the limit is %v", waited, limit)
	}
	var e *dblock.Error
	if !errors.As(err, &e) || e.Blocker == nil || e.Blocker.Application != "night shift" {
		t.Errorf("%v does not say who holds the key", err)
	}

	// A limited wait that ends well holds all keys.
	granted := make(chan error, 1)
	go func() {
		granted <- advisory.DoTx(testContext(t), newLocker(t, d.DB, &advisory.Options{WaitLimit: time.Minute}),
			func(_ context.Context, tx dblock.Tx) error {
				for _, k := range keys {
					if holder, session := d.holder(t, k), d.sessionOf(t, tx); holder != session {
						t.Errorf("session %d holds %s, and session %d does the work", holder, k, session)
					}
				}
				return nil
			}, keys...)
	}()
	d.waiting(t, keys[1], 1)
	mustRelease(t, lock)
	if err := <-granted; err != nil {
		t.Error(err)
	}
	d.nothingLeft(t)
}

// Two transactions ask for each other's key; the victim's first write is undone.
func advisoryDoTxDeadlock(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	var retries atomic.Int64
	l := newLocker(t, d.DB, &advisory.Options{Observer: countRetries(t, &retries)})
	if d.refusesDoTx(t, l) {
		return
	}
	keys := accounts(2)
	var crossed, all sync.WaitGroup
	crossed.Add(2)
	for i, first := range keys {
		all.Go(func() {
			runs := 0
			err := advisory.DoTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error {
				if err := execute(ctx, tx, insertWork); err != nil {
					return err
				}
				if runs++; runs == 1 {
					crossed.Done()
					crossed.Wait()
				}
				return l.LockTx(ctx, tx, keys[1-i])
			}, first)
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if retries.Load() < 1 {
		t.Error("no transaction started again")
	}
	d.mustHaveDone(t, 2)
	d.nothingLeft(t)
}

func advisoryDoTxLost(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	l, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	if d.refusesDoTx(t, l) {
		return
	}
	key := dblock.NewKey("job")
	for _, again := range []bool{true, false} {
		runs := 0
		err := advisory.DoTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error {
			runs++
			if err := execute(ctx, tx, insertWork); err != nil {
				return err
			}
			d.kill(t, d.sessionOf(t, tx))
			mustRelease(t, mustLock(t, others, key)) // so the work is gone by now
			if !again {
				return nil // and the commit finds out
			}
			return execute(ctx, tx, insertWork)
		}, key)
		if class := dialect.ClassOf(d.DB.Classify(err)); class != dblock.ErrLost || runs != 1 {
			t.Errorf("statement after the loss: %t: after %d runs: %v", again, runs, err)
		}
		d.mustHaveDone(t, 0)
	}
	d.nothingLeft(t)
}
