package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/rowlock"
)

func rowsCancelledWait(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	rows := rowlock.New(d.DB)
	key := dblock.NewKey("account", "1")
	holder := d.Begin(t, nil)
	defer rollback(t, holder)
	if err := rows.Lock(testContext(t), holder, key); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(testContext(t))
	result := make(chan error, 1)
	go func() {
		result <- rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error {
			t.Error("ran without the lock")
			return nil
		}, key)
	}()
	d.awaitBlocked(t, 1)
	cancel()
	if err := <-result; !errors.Is(err, dblock.ErrCanceled) || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled wait: %v, want %v", err, dblock.ErrCanceled)
	}
	d.awaitBlocked(t, 0) // on the server too, and while the holder goes on

	ctx, cancel = context.WithTimeout(testContext(t), 100*time.Millisecond)
	defer cancel()
	err := rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error {
		t.Error("ran without the lock")
		return nil
	}, key)
	if !errors.Is(err, dblock.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait with a deadline: %v, want %v", err, dblock.ErrTimeout)
	}
	commit(t, holder)
	d.checkNothingOpen(t, key)
}

// Every write lands inside of its transaction or not at all, whenever ctx ends.
func rowsCancelledAnytime(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows, key := rowlock.New(d.DB), dblock.NewKey("account", "1")
	d.cancelledAnytime(t, func(ctx context.Context, fn func(context.Context, dblock.Tx) error) error {
		return rowlock.InTx(ctx, rows, fn, key)
	})
	d.checkNothingOpen(t, key)
}

func advisoryCancelledAnytime(t *testing.T, h *Harness) {
	d := h.Database(t)
	l, key := newLocker(t, d.DB), dblock.NewKey("account", "1")
	d.cancelledAnytime(t, func(ctx context.Context, fn func(context.Context, dblock.Tx) error) error {
		return advisory.InTx(ctx, l, fn, key)
	})
	d.checkNothingOpen(t, key)
	d.free(t, key)
}

func advisoryTransactionCancelledAnytime(t *testing.T, h *Harness) {
	d := h.Database(t)
	if !d.DB.Features().Transaction {
		return // refused, as another clause shows
	}
	l, key := newLocker(t, d.DB), dblock.NewKey("account", "1")
	d.cancelledAnytime(t, func(ctx context.Context, fn func(context.Context, dblock.Tx) error) error {
		tx, err := d.DB.Begin(ctx, nil)
		if err != nil {
			return err
		}
		err = l.LockTx(ctx, tx, key)
		if err == nil {
			err = fn(ctx, tx)
		}
		if err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), tx.Rollback(ctx))
		}
		if err = tx.Commit(ctx); err != nil {
			err = fmt.Errorf("it is unknown whether it was committed: %w", err)
		}
		return err
	})
	d.checkNothingOpen(t, key)
	d.free(t, key)
}

func advisoryDoTxCancelledAnytime(t *testing.T, h *Harness) {
	d := h.Database(t)
	l, key := newLocker(t, d.DB), dblock.NewKey("account", "1")
	if !d.DB.Features().Transaction {
		return // refused, as another clause shows
	}
	d.cancelledAnytime(t, func(ctx context.Context, fn func(context.Context, dblock.Tx) error) error {
		return advisory.DoTx(ctx, l, fn, key)
	})
	d.checkNothingOpen(t, key)
	d.free(t, key)
}

// free waits until the server shows neither holder nor waiter of the keys.
func (d *Database) free(t testing.TB, keys ...dblock.Key) {
	t.Helper()
	eventually(t, "the keys are free", func() bool {
		found, err := d.holdings(keys...)
		return err == nil && len(found) == 0
	})
}

// cancelledAnytime calls inTx, which runs its function in a guarded transaction,
// with contexts that end at random moments.
func (d *Database) cancelledAnytime(t *testing.T, inTx func(ctx context.Context, fn func(context.Context, dblock.Tx) error) error) {
	d.Setup(t)
	d.exec(t, `CREATE TABLE written (n INT PRIMARY KEY, half INT NOT NULL)`)
	write := func(ctx context.Context, n int64, locked func()) error {
		return inTx(ctx, func(ctx context.Context, tx dblock.Tx) error {
			locked()
			if err := execute(ctx, tx, fmt.Sprintf(`INSERT INTO written VALUES (%d, 1)`, 2*n)); err != nil {
				return err
			}
			return execute(ctx, tx, fmt.Sprintf(`INSERT INTO written VALUES (%d, 2)`, 2*n+1))
		})
	}
	const goroutines = 4
	writes := crossings(t) / goroutines
	start := time.Now()
	for n := range int64(3) {
		if err := write(testContext(t), n, func() {}); err != nil {
			t.Fatal(err)
		}
	}
	usual := time.Since(start) / 3

	var last, succeeded, unknown atomic.Int64
	last.Store(2)
	succeeded.Store(3)
	var all sync.WaitGroup
	for range goroutines {
		all.Go(func() {
			for i := range writes {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				locked := func() {}
				if i%2 == 0 { // at any moment at all, or of the time with the lock
					time.AfterFunc(rand.N(goroutines*usual), cancel)
				} else {
					locked = func() { time.AfterFunc(rand.N(usual), cancel) }
				}
				err := write(ctx, last.Add(1), locked)
				cancel()
				switch {
				case err == nil:
					succeeded.Add(1)
				case strings.Contains(err.Error(), "unknown whether"):
					unknown.Add(1)
				case !d.fromCancel(err):
					t.Errorf("unexpected error: %v", err)
				}
			}
		})
	}
	all.Wait()
	halves := d.number(t, `SELECT count(*) FROM written WHERE half = 1`)
	if others := d.number(t, `SELECT count(*) FROM written WHERE half = 2`); others != halves {
		t.Errorf("%d first halves and %d second halves were written", halves, others)
	}
	if least, limit := int(succeeded.Load()), int(succeeded.Load()+unknown.Load()); halves < least || halves > limit {
		t.Errorf("%d transactions were committed; %d succeeded and %d are unknown", halves, least, limit-least)
	}
	t.Logf("%d of %d committed, %d unknown", succeeded.Load(), goroutines*writes+3, unknown.Load())
}

// fromCancel reports whether the error is that of a cancelled context: as such, or
// as the connection that it cut or kept from being made. What the function's own
// statements return comes back as the driver's.
func (d *Database) fromCancel(err error) bool {
	err = d.DB.Classify(err)
	for _, class := range []error{dblock.ErrCanceled, dblock.ErrLost, dblock.ErrUnavailable, context.Canceled} {
		if errors.Is(err, class) {
			return true
		}
	}
	return false
}
