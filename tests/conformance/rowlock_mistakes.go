package conformance

import (
	"context"
	"database/sql"
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

// calls are what one can ask for in a transaction, by the functions' names.
type calls map[string]func(tx dblock.Tx) error

// tableCalls are those that need dblock's tables.
func (d *Database) tableCalls(ctx context.Context, locks, once string, key, another dblock.Key) calls {
	rows := rowlock.New(d.DB, &rowlock.Options{Table: locks})
	marks := rowlock.NewOnce(d.DB, &rowlock.OnceOptions{Table: once})
	return calls{
		"Lock":        func(tx dblock.Tx) error { return rows.Lock(ctx, tx, key) },
		"Lock of two": func(tx dblock.Tx) error { return rows.Lock(ctx, tx, key, another) },
		"Lock shared": func(tx dblock.Tx) error { return rows.Lock(ctx, tx, key.Shared()) },
		"TryLock":     func(tx dblock.Tx) error { return rows.TryLock(ctx, tx, key) },
		"LockWithin":  func(tx dblock.Tx) error { return rows.LockWithin(ctx, tx, time.Second, key) },
		"Fence":       func(tx dblock.Tx) error { _, err := rows.Fence(ctx, tx, key); return err },
		"Guard":       func(tx dblock.Tx) error { return rows.Guard(ctx, tx, key, 1) },
		"Mark":        func(tx dblock.Tx) error { _, err := marks.Mark(ctx, tx, key); return err },
		"MarkEach":    func(tx dblock.Tx) error { _, err := marks.MarkEach(ctx, tx, key, another); return err },
	}
}

// Every call in a transaction, with all that is none or that nothing can be locked in.
func rowsMistakes(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.jobs(t, 2)
	ctx := testContext(t)
	key, another := dblock.NewKey("account", "1"), dblock.NewKey("account", "2")
	rows, once := rowlock.New(d.DB), rowlock.NewOnce(d.DB)
	jobs := rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}})
	all := calls{
		"Rows.Lock":       func(tx dblock.Tx) error { return jobs.Lock(ctx, tx, rowlock.PK(1)) },
		"Rows.TryLock":    func(tx dblock.Tx) error { return jobs.TryLock(ctx, tx, rowlock.PK(0), rowlock.PK(1)) },
		"Rows.LockWithin": func(tx dblock.Tx) error { return jobs.LockWithin(ctx, tx, time.Second, rowlock.PK(1)) },
		"Rows.Claim":      func(tx dblock.Tx) error { _, err := jobs.Claim(ctx, tx, rowlock.ClaimOptions{}); return err },
	}
	maps.Copy(all, d.tableCalls(ctx, "locks", "once", key, another))

	conn, err := d.DB.SQL().Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	given := func(tx dblock.Tx) func() dblock.Tx { return func() dblock.Tx { return tx } }
	bad := []struct {
		name string
		tx   func() dblock.Tx
		want error
	}{
		{"nil", given(nil), dblock.ErrUnsupported},
		{"a nil *sql.Tx", given((*sql.Tx)(nil)), dblock.ErrUnsupported},
		{"a pool", given(d.DB.SQL()), dblock.ErrUnsupported},
		{"autocommit", given(conn), dblock.ErrUnsupported},
		{"ended", func() dblock.Tx { tx := d.Begin(t, nil); rollback(t, tx); return tx }, dblock.ErrClosed},
		{"read-only", func() dblock.Tx {
			tx, err := d.DB.Begin(ctx, &sql.TxOptions{ReadOnly: true})
			if err != nil {
				t.Fatal(err)
			}
			return tx
		}, dblock.ErrUnsupported},
		{"aborted", func() dblock.Tx {
			tx := d.Begin(t, nil)
			if err := execute(ctx, tx, `SELECT * FROM nowhere`); err == nil {
				t.Fatal("it should fail")
			}
			return tx
		}, dblock.ErrUnsupported},
	}
	switch d.DB.Name() {
	case "mysql", "mariadb":
		bad = bad[:6] // a failed statement leaves no trace
	case "sqlserver":
		bad = bad[:5] // as above, and its driver has no read-only transactions, and says so
	}
	for _, b := range bad {
		for name, call := range all {
			if b.name == "read-only" && name == "Lock shared" && d.DB.Name() != "postgres" {
				continue // which InnoDB does
			}
			tx := b.tx()
			if err := call(tx); !errors.Is(err, b.want) {
				t.Errorf("%s, %s: %v, want %v", b.name, name, err, b.want)
			}
			free := d.Begin(t, nil)
			if err := errors.Join(rows.TryLock(ctx, free, key, another), jobs.TryLock(ctx, free, rowlock.PK(0), rowlock.PK(1))); err != nil {
				t.Errorf("%s, %s: something is locked: %v", b.name, name, err)
			}
			mustMark(t, once, free, true, key)
			rollback(t, free)
			if owned, ok := tx.(interface{ Rollback(context.Context) error }); ok {
				_ = owned.Rollback(ctx)
			}
		}
	}
}

// A table that is missing, and one of another shape, are named as what they are.
func rowsMistakenTable(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.exec(t, `CREATE TABLE other (id BIGINT NOT NULL PRIMARY KEY)`, `INSERT INTO other VALUES (1)`)
	ctx := testContext(t)
	key, another := dblock.NewKey("account", "1"), dblock.NewKey("account", "2")
	never := func(context.Context, dblock.Tx) error { t.Error("the function was called"); return nil }
	for _, table := range []string{"absent", "other"} {
		rows, once := rowlock.New(d.DB, &rowlock.Options{Table: table}), rowlock.NewOnce(d.DB, &rowlock.OnceOptions{Table: table})
		all := d.tableCalls(ctx, table, table, key, another)
		maps.Copy(all, calls{
			"InTx":         func(dblock.Tx) error { return rowlock.InTx(ctx, rows, never, key) },
			"InTx, shared": func(dblock.Tx) error { return rowlock.InTx(ctx, rows, never, key.Shared()) },
			"DoOnce":       func(dblock.Tx) error { _, err := rowlock.DoOnce(ctx, once, never, key); return err },
			"Locker.Clean": func(dblock.Tx) error { _, err := rows.Clean(ctx); return err },
			"Once.Clean":   func(dblock.Tx) error { _, err := once.Clean(ctx); return err },
		})
		for name, call := range all {
			tx := d.Begin(t, nil)
			if err := call(tx); !errors.Is(err, dblock.ErrSetup) {
				t.Errorf("%s table, %s: %v, want %v", table, name, err, dblock.ErrSetup)
			}
			rollback(t, tx)
		}
	}
}
