// Package postgres tests what dialect/postgres relies on in the server and the
// drivers, and what only it has to do. What every database promises is in the
// conformance suite.
package postgres_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m) }

// ways are the drivers and pools that an application may use.
var ways = []struct {
	name string
	open func(t testing.TB, dsn string, opts ...*postgres.Options) (*postgres.DB, error)
}{
	{"pgx", overPgx},
	{"stdlib", overStdlib},
	{"pq", overPq},
}

func overPgx(t testing.TB, dsn string, opts ...*postgres.Options) (*postgres.DB, error) {
	config, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	config.MaxConns = 20
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	return postgres.New(t.Context(), pool, opts...)
}

func overStdlib(t testing.TB, dsn string, opts ...*postgres.Options) (*postgres.DB, error) {
	config, err := pgx.ParseConfig(dsn)
	must(t, err)
	pool := stdlib.OpenDB(*config)
	t.Cleanup(func() { pool.Close() })
	return postgres.NewSQL(t.Context(), pool, opts...)
}

func overPq(t testing.TB, dsn string, opts ...*postgres.Options) (*postgres.DB, error) {
	connector, err := pq.NewConnector(dsn)
	must(t, err)
	pool := sql.OpenDB(connector)
	t.Cleanup(func() { pool.Close() })
	return postgres.NewSQL(t.Context(), pool, opts...)
}

// everyWay runs a test over each driver, with a lock table that is new each time.
func everyWay(t *testing.T, test func(t *testing.T, db *postgres.DB)) {
	dsn := servers.Postgres(t).Database(t)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			db := opened(t)(way.open(t, dsn))
			table(t, db, dialect.Table{})
			test(t, db)
		})
	}
}

func throughPgx(t *testing.T) *postgres.DB {
	db := opened(t)(overPgx(t, servers.Postgres(t).Database(t)))
	table(t, db, dialect.Table{})
	return db
}

func opened(t testing.TB) func(*postgres.DB, error) *postgres.DB {
	return func(db *postgres.DB, err error) *postgres.DB {
		t.Helper()
		must(t, err)
		t.Cleanup(func() { must(t, db.Close()) })
		return db
	}
}

// table creates a lock table until the end of the test.
func table(t testing.TB, db *postgres.DB, table dialect.Table) {
	t.Helper()
	migration := db.Migrations(table)[0]
	exec(t, db.SQL(), migration.Up[0])
	t.Cleanup(func() {
		_, err := db.SQL().ExecContext(context.Background(), migration.Down[0])
		must(t, err)
	})
}

func session(t testing.TB, db *postgres.DB) dialect.Session {
	t.Helper()
	s, err := db.OpenSession(t.Context(), dialect.SessionOptions{})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

func begin(t testing.TB, db *postgres.DB, o *sql.TxOptions) dialect.OwnedTx {
	t.Helper()
	tx, err := db.Begin(t.Context(), o)
	must(t, err)
	t.Cleanup(func() { must(t, tx.Rollback(context.Background())) })
	return tx
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func exec(t testing.TB, tx dialect.Tx, statement string) {
	t.Helper()
	if _, err := tx.ExecContext(t.Context(), statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func value[T any](t testing.TB, db *sql.DB, query string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}

func wantClass(t testing.TB, err error, class dialect.Class) {
	t.Helper()
	if dialect.ClassOf(err) != class {
		t.Fatalf("error %v, want class %q", err, class)
	}
}

func wantText(t testing.TB, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Fatalf("error %v does not say %q", err, text)
	}
}

func wantOneLine(t testing.TB, err error) {
	t.Helper()
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("error of several lines: %v", err)
	}
}

func keys(ids ...int64) []dialect.Key {
	all := make([]dialect.Key, len(ids))
	for i, id := range ids {
		all[i] = dialect.Key{ID: id, Name: "key/" + string(rune('a'+i)), Label: "key/" + string(rune('a'+i))}
	}
	return all
}

func shared(ids ...int64) []dialect.Key {
	all := keys(ids...)
	for i := range all {
		all[i].Mode = dialect.Shared
	}
	return all
}

func try(all []dialect.Key) dialect.Request { return dialect.Request{Keys: all, Try: true} }

func lock(t testing.TB, s dialect.Session, all []dialect.Key) {
	t.Helper()
	_, err := s.Acquire(t.Context(), try(all))
	must(t, err)
}

// held lists the ids that a session or transaction holds or, if waiting, waits for.
func held(t testing.TB, db *postgres.DB, session int64, waiting bool) (ids []int64) {
	t.Helper()
	holdings, err := db.Inspect(t.Context())
	must(t, err)
	for _, h := range holdings {
		if h.Session == session && h.Waiting == waiting {
			ids = append(ids, h.ID)
		}
	}
	return ids
}

// eventually asks until the answer is yes: the server tells of a waiter, or of
// the end of a session, in no other way.
func eventually(t testing.TB, what string, ask func() bool) {
	t.Helper()
	deadline := time.NewTimer(20 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ask() {
		select {
		case <-deadline.C:
			t.Fatalf("never happened: %s", what)
		case <-tick.C:
		}
	}
}

func eventuallyWaiting(t testing.TB, db *postgres.DB, id int64) {
	t.Helper()
	eventually(t, "a waiter for the key", func() bool {
		holdings, err := db.Inspect(t.Context(), dialect.Key{ID: id})
		must(t, err)
		for _, h := range holdings {
			if h.Waiting {
				return true
			}
		}
		return false
	})
}
