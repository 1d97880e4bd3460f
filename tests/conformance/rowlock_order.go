package conformance

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

// The transactions are the application's: no retry hides a deadlock.
func rowsOppositeOrders(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, crowd)
	rows := rowlock.New(db)
	ctx := testContext(t)
	const rounds, keysPerRound = 10, 5
	round := func(n int) []dblock.Key {
		keys := make([]dblock.Key, keysPerRound)
		for i := range keys {
			keys[i] = dblock.NewKey("order", strconv.Itoa(n), strconv.Itoa(i))
		}
		return keys
	}
	lockAll := func(ctx context.Context, keys []dblock.Key) error {
		tx, err := db.Begin(ctx, nil)
		if err != nil {
			return err
		}
		defer rollback(t, tx)
		if err := rows.Lock(ctx, tx, keys...); err != nil {
			return err
		}
		return tx.Commit(ctx)
	}
	var all sync.WaitGroup
	for range crowd {
		all.Go(func() {
			for n := range rounds {
				keys := round(n)
				keys = append(keys, keys[rand.IntN(keysPerRound)]) // a duplicate
				rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
				if err := lockAll(ctx, keys); err != nil {
					t.Errorf("round %d: %v", n, err)
					return
				}
			}
		})
	}
	all.Wait()
}
