package conformance

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
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
