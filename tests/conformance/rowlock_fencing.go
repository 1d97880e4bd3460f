package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// fenceRow is the id of the row that a key's numbers come from.
func fenceRow(key dblock.Key) int64 { return dialect.FenceRows([]dialect.Key{key.ResolveID()})[0].ID }

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

	fences := draw(d.DB, true, b, a, b)
	if fences[1] <= latest || fences[2] != fences[0] {
		t.Errorf("numbers %v of b, a, b after %d of a", fences, latest)
	}
	for i, key := range []dblock.Key{b, a} {
		if n := d.number(t, fmt.Sprintf(`SELECT fence FROM locks WHERE id = %d`, fenceRow(key))); int64(n) != fences[i] {
			t.Errorf("the number of %s is %d, in the table %d", key, fences[i], n)
		}
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

// Whatever becomes of the holder, its rows and the table, a key has one sequence of
// numbers, however it is locked.
func rowsFencingForEver(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	key := dblock.NewKey("projector", "orders")
	rows := rowlock.New(d.DB)
	locks := newLocker(t, d.Open(t), &advisory.Options{Fencing: true})
	var last int64
	grows := func(what string, token int64) {
		t.Helper()
		if token <= last {
			t.Errorf("%s: number %d after %d", what, token, last)
		}
		if token >= 1<<53 {
			t.Errorf("%s: number %d is no integer of JavaScript's", what, token)
		}
		last = token
	}
	drawn := func(what string, end func(tx dialect.OwnedTx)) {
		t.Helper()
		tx := d.Begin(t, nil)
		fences, err := rows.Fence(ctx, tx, key)
		if err != nil {
			t.Fatal(err)
		}
		grows(what, fences[0])
		end(tx)
	}
	commits := func(tx dialect.OwnedTx) { commit(t, tx) }
	rollsBack := func(tx dialect.OwnedTx) { rollback(t, tx) }
	drawn("first", commits)
	drawn("after a commit", rollsBack)
	drawn("after a rollback", func(tx dialect.OwnedTx) {
		d.kill(t, d.sessionOf(t, tx)) // between the grant and the commit
		eventually(t, "the transaction is gone", func() bool { return d.number(t, openTransactions[d.DB.Name()]) == 0 })
	})
	drawn("after the holder was killed", rollsBack)
	lock := mustLock(t, locks, key)
	grows("advisory", lock.Token())
	mustRelease(t, lock)
	drawn("after an advisory lock", rollsBack)
	for what, statement := range map[string]string{"deleted": `DELETE FROM locks`, "truncated": `TRUNCATE TABLE locks`} {
		d.exec(t, statement)
		drawn(what, commits)
		d.exec(t, statement)
		lock := mustLock(t, locks, key)
		grows(what+", advisory", lock.Token())
		mustRelease(t, lock)
	}
}

// The connection for the numbers is none that transactions can use up, or nobody waits
// for it: 8 transactions on a pool of three, each with a key of its own.
func rowsFencingSmallPool(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	rows := rowlock.New(d.OpenMax(t, 3))
	ctx := testContext(t)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 5 {
				err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
					_, err := rows.Fence(ctx, tx, dblock.NewKey("fenced", fmt.Sprint(i)))
					return err
				}, dblock.NewKey("job", fmt.Sprint(i)))
				// Of a driver other than pgx, until a moment when one of the pool is free.
				if err != nil && !errors.Is(err, dblock.ErrCapacity) {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
		_, err := rows.Fence(ctx, tx, dblock.NewKey("fenced", "0"))
		return err
	}, dblock.NewKey("job", "0"))
	if err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// A pool of one has a connection for the numbers, or says that it has none.
func rowsFencingPoolOfOne(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, 1)
	rows := rowlock.New(db)
	ctx := testContext(t)
	var fences []int64
	err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) (err error) {
		fences, err = rows.Fence(ctx, tx, dblock.NewKey("fenced"))
		return err
	}, dblock.NewKey("job"))
	switch {
	case err == nil && len(fences) == 1 && fences[0] > 0:
	case errors.Is(err, dblock.ErrCapacity) && strings.Contains(err.Error(), "SetMaxOpenConns"):
	default:
		t.Errorf("%v, %v", fences, err)
	}
}
