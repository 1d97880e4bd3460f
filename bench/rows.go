//go:build linux

package bench

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/rowlock"
	"github.com/dblock-go/dblock/tests/servers"
)

// rows: locks and claims of an application's own rows, against the statements that
// an application would write. Both run in transactions of one pool.
func rows(t *testing.T, d *database, p plan) {
	const n = 100
	d.createJobs(t)
	var a *application // the comparison opens ours first
	comparison{
		name: "lock", what: "lock of an own row, in a transaction, against SELECT … FOR UPDATE",
		target: everywhere(atMost(1.10)),
		ours: func(t testing.TB, d *database) op {
			a = d.application(t)
			jobs := rowlock.NewRows(a.db, rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}, Strength: rowlock.ForUpdate})
			return a.inTx(func(ctx context.Context, tx dblock.Tx, _ query) error { return jobs.Lock(ctx, tx, rowlock.PK(42)) })
		},
		theirs: func(testing.TB, *database) op {
			return a.inTx(func(_ context.Context, _ dblock.Tx, q query) error {
				return wantRows(1)(q("SELECT id FROM jobs WHERE id = "+a.placeholder+" FOR UPDATE", 42))
			})
		},
	}.run(t, d, p)
	rawClaim := func(testing.TB, *database) op {
		return a.inTx(func(_ context.Context, _ dblock.Tx, q query) error {
			return wantRows(n)(q(fmt.Sprintf("SELECT id FROM jobs WHERE state = %s ORDER BY id LIMIT %d FOR UPDATE SKIP LOCKED", a.placeholder, n), "new"))
		})
	}
	comparison{
		name: "claim", what: fmt.Sprintf("claim of %d own rows, in a transaction, against SELECT … LIMIT %[1]d FOR UPDATE SKIP LOCKED", n),
		target: everywhere(atMost(1.10)),
		ours: func(t testing.TB, d *database) op {
			a = d.application(t)
			jobs := rowlock.NewRows(a.db, rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}})
			return a.inTx(func(ctx context.Context, tx dblock.Tx, _ query) error {
				keys, err := jobs.Claim(ctx, tx, rowlock.ClaimOptions{Limit: n, Where: "state = " + a.placeholder, Args: []any{"new"}})
				return wantRows(n)(len(keys), err)
			})
		},
		theirs: rawClaim,
	}.run(t, d, p)
	if d.kind == servers.KindPostgres { // one statement, and that one
		return
	}
	comparison{
		name: "bound", what: "what bounds it: a bare SELECT of the keys on a second connection and one that locks them, in a transaction, against the same",
		ours: func(t testing.TB, d *database) op {
			a = d.application(t)
			return bareClaim(a, d.kind, n)
		},
		theirs: rawClaim,
	}.run(t, d, p)
}

// bareClaim locks what a SELECT without locks has found, each by a look-up of its key.
func bareClaim(a *application, kind servers.Kind, n int) op {
	row := "ROW"
	if kind == servers.KindMariaDB {
		row = ""
	}
	return a.inTx(func(ctx context.Context, _ dblock.Tx, q query) error {
		rows, err := a.db.SQL().QueryContext(ctx, fmt.Sprintf("SELECT id FROM jobs WHERE state = ? ORDER BY id LIMIT %d", n), "new")
		if err != nil {
			return err
		}
		defer rows.Close()
		list := make([]string, 0, n)
		for rows.Next() {
			var id int64
			if err := rows.Scan(&id); err != nil {
				return err
			}
			list = append(list, fmt.Sprintf("%s(%d)", row, id))
		}
		if err := rows.Err(); err != nil {
			return err
		}
		return wantRows(n)(q("SELECT STRAIGHT_JOIN id FROM (WITH keys_ (k) AS (VALUES "+strings.Join(list, ", ")+
			") SELECT * FROM keys_) AS listed JOIN jobs FORCE INDEX (PRIMARY) ON id = k WHERE state = ? FOR UPDATE SKIP LOCKED", "new"))
	})
}

func (d *database) createJobs(t testing.TB) {
	t.Helper()
	const n = 5000
	values := make([]string, n)
	for id := range values {
		values[id] = fmt.Sprintf("(%d, 'new')", id)
	}
	analyze := "ANALYZE TABLE jobs"
	if d.kind == servers.KindPostgres {
		analyze = "ANALYZE jobs"
	}
	db := d.server.Open(t, d.dsn)
	for _, statement := range []string{
		"CREATE TABLE jobs (id INT PRIMARY KEY, state VARCHAR(10) NOT NULL)",
		"INSERT INTO jobs VALUES " + strings.Join(values, ", "),
		analyze,
	} {
		if _, err := db.ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
}

// application has transactions of its own, in which it locks with dblock or with its
// driver.
type application struct {
	db          dblock.DB
	placeholder string
	begin       func(ctx context.Context, fn inTx) error
}

type inTx func(ctx context.Context, tx dblock.Tx, q query) error

// query returns how many rows there were.
type query func(query string, args ...any) (int, error)

func (a *application) inTx(fn inTx) op {
	return func(ctx context.Context, _ int) error { return a.begin(ctx, fn) }
}

func (d *database) application(t testing.TB) *application {
	t.Helper()
	if d.kind == servers.KindPostgres {
		pool := d.pgxPool(t, 1)
		db, err := postgres.New(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		return &application{db, "$1", func(ctx context.Context, fn inTx) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				return fn(ctx, postgres.Tx(tx), func(query string, args ...any) (int, error) {
					rows, err := tx.Query(ctx, query, args...)
					if err != nil {
						return 0, err
					}
					ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
					return len(ids), err
				})
			})
		}}
	}
	pool, err := openMySQL(d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	db, err := mysql.New(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return &application{db, "?", func(ctx context.Context, fn inTx) error {
		tx, err := pool.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := fn(ctx, tx, func(query string, args ...any) (int, error) { return countRows(tx.QueryContext(ctx, query, args...)) }); err != nil {
			return err
		}
		return tx.Commit()
	}}
}

func countRows(rows *sql.Rows, err error) (n int, _ error) {
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return n, err
		}
		n++
	}
	return n, rows.Err()
}

func wantRows(want int) func(int, error) error {
	return func(got int, err error) error {
		if err == nil && got != want {
			err = fmt.Errorf("%d rows, want %d", got, want)
		}
		return err
	}
}
