package conformance

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"path/filepath"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/rowlock"
)

// inside is a way to do something while a key is held: with the context that the holder
// has.
type inside func(ctx context.Context, key dblock.Key, work func(ctx context.Context) error) error

// checked are lockers with one Checker.
type checked struct {
	checker  *deadlock.Checker
	locks    *advisory.Locker
	rows     *rowlock.Locker
	accounts *rowlock.Rows
	once     *rowlock.Once
}

func (d *Database) checked(t *testing.T, o *deadlock.CheckerOptions) checked {
	c := deadlock.NewChecker(o)
	return checked{c,
		newLocker(t, d.DB, &advisory.Options{Checker: c}),
		rowlock.New(d.DB, &rowlock.Options{Checker: c}),
		rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: "account", Key: []string{"name"}, Checker: c}),
		rowlock.NewOnce(d.DB, &rowlock.OnceOptions{Checker: c})}
}

// setUpAccounts makes the rows of the keys that checks use.
func (d *Database) setUpAccounts(t *testing.T) {
	d.Setup(t)
	d.exec(t, `CREATE TABLE account (name VARCHAR(20) NOT NULL PRIMARY KEY)`)
	d.exec(t, `INSERT INTO account VALUES ('a/1'), ('b/1')`)
}

// inTxOf runs work in a transaction of the caller's that has locked.
func inTxOf(db dblock.DB, lock func(context.Context, dblock.Tx, ...dblock.Key) error) inside {
	return func(ctx context.Context, key dblock.Key, work func(context.Context) error) error {
		tx, err := db.Begin(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback(ctx)
		if err := lock(ctx, tx, key); err != nil {
			return err
		}
		return work(deadlock.WithTx(ctx, db, tx))
	}
}

// rowsOf lets keys name rows of a table.
func rowsOf(lock func(context.Context, dblock.Tx, ...rowlock.PrimaryKey) error) func(context.Context, dblock.Tx, ...dblock.Key) error {
	return func(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
		return lock(ctx, tx, rowlock.PK(keys[0].String()))
	}
}

func withLock(lock func(context.Context, ...dblock.Key) (*advisory.Lock, error)) inside {
	return func(ctx context.Context, key dblock.Key, work func(context.Context) error) error {
		l, err := lock(ctx, key)
		if err != nil {
			return err
		}
		defer l.Release(ctx)
		return work(l.Context())
	}
}

// ways are those that wait, and tries are those that do not.
func (c checked) ways(db dblock.DB) (ways, tries map[string]inside) {
	ways = map[string]inside{
		"Do": func(ctx context.Context, key dblock.Key, work func(context.Context) error) error {
			return c.locks.Do(ctx, work, key)
		},
		"Lock": withLock(c.locks.Lock),
		"InTx": func(ctx context.Context, key dblock.Key, work func(context.Context) error) error {
			return advisory.InTx(ctx, c.locks, func(ctx context.Context, _ dblock.Tx) error { return work(ctx) }, key)
		},
		"rowlock.InTx": func(ctx context.Context, key dblock.Key, work func(context.Context) error) error {
			return rowlock.InTx(ctx, c.rows, func(ctx context.Context, _ dblock.Tx) error { return work(ctx) }, key)
		},
		"rowlock.Lock": inTxOf(db, c.rows.Lock),
		"rowlock.LockWithin": inTxOf(db, func(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
			return c.rows.LockWithin(ctx, tx, time.Minute, keys...)
		}),
		"rowlock.Fence": inTxOf(db, func(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
			_, err := c.rows.Fence(ctx, tx, keys...)
			return err
		}),
		"rowlock.Guard": inTxOf(db, func(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
			return c.rows.Guard(ctx, tx, keys[0], 1<<53-1)
		}),
		"Rows.Lock": inTxOf(db, rowsOf(c.accounts.Lock)),
		"Rows.LockWithin": inTxOf(db, rowsOf(func(ctx context.Context, tx dblock.Tx, keys ...rowlock.PrimaryKey) error {
			return c.accounts.LockWithin(ctx, tx, time.Minute, keys...)
		})),
		"Once.Mark": inTxOf(db, func(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
			_, err := c.once.Mark(ctx, tx, keys[0])
			return err
		}),
		"DoOnce": func(ctx context.Context, key dblock.Key, work func(context.Context) error) error {
			fresh := dblock.NewKey("message", rand.Text())
			_, err := rowlock.DoOnce(ctx, c.once, func(ctx context.Context, _ dblock.Tx) error { return work(ctx) }, fresh)
			return err
		},
	}
	tries = map[string]inside{
		"TryLock":         withLock(c.locks.TryLock),
		"rowlock.TryLock": inTxOf(db, c.rows.TryLock),
		"Rows.TryLock":    inTxOf(db, rowsOf(c.accounts.TryLock)),
		"Rows.Claim": inTxOf(db, func(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
			claimed, err := c.accounts.Claim(ctx, tx, rowlock.ClaimOptions{Where: "name = '" + keys[0].String() + "'"})
			if err == nil && len(claimed) != 1 {
				err = fmt.Errorf("claimed %v", claimed)
			}
			return err
		}),
	}
	if db.Features().Transaction {
		ways["DoTx"] = func(ctx context.Context, key dblock.Key, work func(context.Context) error) error {
			return advisory.DoTx(ctx, c.locks, func(ctx context.Context, _ dblock.Tx) error { return work(ctx) }, key)
		}
		ways["LockTx"] = inTxOf(db, c.locks.LockTx)
		tries["TryLockTx"] = inTxOf(db, c.locks.TryLockTx)
	}
	return ways, tries
}

func doNothing(context.Context) error { return nil }

// Each way to lock is seen, outside of another and inside, from its begin to its end.
func checkerSees(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.setUpAccounts(t)
	ctx := testContext(t)
	a, b := dblock.NewKey("a", "1"), dblock.NewKey("b", "1")
	run := func(t *testing.T, outer inside, outerKey dblock.Key, inner inside, innerKey dblock.Key) {
		t.Helper()
		err := outer(ctx, outerKey, func(ctx context.Context) error { return inner(ctx, innerKey, doNothing) })
		if err != nil {
			t.Fatal(err)
		}
	}
	all, _ := checked{}.ways(d.DB)
	for name := range all {
		t.Run(name, func(t *testing.T) {
			c := d.checked(t, nil)
			ways, _ := c.ways(d.DB)
			way, do := ways[name], ways["Do"]
			run(t, way, a, do, b)
			run(t, do, b, nothingInside, a)
			run(t, way, a, nothingInside, b)
			c.checker.Report(t)
			run(t, do, b, way, a)
			found := c.checker.Inversions()
			if len(found) != 1 {
				t.Fatalf("%d inversions, want one: %v", len(found), found)
			}
			for _, s := range found[0].Steps {
				for _, taken := range []deadlock.Taken{s.Held, s.Wanted} {
					if filepath.Base(taken.Place.File) != "deadlock_checker.go" {
						t.Errorf("%s at %s", taken, taken.Place)
					}
				}
			}
		})
	}
	_, all = checked{}.ways(d.DB)
	for name := range all {
		t.Run(name, func(t *testing.T) {
			c := d.checked(t, nil)
			ways, tries := c.ways(d.DB)
			way, try := ways[map[string]string{"TryLock": "Lock", "rowlock.TryLock": "rowlock.Lock", "TryLockTx": "LockTx",
				"Rows.TryLock": "Rows.Lock", "Rows.Claim": "Rows.Lock"}[name]], tries[name]
			run(t, ways["Do"], b, try, a)
			run(t, try, a, ways["Do"], b)
			c.checker.Report(t) // a try does not wait
			run(t, ways["Do"], b, way, a)
			if found := c.checker.Inversions(); len(found) != 1 {
				t.Errorf("%d inversions, want one: %v", len(found), found)
			}
		})
	}
}

// Each way inside of each other one is an inversion if both wait, and none if one is a try.
func checkerSeesAllPairs(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.setUpAccounts(t)
	a, b := dblock.NewKey("a", "1"), dblock.NewKey("b", "1")
	ways, tries := checked{}.ways(d.DB)
	both := maps.Clone(ways)
	maps.Copy(both, tries)
	for one := range ways {
		t.Run(one, func(t *testing.T) {
			ctx := testContext(t)
			for two := range both {
				c := d.checked(t, nil)
				all, ofTries := c.ways(d.DB)
				maps.Copy(all, ofTries)
				err := all[one](ctx, a, func(ctx context.Context) error { return all[two](ctx, b, doNothing) })
				if err == nil {
					err = all[two](ctx, b, func(ctx context.Context) error { return all[one](ctx, a, doNothing) })
				}
				if err != nil {
					t.Fatalf("%s, %s: %v", one, two, err)
				}
				want := 1
				if tries[two] != nil || isMark(one) && isMark(two) && one+two != "Once.MarkOnce.Mark" {
					want = 0 // the messages of DoOnce are others each time
				}
				if found := c.checker.Inversions(); len(found) != want {
					t.Errorf("%s, %s: %d inversions, want %d: %v", one, two, len(found), want, found)
				}
			}
		})
	}
}

func isMark(way string) bool { return way == "DoOnce" || way == "Once.Mark" }

// A context that outlives what it was made for holds doNothing.
func checkerSeesReleases(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	a, b := dblock.NewKey("a", "1"), dblock.NewKey("b", "1")
	c := d.checked(t, nil)
	ways, _ := c.ways(d.DB)
	for name := range ways {
		switch name {
		case "Do", "Lock", "InTx", "DoTx", "rowlock.InTx", "DoOnce":
		default: // their transactions are the caller's
			delete(ways, name)
		}
	}
	for name, way := range ways {
		var after context.Context
		err := way(ctx, a, func(ctx context.Context) error {
			after = context.WithoutCancel(ctx)
			return nil
		})
		if err == nil {
			err = c.locks.Do(after, doNothing, b)
		}
		if err == nil {
			err = c.locks.Do(ctx, func(ctx context.Context) error { return way(ctx, a, doNothing) }, b)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	c.checker.Report(t)
}

func nothingInside(context.Context, dblock.Key, func(context.Context) error) error { return nil }

// What a transaction holds is known without any context, and forgotten with it.
func checkerSeesTransactions(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	a, b := dblock.NewKey("a", "1"), dblock.NewKey("b", "1")
	c := d.checked(t, nil)
	for _, keys := range [][]dblock.Key{{a, b}, {b}, {a}} { // in three transactions
		tx := d.Begin(t, nil)
		for _, k := range keys {
			if err := c.rows.Lock(ctx, tx, k); err != nil {
				t.Fatal(err)
			}
		}
		rollback(t, tx)
	}
	if d.DB.Features().Transaction {
		again := func(ctx context.Context, tx dblock.Tx) error { return c.locks.LockTx(ctx, tx, a) }
		if err := advisory.InTx(ctx, c.locks, again, a); err != nil {
			t.Error(err)
		}
		if err := advisory.DoTx(ctx, c.locks, again, a); err != nil {
			t.Error(err)
		}
	}
	c.checker.Report(t)
	err := rowlock.InTx(ctx, c.rows, func(_ context.Context, tx dblock.Tx) error {
		return c.rows.Lock(ctx, tx, b, a) // b is held, which is no matter
	}, b)
	if err != nil {
		t.Fatal(err)
	}
	if found := c.checker.Inversions(); len(found) != 1 {
		t.Errorf("%d inversions, want one: %v", len(found), found)
	}
}
