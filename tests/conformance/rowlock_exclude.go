package conformance

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

func rowsExclude(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	key := dblock.NewKey("account", "1")

	t.Run("a waiter goes on when the holder's transaction ends", func(t *testing.T) {
		rows := rowlock.New(d.DB)
		holder := d.Begin(t, nil)
		defer rollback(t, holder)
		if err := rows.Lock(ctx, holder, key); err != nil {
			t.Fatal(err)
		}
		if err := rows.Lock(ctx, holder, key); err != nil {
			t.Fatalf("again in the same transaction: %v", err)
		}
		var ended atomic.Bool
		granted := make(chan error, 1)
		waiter := d.Begin(t, nil)
		defer rollback(t, waiter)
		go func() {
			err := rows.Lock(ctx, waiter, key)
			if !ended.Load() {
				t.Errorf("lock returned %v while another transaction held the key", err)
			}
			granted <- err
		}()
		d.awaitBlocked(t, 1)
		ended.Store(true)
		commit(t, holder)
		if err := <-granted; err != nil {
			t.Fatal(err)
		}
	})

	t.Run("one at a time", func(t *testing.T) {
		var inside atomic.Int32
		var all sync.WaitGroup
		for _, db := range []dblock.DB{d.DB, d.Open(t)} { // two applications
			rows := rowlock.New(db)
			for range 4 {
				all.Go(func() {
					for range 25 {
						err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
							if inside.Add(1) != 1 {
								t.Error("two holders at once")
							}
							defer inside.Add(-1)
							return execute(ctx, tx, `SELECT 1`) // long enough for others to come in
						}, key)
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
		}
		all.Wait()
	})
}
