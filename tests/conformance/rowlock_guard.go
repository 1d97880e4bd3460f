package conformance

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// guarded is a transaction that guards and then calls.
func (d *Database) guarded(ctx context.Context, rows *rowlock.Locker, key dblock.Key, token int64, call func(tx dblock.Tx) error) error {
	tx, err := d.DB.Begin(ctx, nil)
	if err != nil {
		return err
	}
	if err = rows.Guard(ctx, tx, key, token); err == nil {
		err = call(tx)
	}
	if err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	return tx.Commit(ctx)
}

func nothing(dblock.Tx) error { return nil }

// The holder's session dies without its knowledge, and others take the key.
func rowsGuard(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE written (n INT PRIMARY KEY)`)
	ctx := testContext(t)
	key, other := dblock.NewKey("projector", "orders"), dblock.NewKey("projector", "invoices")
	rows := rowlock.New(d.DB)
	fenced := &advisory.Options{Fencing: true}
	write := func(n int) func(dblock.Tx) error {
		return func(tx dblock.Tx) error { return execute(ctx, tx, fmt.Sprintf(`INSERT INTO written VALUES (%d)`, n)) }
	}

	paused := mustLock(t, newLocker(t, d.Open(t), fenced), key)
	for n := range 2 {
		if err := d.guarded(ctx, rows, key, paused.Token(), write(n)); err != nil {
			t.Fatalf("the holder: %v", err)
		}
	}
	d.kill(t, d.holder(t, key))
	successor := mustLock(t, newLocker(t, d.Open(t), fenced), key)
	stale := func(when string, token int64) {
		t.Helper()
		tx := d.Begin(t, nil)
		defer rollback(t, tx)
		err := rows.Guard(ctx, tx, key, token)
		if !errors.Is(err, dblock.ErrNotHeld) || deadlock.Remains(d.DB, err) != dialect.RemainsUsable {
			t.Errorf("%s: %v, want %v", when, err, dblock.ErrNotHeld)
		}
		if err := execute(ctx, tx, `SELECT 1`); err != nil {
			t.Errorf("%s: the transaction after it: %v", when, err)
		}
	}
	stale("before the successor wrote", paused.Token())
	if err := d.guarded(ctx, rows, key, successor.Token(), write(2)); err != nil {
		t.Errorf("the successor: %v", err)
	}
	stale("after the successor wrote", paused.Token())
	mustRelease(t, successor)

	// A row lock's number counts in the same sequence.
	tx := d.Begin(t, nil)
	defer rollback(t, tx)
	fences, err := rows.Fence(ctx, tx, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := rows.Guard(ctx, tx, key, fences[0]); err != nil {
		t.Errorf("in the transaction that drew the number: %v", err)
	}
	commit(t, tx)
	stale("after a row lock", successor.Token())

	// The successor's write is what refuses, should the numbers be gone.
	d.exec(t, fmt.Sprintf(`DELETE FROM locks WHERE id = %d`, fenceRow(key)))
	stale("without the latest number", successor.Token())
	if err := d.guarded(ctx, rows, other, 1, nothing); err != nil {
		t.Errorf("another key: %v", err)
	}
	if n := d.number(t, `SELECT count(*) FROM written`); n != 3 {
		t.Errorf("%d rows were written, want 3", n)
	}
}

// A holder that is overtaken in the midst of its transaction commits before its
// successor reads, or not at all.
func rowsGuardPaused(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE counter (n INT NOT NULL)`)
	d.exec(t, `INSERT INTO counter VALUES (0)`)
	ctx := testContext(t)
	key := dblock.NewKey("projector", "orders")
	rows := rowlock.New(d.DB)

	paused := d.Begin(t, nil)
	defer rollback(t, paused)
	if err := rows.Guard(ctx, paused, key, 10); err != nil {
		t.Fatal(err)
	}
	mustExec(t, paused, `UPDATE counter SET n = n + 1`)
	passed := make(chan error, 1)
	go func() {
		passed <- d.guarded(ctx, rows, key, 20, func(tx dblock.Tx) error { return execute(ctx, tx, `UPDATE counter SET n = n * 10`) })
	}()
	d.awaitBlocked(t, 1)
	commit(t, paused)
	if err := <-passed; err != nil {
		t.Errorf("the successor: %v", err)
	}
	if n := d.number(t, `SELECT n FROM counter`); n != 10 {
		t.Errorf("the counter is %d, want 10", n)
	}
	if err := d.guarded(ctx, rows, key, 10, nothing); !errors.Is(err, dblock.ErrNotHeld) {
		t.Errorf("the paused holder's next transaction: %v", err)
	}

	// Of a crowd with all numbers, those in the table only grow.
	var all sync.WaitGroup
	var mu sync.Mutex
	highest := int64(20)
	for token := int64(21); token < 61; token++ {
		all.Go(func() {
			err := d.guarded(ctx, rows, key, token, func(dblock.Tx) error {
				mu.Lock()
				defer mu.Unlock()
				if token < highest {
					t.Errorf("%d passed after %d", token, highest)
				}
				highest = token
				return nil
			})
			if err != nil && !errors.Is(err, dblock.ErrNotHeld) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if err := d.guarded(ctx, rows, key, highest-1, nothing); !errors.Is(err, dblock.ErrNotHeld) {
		t.Errorf("%d after %d: %v", highest-1, highest, err)
	}
}

// A transaction that has read before can pass a guard that is newer than what it has
// read, on PostgreSQL; the successor's guard then waits for it, or has refused it.
func rowsGuardBehindSnapshot(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE counter (n INT NOT NULL)`, `INSERT INTO counter VALUES (0)`)
	rows := rowlock.New(d.DB)
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		for _, written := range []bool{false, true} { // by the successor, before the stale holder's guard
			key := dblock.NewKey("projector", isolation.String(), fmt.Sprint(written))
			draw := func() int64 {
				t.Helper()
				tx := d.Begin(t, nil)
				defer rollback(t, tx)
				fences, err := rows.Fence(ctx, tx, key)
				if err != nil {
					t.Fatal(err)
				}
				return fences[0]
			}
			stale := draw()
			old := d.Begin(t, &sql.TxOptions{Isolation: isolation})
			if _, err := readInt(ctx, old, `SELECT n FROM counter`); err != nil {
				t.Fatal(err)
			}
			token := draw()
			if written {
				if err := d.guarded(ctx, rows, key, token, nothing); err != nil {
					t.Fatal(err)
				}
			}
			err := rows.Guard(ctx, old, key, stale)
			behind := d.refusesNewer(isolation) && d.DB.Name() == "postgres"
			switch {
			case behind && !written && err == nil:
				passed := make(chan error, 1)
				go func() { passed <- d.guarded(ctx, rows, key, token, nothing) }()
				d.awaitBlocked(t, 1)
				commit(t, old)
				if err := <-passed; err != nil {
					t.Errorf("the successor: %v", err)
				}
			case behind && written && errors.Is(err, dblock.ErrSerialization), !behind && errors.Is(err, dblock.ErrNotHeld),
				isolation == sql.LevelSnapshot && errors.Is(err, dblock.ErrSerialization):
			default:
				t.Errorf("the successor has written: %t: %v", written, err)
			}
			rollback(t, old)
			if err := d.guarded(ctx, rows, key, stale, nothing); !errors.Is(err, dblock.ErrNotHeld) {
				t.Errorf("the stale holder's next transaction: %v", err)
			}
		}
	})
}

func rowsGuardRefuses(t *testing.T, h *Harness) {
	d := h.Database(t) // and no setup
	ctx := testContext(t)
	rows, key := rowlock.New(d.DB), dblock.NewKey("job")
	for _, test := range []struct {
		what  string
		tx    func() dblock.Tx
		key   dblock.Key
		token int64
		want  error
	}{
		{"no token", func() dblock.Tx { return d.Begin(t, nil) }, key, 0, dblock.ErrInvalidOption},
		{"no key", func() dblock.Tx { return d.Begin(t, nil) }, dblock.Key{}, 1, dblock.ErrInvalidKey},
		{"no transaction", func() dblock.Tx { return d.SQL }, key, 1, dblock.ErrUnsupported},
		{"nil", func() dblock.Tx { return nil }, key, 1, dblock.ErrUnsupported},
		{"no table", func() dblock.Tx { return d.Begin(t, nil) }, key, 1, dblock.ErrSetup},
	} {
		if err := rows.Guard(ctx, test.tx(), test.key, test.token); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", test.what, err, test.want)
		}
	}
}

func rowsFencedColumn(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.exec(t, `CREATE TABLE checkpoints (projector VARCHAR(64) NOT NULL PRIMARY KEY, position BIGINT NOT NULL, fence BIGINT DEFAULT 0 NOT NULL)`)
	d.exec(t, `INSERT INTO checkpoints (projector, position) VALUES ('orders', 0)`)
	advance := func(position, token int64) int64 {
		t.Helper()
		set, where := rowlock.Fenced("fence", token)
		result, err := d.SQL.ExecContext(t.Context(), fmt.Sprintf(`UPDATE checkpoints SET position = %d, %s WHERE projector = 'orders' AND %s`, position, set, where))
		if err != nil {
			t.Fatal(err)
		}
		n, err := result.RowsAffected()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if advance(1, 10) != 1 || advance(2, 10) != 1 || advance(3, 11) != 1 {
		t.Error("a holder could not write")
	}
	if advance(4, 10) != 0 {
		t.Error("who was overtaken could write")
	}
	if n := d.number(t, `SELECT position FROM checkpoints`); n != 3 {
		t.Errorf("position %d, want 3", n)
	}
}
