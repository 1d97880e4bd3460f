package conformance

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

func rowsFencing(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	a, b := dblock.NewKey("a"), dblock.NewKey("b")

	// draw commits, or rolls back.
	draw := func(db dblock.DB, keep bool, keys ...dblock.Key) []int64 {
		tx, err := db.Begin(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer rollback(t, tx)
		fences, err := rowlock.New(db).Fence(ctx, tx, keys...)
		if err != nil {
			t.Fatal(err)
		}
		if keep {
			commit(t, tx)
		}
		return fences
	}

	first := draw(d.DB, true, a)[0]
	if first < 1 {
		t.Errorf("the first number is %d, want more than 0, which means none", first)
	}
	for range 3 {
		draw(d.DB, true, a)
	}
	draw(d.DB, false, a)
	latest := draw(d.Open(t), true, a)[0] // another application
	if latest < first+4 {
		t.Errorf("number %d after %d and three more grants", latest, first)
	}

	// a has been drawn more often than b, so the numbers tell the keys apart.
	fences := draw(d.DB, true, b, a, b)
	if fences[1] <= latest || fences[0] >= latest || fences[2] != fences[0] {
		t.Errorf("numbers %v of b, a, b after %d of a", fences, latest)
	}

	// Drawn under the lock, the numbers come in the order of the grants.
	var granted []int64
	var all sync.WaitGroup
	rows := rowlock.New(d.DB)
	for range 8 {
		all.Go(func() {
			for range 5 {
				err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
					fences, err := rows.Fence(ctx, tx, b)
					if err == nil {
						granted = append(granted, fences[0])
					}
					return err
				}, a)
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if len(granted) != 40 || !slices.IsSorted(granted) || len(slices.Compact(slices.Clone(granted))) != len(granted) {
		t.Errorf("numbers do not grow with each grant: %v", granted)
	}
}
