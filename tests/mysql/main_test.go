// Package mysql_test shows on real servers what dialect/mysql builds on: facts of
// MySQL, MariaDB and the driver, each by its behaviour. What all databases have in
// common is in tests/conformance.
package mysql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m) }

// each runs a test on both servers.
func each(t *testing.T, test func(t *testing.T, e *env)) {
	for kind, server := range map[servers.Kind]func(testing.TB) *servers.Server{
		servers.KindMySQL: servers.MySQL, servers.KindMariaDB: servers.MariaDB,
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			test(t, newEnv(t, server(t)))
		})
	}
}

// eachPrivate runs a test on a server of its own of both kinds.
func eachPrivate(t *testing.T, test func(t *testing.T, e *env), settings ...string) {
	for _, kind := range []servers.Kind{servers.KindMySQL, servers.KindMariaDB} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			test(t, newEnv(t, servers.Start(t, kind, settings...)))
		})
	}
}

// env is a database of a test's own.
type env struct {
	server *servers.Server
	dsn    string
	admin  *sql.DB // to look from outside
	ctx    context.Context
}

func newEnv(t *testing.T, server *servers.Server) *env {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	dsn := server.Database(t)
	return &env{server: server, dsn: dsn, admin: server.Open(t, dsn), ctx: ctx}
}

func (e *env) mariadb() bool { return e.server.Kind == servers.KindMariaDB }

// open opens the database and creates the lock table.
func (e *env) open(t *testing.T) *mysql.DB {
	t.Helper()
	db, err := mysql.Open(e.ctx, e.dsn)
	if err != nil {
		t.Fatal(err)
	}
	return e.setup(t, db)
}

// wrap opens the pool of an application.
func (e *env) wrap(t *testing.T, dsn string, maxConns int) *mysql.DB {
	t.Helper()
	pool := e.server.Open(t, dsn)
	pool.SetMaxOpenConns(maxConns)
	db, err := mysql.New(e.ctx, pool)
	if err != nil {
		t.Fatal(err)
	}
	return e.setup(t, db)
}

func (e *env) setup(t *testing.T, db *mysql.DB) *mysql.DB {
	t.Helper()
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, statement := range db.Migrations(dialect.Table{})[0].Up {
		e.exec(t, e.admin, statement)
	}
	return db
}

// with adds parameters to a DSN.
func with(t *testing.T, dsn string, params ...string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	for i := 0; i < len(params); i += 2 {
		q.Set(params[i], params[i+1])
	}
	u.RawQuery = q.Encode()
	return u.String()
}

func (e *env) session(t *testing.T, db *mysql.DB, o dialect.SessionOptions) dialect.Session {
	t.Helper()
	s, err := db.OpenSession(e.ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (e *env) begin(t *testing.T, db *mysql.DB, o *sql.TxOptions) dialect.OwnedTx {
	t.Helper()
	tx, err := db.Begin(e.ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tx.Rollback(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return tx
}

func (e *env) conn(t *testing.T) *sql.Conn {
	t.Helper()
	c, err := e.admin.Conn(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (e *env) exec(t *testing.T, q dialect.Tx, statement string) {
	t.Helper()
	if _, err := q.ExecContext(e.ctx, statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

type rowQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// value is the first column of the first row.
func value[T any](t *testing.T, ctx context.Context, q rowQuerier, query string) T {
	t.Helper()
	v, err := firstValue[T](ctx, q, query)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}

func firstValue[T any](ctx context.Context, q rowQuerier, query string) (v T, err error) {
	rows, err := q.QueryContext(ctx, query)
	if err != nil {
		return v, err
	}
	defer rows.Close()
	if !rows.Next() {
		return v, errors.Join(rows.Err(), sql.ErrNoRows)
	}
	if err := rows.Scan(&v); err != nil {
		return v, err
	}
	return v, errors.Join(rows.Err(), rows.Close())
}

// await polls the server.
func (e *env) await(t *testing.T, what, query string) {
	t.Helper()
	for value[int](t, e.ctx, e.admin, query) == 0 {
		select {
		case <-e.ctx.Done():
			t.Fatalf("not in time: %s", what)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitStatement waits until the connection has run a statement of that kind for
// that long.
func (e *env) awaitStatement(t *testing.T, id int64, like string, seconds int) {
	t.Helper()
	e.await(t, "the server runs "+like, fmt.Sprintf(
		"SELECT COUNT(*) FROM information_schema.processlist WHERE id = %d AND info LIKE '%s' AND time >= %d", id, like, seconds))
}

func (e *env) awaitGone(t *testing.T, id int64) {
	t.Helper()
	e.await(t, "the connection is gone", fmt.Sprintf("SELECT COUNT(*) = 0 FROM information_schema.processlist WHERE id = %d", id))
}

func key(name string, id int64) dialect.Key {
	return dialect.Key{Name: name, ID: id, Label: name}
}

func wantClass(t *testing.T, err error, class dialect.Class) *dialect.Error {
	t.Helper()
	var e *dialect.Error
	if !errors.As(err, &e) || e.Class != class {
		t.Fatalf("got %v, want class %q", err, class)
	}
	return e
}
