package conformance

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// A transaction that dblock began, or that the context tells of, is not for an inner
// Retry to go on with. Around a session's lock there is none.
func retryInside(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	key := dblock.NewKey("a")
	victim := &dialect.Error{Class: dblock.ErrDeadlock, Err: errors.New("as if")}
	locks := newLocker(t, d.DB, &advisory.Options{Retry: once})
	rows := rowlock.New(d.DB, &rowlock.Options{Retry: once})
	again := func(ctx context.Context) (runs int, err error) {
		err = deadlock.Retry(ctx, d.DB, func(context.Context) error {
			runs++
			return victim
		}, &deadlock.RetryOptions{Attempts: 3, Backoff: time.Millisecond})
		return runs, err
	}
	ways := map[string]func(work func(context.Context) error) error{
		"rowlock.InTx": func(work func(context.Context) error) error {
			return rowlock.InTx(ctx, rows, func(ctx context.Context, _ dblock.Tx) error { return work(ctx) }, key)
		},
		"advisory.InTx": func(work func(context.Context) error) error {
			return advisory.InTx(ctx, locks, func(ctx context.Context, _ dblock.Tx) error { return work(ctx) }, key)
		},
		"the caller's": func(work func(context.Context) error) error {
			tx := d.Begin(t, nil)
			defer rollback(t, tx)
			return work(deadlock.WithTx(ctx, d.DB, tx))
		},
		"Do": func(work func(context.Context) error) error { return locks.Do(ctx, work, key) },
	}
	if d.DB.Features().Transaction {
		ways["DoTx"] = func(work func(context.Context) error) error {
			return advisory.DoTx(ctx, locks, func(ctx context.Context, _ dblock.Tx) error { return work(ctx) }, key)
		}
	}
	for name, way := range ways {
		want := 1
		if name == "Do" {
			want = 3
		}
		err := way(func(ctx context.Context) error {
			runs, err := again(ctx)
			if runs != want {
				t.Errorf("%s: %d runs, want %d", name, runs, want)
			}
			return err
		})
		if !errors.Is(err, dblock.ErrDeadlock) {
			t.Errorf("%s: %v, want the failure", name, err)
		}
	}
}

// A row that is not free in time leaves the transaction's other locks on MySQL and
// MariaDB, so the whole starts again, with nothing held in between.
func retryTimeouts(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	a, b := dblock.NewKey("a"), dblock.NewKey("b")
	rows := rowlock.New(d.DB)
	holder := d.Begin(t, nil)
	if err := rows.Lock(ctx, holder, b); err != nil {
		t.Fatal(err)
	}
	limit := map[string]string{
		"postgres":  `SET LOCAL lock_timeout = 100`,
		"mysql":     `SET SESSION innodb_lock_wait_timeout = 1`,
		"mariadb":   `SET SESSION innodb_lock_wait_timeout = 1`,
		"sqlserver": `SET LOCK_TIMEOUT 100`,
	}[d.DB.Name()]
	transfer := func(runs *int) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			*runs++
			tx, err := d.DB.Begin(ctx, nil)
			if err != nil {
				return err
			}
			defer rollback(t, tx)
			if err := execute(ctx, tx, limit); err != nil {
				return err
			}
			if err := rows.Lock(ctx, tx, a); err != nil {
				return err
			}
			if err := rows.Lock(ctx, tx, b); err != nil {
				return err
			}
			return tx.Commit(ctx)
		}
	}
	runs := 0
	if err := deadlock.Retry(ctx, d.DB, transfer(&runs)); !errors.Is(err, dblock.ErrTimeout) || runs != 1 {
		t.Errorf("%d runs, %v: want %v after one", runs, err, dblock.ErrTimeout)
	}
	runs = 0
	err := deadlock.Retry(ctx, d.DB, transfer(&runs), &deadlock.RetryOptions{
		Timeouts: true, Backoff: time.Millisecond,
		Observer: dblock.ObserverFunc(func(ctx context.Context, e dblock.Event) {
			if !errors.Is(e.Err, dblock.ErrTimeout) {
				t.Errorf("%v, want %v", e.Err, dblock.ErrTimeout)
			}
			tx := d.Begin(t, nil)
			defer rollback(t, tx)
			if err := rows.TryLock(ctx, tx, a); err != nil {
				t.Errorf("in the pause: %v", err)
			}
			if runs == 2 {
				rollback(t, holder)
			}
		}),
	})
	if err != nil || runs != 3 {
		t.Errorf("%d runs, %v", runs, err)
	}
}
