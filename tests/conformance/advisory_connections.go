package conformance

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// session is the id of the session that serves a transaction.
func (d *Database) sessionOf(t testing.TB, tx dialect.Tx) int64 {
	t.Helper()
	native := any(tx)
	if owned, ok := tx.(dialect.OwnedTx); ok {
		native = owned.Native()
	}
	session, err := d.h.SessionOf(t.Context(), native)
	if err != nil {
		t.Fatalf("session of a transaction: %v", err)
	}
	return session
}

func advisoryOwnConnection(t *testing.T, h *Harness) {
	d := h.Database(t)
	l := newLocker(t, d.DB)
	var holders []int64
	for _, k := range accounts(3) {
		lock := mustLock(t, l, k)
		defer mustRelease(t, lock)
		holders = append(holders, d.holder(t, k))
	}
	var workers sync.WaitGroup
	for range 5 {
		workers.Go(func() {
			for range 20 {
				tx := d.Begin(t, nil)
				if session := d.sessionOf(t, tx); slices.Contains(holders, session) {
					t.Errorf("a query ran on session %d, which holds a lock", session)
				}
				if err := tx.Commit(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
}

// Either the locks' connections are not the pool's, or the pool is refused at
// once, by the constructor or by the call.
func advisoryStarvation(t *testing.T, h *Harness) {
	d := h.Database(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	db, err := h.Open(t, d.DSN, 1)
	if err == nil {
		err = newLocker(t, db).Do(ctx, func(ctx context.Context) error {
			tx, err := db.Begin(ctx, nil)
			if err != nil {
				return err
			}
			return tx.Commit(ctx)
		}, dblock.NewKey("job"))
	}
	switch {
	case err == nil:
	case errors.Is(err, dblock.ErrCapacity) && strings.Contains(err.Error(), "SetMaxOpenConns"):
		t.Logf("refused: %v", err)
	default:
		t.Errorf("%v", err)
	}
	if ctx.Err() != nil {
		t.Error("the call hung until its context ended")
	}
}

// N keys are held, and each callback wants a connection of a pool of N.
func advisoryStarvationSeveral(t *testing.T, h *Harness) {
	const n = 3
	d := h.Database(t)
	db := d.OpenMax(t, n)
	l := newLocker(t, db)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var came, all sync.WaitGroup
	came.Add(n)
	for _, key := range accounts(n) {
		all.Go(func() {
			arrived := sync.OnceFunc(came.Done)
			err := l.Do(ctx, func(ctx context.Context) error {
				arrived()
				came.Wait() // until every key is held, or was refused
				tx, err := db.Begin(ctx, nil)
				if err != nil {
					return err
				}
				return tx.Commit(ctx)
			}, key)
			arrived()
			switch {
			case err == nil:
			case errors.Is(err, dblock.ErrCapacity) && strings.Contains(err.Error(), "SetMaxOpenConns"):
				t.Logf("refused: %v", err)
			default:
				t.Errorf("%v", err)
			}
		})
	}
	all.Wait()
	if ctx.Err() != nil {
		t.Error("a call hung until its context ended")
	}
	d.free(t, accounts(n)...)
}

// The pool gives each query a connection of its own, new or another's; a hold
// stays on the session that took it.
func advisoryBusyPool(t *testing.T, h *Harness) {
	d := h.Database(t)
	db := d.OpenMax(t, 5)
	db.SQL().SetMaxIdleConns(0)
	key := dblock.NewKey("job")
	l := newLocker(t, db)
	ctx, cancel := context.WithCancel(testContext(t))
	var load sync.WaitGroup
	var queries atomic.Int64
	for range 3 {
		load.Go(func() {
			// Each query dials, and many more than these use up the machine's ports.
			pace := time.NewTicker(5 * time.Millisecond)
			defer pace.Stop()
			for ctx.Err() == nil {
				if _, err := db.SQL().ExecContext(ctx, "SELECT 1"); err == nil { // a busy machine lets some fail
					queries.Add(1)
				}
				<-pace.C
			}
		})
	}
	for range 50 {
		lock := mustLock(t, l, key)
		session := d.holder(t, key)
		if err := lock.Check(testContext(t)); err != nil {
			t.Errorf("check: %v", err)
		}
		if now := d.holder(t, key); now != session {
			t.Errorf("held by session %d, then by %d", session, now)
		}
		mustRelease(t, lock)
		if left, err := d.holdings(key); err != nil || len(left) > 0 {
			t.Fatalf("after the release: %+v, %v", left, err)
		}
	}
	cancel()
	load.Wait()
	if queries.Load() == 0 {
		t.Error("there was no load")
	}
}
