// Package conformance is the one suite that every database must pass: a file
// per clause, run against each harness.
package conformance

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/migrations"
	"github.com/dblock-go/dblock/tests/servers"
)

// Harness is one way to use one database.
type Harness struct {
	// Server is the server that the clauses of this harness share.
	Server func(t testing.TB) *servers.Server
	// Private starts a server for one clause alone, to be killed or restarted.
	Private func(t testing.TB, settings ...string) *servers.Server
	// Open makes a DB of a pool as an application has it, with at most maxConns
	// connections (0: the pool's default), and closes both at the end of the test.
	Open func(t testing.TB, dsn string, maxConns int) (dblock.DB, error)
	// Kill is the statement, with one %d, by which an administrator ends a session.
	Kill string
	// Interrupt is the statement, with one %d, by which an administrator ends what
	// a session is doing, and not the session.
	Interrupt string
	// OfDriver reports whether errors.As finds the driver's own type of error.
	OfDriver func(err error) bool
	// SessionOf is the id of the session that a transaction of the driver's runs on.
	SessionOf func(ctx context.Context, native any) (int64, error)
}

type clause struct {
	name string
	run  func(t *testing.T, h *Harness)
}

// clauses lists all that a database must show. A clause that a database cannot
// fulfil shows that the refusal is ErrUnsupported with the alternative named.
var clauses = concat(
	advisoryClauses,
	rowlockClauses,
	userRowsClauses,
	deadlockClauses,
	inspectClauses,
	migrationsClauses,
	readmeClauses,
)

func concat(lists ...[]clause) []clause {
	var all []clause
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// Run shows every clause on the harness.
func Run(t *testing.T, h *Harness) {
	h.Server(t) // skips or fails here, once, where the server is missing
	for _, c := range clauses {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t, h)
		})
	}
}

// Database is an empty database of a clause's own.
type Database struct {
	h      *Harness
	Server *servers.Server
	DSN    string
	DB     dblock.DB // as the application under test has it
	SQL    *sql.DB   // a plain handle of somebody else, to look from outside
}

// Database creates an empty database on the shared server.
func (h *Harness) Database(t testing.TB) *Database {
	t.Helper()
	return h.on(t, h.Server(t))
}

// PrivateDatabase is an empty database on a server that the clause may break.
func (h *Harness) PrivateDatabase(t testing.TB, settings ...string) *Database {
	t.Helper()
	return h.on(t, h.Private(t, settings...))
}

func (h *Harness) on(t testing.TB, server *servers.Server) *Database {
	t.Helper()
	dsn := server.Database(t)
	d := &Database{h: h, Server: server, DSN: dsn, SQL: server.Open(t, dsn)}
	d.DB = d.Open(t)
	return d
}

// Open is one more application on the same database.
func (d *Database) Open(t testing.TB) dblock.DB { t.Helper(); return d.OpenMax(t, 0) }

// OpenMax is one more application, whose pool has at most maxConns connections.
func (d *Database) OpenMax(t testing.TB, maxConns int) dblock.DB {
	t.Helper()
	db, err := d.h.Open(t, d.DSN, maxConns)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return db
}

// Begin starts a transaction of the application's own.
func (d *Database) Begin(t testing.TB, o *sql.TxOptions) dialect.OwnedTx {
	t.Helper()
	tx, err := d.DB.Begin(t.Context(), o)
	if err != nil {
		t.Fatalf("begin: %v", err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) }) // after Commit it does nothing
	return tx
}

// Setup creates dblock's tables.
func (d *Database) Setup(t testing.TB) {
	t.Helper()
	if err := migrations.Setup(t.Context(), d.DB); err != nil {
		t.Fatalf("setup: %v", err)
	}
}

// ctx bounds what a clause does; a clause that hangs fails with its own name.
func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls until the condition holds, ever more slowly: InnoDB renews some
// of its views only when nobody has looked for 100 ms.
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
