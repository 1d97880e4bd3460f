package conformance

import (
	"context"
	"database/sql"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

// Half of the transactions that create a row roll back.
func rowsFirstUse(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, crowd)
	unwanted := errors.New("rolled back on purpose")
	for _, isolation := range []sql.IsolationLevel{
		sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable,
	} {
		t.Run(isolation.String(), func(t *testing.T) {
			ctx := testContext(t)
			rows := rowlock.New(db, &rowlock.Options{Isolation: isolation})
			for round := range 2 {
				key := func(i int) dblock.Key {
					return dblock.NewKey("first use", isolation.String(), strconv.Itoa(round), strconv.Itoa(i))
				}
				var all sync.WaitGroup
				for i := range 50 {
					all.Go(func() {
						err := rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error {
							if i%2 == 0 {
								return unwanted
							}
							return nil
						}, key(i%3), key((i+1)%3))
						if err != nil && err != unwanted {
							t.Error(err)
						}
					})
				}
				all.Wait()
			}
		})
	}
}

// Lock in the transaction of the caller, with 50 at once on fresh keys, of whom half
// roll back.
func rowsFirstUseByCallers(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, crowd)
	for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(isolation.String(), func(t *testing.T) {
			ctx := testContext(t)
			rows := rowlock.New(db)
			var again atomic.Int64
			for round := range 2 {
				key := func(i int) dblock.Key {
					return dblock.NewKey("callers", isolation.String(), strconv.Itoa(round), strconv.Itoa(i%3))
				}
				once := func(i int) error {
					tx, err := db.Begin(ctx, &sql.TxOptions{Isolation: isolation})
					if err != nil {
						return err
					}
					if err := rows.Lock(ctx, tx, key(i), key(i+1)); err != nil {
						return errors.Join(err, tx.Rollback(ctx))
					}
					if i%2 == 0 {
						return tx.Rollback(ctx)
					}
					return tx.Commit(ctx)
				}
				var all sync.WaitGroup
				for i := range 50 {
					all.Go(func() {
						err := once(i)
						// PostgreSQL does not let a transaction lock what is newer than its
						// snapshot: the pattern is to start it again, as InTx does.
						for db.Name() == "postgres" && isolation != sql.LevelReadCommitted && errors.Is(err, dblock.ErrSerialization) {
							again.Add(1)
							err = once(i)
						}
						if err != nil {
							t.Error(err)
						}
					})
				}
				all.Wait()
			}
			t.Logf("%d times again", again.Load())
		})
	}
}
