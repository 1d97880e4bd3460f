package conformance

import (
	"context"
	"database/sql"
	"errors"
	"strconv"
	"sync"
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
