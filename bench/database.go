//go:build linux

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// manyConnections suffice for two pools of 64, and give PostgreSQL room for the
// locks of the scenario many.
const manyConnections = "max_connections=500"

// database is an empty database on a server that is under measurement.
type database struct {
	kind   servers.Kind
	server *servers.Server
	dsn    string
	report *report
}

// newDatabase starts a server, unless the environment names one.
func newDatabase(t testing.TB, kind servers.Kind, r *report) *database {
	t.Helper()
	var server *servers.Server
	switch {
	case os.Getenv("DBLOCK_TEST_"+strings.ToUpper(string(kind))+"_DSN") == "":
		server = servers.Start(t, kind, manyConnections)
	case kind == servers.KindPostgres:
		server = servers.Postgres(t)
	case kind == servers.KindMySQL:
		server = servers.MySQL(t)
	default:
		server = servers.MariaDB(t)
	}
	d := &database{kind: kind, server: server, dsn: server.Database(t), report: r}
	var version string
	if err := server.Open(t, server.DSN()).QueryRow("SELECT version()").Scan(&version); err != nil {
		t.Fatal(err)
	}
	r.has(kind, version)
	return d
}

// openDB opens the database for dblock.
func openDB(ctx context.Context, kind servers.Kind, dsn string) (dblock.DB, error) {
	if kind == servers.KindPostgres {
		return postgres.Open(ctx, dsn)
	}
	return mysql.Open(ctx, dsn)
}

// locker is one on a database that was opened for it.
func (d *database) locker(t testing.TB, options ...*advisory.Options) *advisory.Locker {
	t.Helper()
	db, err := openDB(t.Context(), d.kind, d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	locks, err := advisory.New(db, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(locks.Close(), db.Close()); err != nil {
			t.Error(err)
		}
	})
	return locks
}

// connections asks the server how many connections the database has.
func (d *database) connections(t testing.TB) int {
	t.Helper()
	name := d.dsn[strings.LastIndexByte(d.dsn, '/')+1:]
	name, _, _ = strings.Cut(name, "?")
	query := "SELECT count(*) FROM information_schema.processlist WHERE db = ?"
	if d.kind == servers.KindPostgres {
		query = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1"
	}
	var n int
	if err := d.server.Open(t, d.server.DSN()).QueryRowContext(t.Context(), query, name).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// mustBeHeld checks that others are refused the keys.
func (d *database) mustBeHeld(t testing.TB, keys ...dblock.Key) {
	t.Helper()
	others := d.locker(t)
	for _, key := range keys {
		if _, err := others.TryLock(t.Context(), key); !errors.Is(err, dblock.ErrNotAcquired) {
			t.Fatalf("%v is held, but a try for it was not refused: %v", key, err)
		}
	}
}

// keys are n keys that no other scenario uses.
func keys(scenario string, n int) []dblock.Key {
	all := make([]dblock.Key, n)
	for i := range all {
		all[i] = dblock.NewKey("bench", scenario, fmt.Sprint(i))
	}
	return all
}
