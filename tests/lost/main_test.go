// Package lost shows how soon, in every way that a holder and its server can be
// parted, the holder hears that its locks are lost and the server gives them to
// somebody else: each figure is logged, and the bounds that Options state are
// asserted with room for a busy machine.
package lost

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/migrations"
	"github.com/dblock-go/dblock/tests/program"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m, program.Remove) }

// way is a way to use a database: over connections of dblock's own, or over the
// application's pool.
type way struct {
	name   string
	kind   servers.Kind
	scheme string // of a DSN for tests/worker, which does not wrap pools; empty: none
	pool   func(t testing.TB, dsn string) *sql.DB
	open   func(t testing.TB, dsn string) (dblock.DB, error)

	keepAlive time.Duration // the default of advisory.Options
}

const (
	answerWithin = 4 * time.Second // the default of advisory.Options
	room         = 3 * time.Second // for a busy machine
)

// silence is how long a server hears nothing before it frees the locks.
func (w way) silence() time.Duration {
	return dialect.SessionOptions{KeepAlive: w.keepAlive, AnswerWithin: answerWithin}.Silence()
}

var ways = []way{
	{name: "PostgreSQL", kind: servers.KindPostgres, scheme: "postgres", pool: pgxPool, open: openPostgres, keepAlive: 5 * time.Second},
	{name: "PostgreSQL, pool of pgx", kind: servers.KindPostgres, pool: pgxPool, open: wrapPgx, keepAlive: 5 * time.Second},
	{name: "PostgreSQL, pool of lib/pq", kind: servers.KindPostgres, scheme: "pq", pool: pqPool, open: wrapPq, keepAlive: 500 * time.Millisecond},
	{name: "MySQL", kind: servers.KindMySQL, scheme: "mysql", open: openMySQL, pool: mysqlPool(servers.KindMySQL), keepAlive: 500 * time.Millisecond},
	{name: "MySQL, pool", kind: servers.KindMySQL, pool: mysqlPool(servers.KindMySQL), open: wrapMySQL(servers.KindMySQL), keepAlive: 500 * time.Millisecond},
	{name: "MariaDB", kind: servers.KindMariaDB, scheme: "mariadb", open: openMySQL, pool: mysqlPool(servers.KindMariaDB), keepAlive: 500 * time.Millisecond},
	{name: "MariaDB, pool", kind: servers.KindMariaDB, pool: mysqlPool(servers.KindMariaDB), open: wrapMySQL(servers.KindMariaDB), keepAlive: 500 * time.Millisecond},
}

func openPostgres(t testing.TB, dsn string) (dblock.DB, error) {
	return postgres.Open(t.Context(), dsn)
}

func wrapPgx(t testing.TB, dsn string) (dblock.DB, error) {
	config, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	return postgres.New(t.Context(), pool)
}

func pgxPool(t testing.TB, dsn string) *sql.DB {
	config, err := pgx.ParseConfig(dsn)
	must(t, err)
	return closed(t, stdlib.OpenDB(*config))
}

func wrapPq(t testing.TB, dsn string) (dblock.DB, error) {
	return postgres.NewSQL(t.Context(), pqPool(t, dsn))
}

func pqPool(t testing.TB, dsn string) *sql.DB {
	connector, err := pq.NewConnector(dsn)
	must(t, err)
	return closed(t, sql.OpenDB(connector))
}

func openMySQL(t testing.TB, dsn string) (dblock.DB, error) { return mysql.Open(t.Context(), dsn) }

func wrapMySQL(kind servers.Kind) func(testing.TB, string) (dblock.DB, error) {
	return func(t testing.TB, dsn string) (dblock.DB, error) {
		return mysql.New(t.Context(), mysqlPool(kind)(t, dsn))
	}
}

func mysqlPool(kind servers.Kind) func(testing.TB, string) *sql.DB {
	return func(t testing.TB, dsn string) *sql.DB { return (&servers.Server{Kind: kind}).Open(t, dsn) }
}

func closed(t testing.TB, pool *sql.DB) *sql.DB {
	t.Cleanup(func() { pool.Close() })
	return pool
}

// processes are the ways of tests/worker. It wraps no pool where the pool makes
// no difference to it.
func processes() []way {
	return slices.DeleteFunc(slices.Clone(ways), func(w way) bool { return w.scheme == "" })
}

// shared runs a test for each of the ways, on the servers that all tests share.
func shared(t *testing.T, ways []way, test func(t *testing.T, w way, d *database)) {
	server := map[servers.Kind]func(testing.TB) *servers.Server{
		servers.KindPostgres: servers.Postgres, servers.KindMySQL: servers.MySQL, servers.KindMariaDB: servers.MariaDB,
	}
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) { test(t, w, newDatabase(t, w, server[w.kind](t))) })
	}
}

// each runs a test for every way, on the servers that all tests share.
func each(t *testing.T, test func(t *testing.T, w way, d *database)) { shared(t, ways, test) }

// private runs a test for each of the ways, on a server of its own.
func private(t *testing.T, ways []way, settings func(w way) []string, test func(t *testing.T, w way, d *database)) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel() // it waits most of the time
			test(t, w, newDatabase(t, w, servers.Start(t, w.kind, settings(w)...)))
		})
	}
}

// database is an empty one of a test's own, seen by two applications.
type database struct {
	server *servers.Server
	way    way
	dsn    string
	db     dblock.DB // of the holder
	others dblock.DB // of who comes after it, and looks from outside
}

func newDatabase(t testing.TB, w way, server *servers.Server) *database {
	d := &database{server: server, way: w, dsn: server.Database(t)}
	d.db, d.others = d.open(t, w, d.dsn), d.open(t, w, d.dsn)
	must(t, migrations.Setup(t.Context(), d.others))
	return d
}

func (d *database) open(t testing.TB, w way, dsn string) dblock.DB {
	t.Helper()
	db, err := w.open(t, dsn)
	must(t, err)
	t.Cleanup(func() { must(t, db.Close()) })
	return db
}

// worker is the DSN by which tests/worker opens the database, at another host if
// one is given.
func (d *database) worker(t testing.TB, host string) string {
	t.Helper()
	u, err := url.Parse(d.dsn)
	must(t, err)
	u.Scheme = d.way.scheme
	if host != "" {
		u.Host = host + ":" + u.Port()
	}
	return u.String()
}

func (d *database) kill(t testing.TB, session int64) {
	t.Helper()
	statement := "KILL %d"
	if d.way.kind == servers.KindPostgres {
		statement = "SELECT pg_terminate_backend(%d)"
	}
	_, err := d.others.SQL().ExecContext(t.Context(), fmt.Sprintf(statement, session))
	must(t, err)
}

// left is what the server shows as held or waited for.
func (d *database) left(t testing.TB, keys ...dblock.Key) []dialect.Holding {
	t.Helper()
	resolved := make([]dialect.Key, len(keys))
	for i, k := range keys {
		resolved[i] = k.Resolve(d.others.Features().Scope)
	}
	found, err := d.others.Inspect(t.Context(), resolved...)
	must(t, err)
	return found
}

// nothingLeft waits for what the server shows a moment later than it happens. A
// pool may have to find out first that its connections are broken.
func (d *database) nothingLeft(t testing.TB) {
	t.Helper()
	eventually(t, "an empty lock view", func() bool {
		found, err := d.others.Inspect(t.Context())
		return err == nil && len(found) == 0
	})
}

func newLocker(t testing.TB, db dblock.DB, opts ...*advisory.Options) *advisory.Locker {
	t.Helper()
	l, err := advisory.New(db, opts...)
	must(t, err)
	t.Cleanup(func() { must(t, l.Close()) })
	return l
}

func mustLock(t testing.TB, l *advisory.Locker, key dblock.Key) *advisory.Lock {
	t.Helper()
	lock, err := l.Lock(testContext(t), key)
	must(t, err)
	return lock
}

func keys(n int) []dblock.Key {
	all := make([]dblock.Key, n)
	for i := range all {
		all[i] = dblock.NewKey("job", fmt.Sprint(i))
	}
	return all
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// figures are how long something took, several times.
type figures struct {
	mu  sync.Mutex
	all []time.Duration
}

func (f *figures) add(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = append(f.all, d)
}

// within logs the figures and fails if one exceeds the bound by more than room.
func (f *figures) within(t testing.TB, what string, bound time.Duration) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.all) == 0 {
		t.Errorf("%s: never", what)
		return
	}
	slices.Sort(f.all)
	worst := f.all[len(f.all)-1]
	t.Logf("%s: min %v, median %v, max %v, n=%d; bound %v", what,
		f.all[0].Round(time.Millisecond), f.all[len(f.all)/2].Round(time.Millisecond), worst.Round(time.Millisecond), len(f.all), bound)
	if worst > bound+room {
		t.Errorf("%s: %v, the bound is %v", what, worst, bound)
	}
}

func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for pause := 5 * time.Millisecond; !condition(); pause = min(2*pause, 300*time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
		time.Sleep(pause)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
