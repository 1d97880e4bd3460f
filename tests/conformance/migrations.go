package conformance

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/migrations"
)

var migrationsClauses = []clause{
	{"migrations/passes goose's tests of a provider's locker", migrationsGooseProviders},
	{"migrations/passes goose's tests of a locker", migrationsGooseLockers},
	{"migrations/replicas apply a slow migration once", migrationsReplicas},
	{"migrations/up-to reads the state after the grant", migrationsUpTo},
	{"migrations/down reads the state after the grant", migrationsDown},
	{"migrations/the version table is created once", migrationsBootstrap},
	{"migrations/a half created version table is completed", migrationsHalfBootstrap},
	{"migrations/status and version neither wait nor create", migrationsStatus},
	{"migrations/databases on one server do not wait for each other", migrationsScope},
	{"migrations/a pool of one connection is enough", migrationsSmallPool},
	{"migrations/a wait ends with its limit and names the holder", migrationsWaitLimit},
	{"migrations/a wait limit is neither rounded to for ever nor to a try", migrationsLimits},
	{"migrations/a failed migration is named and frees the guard", migrationsFailure},
	{"migrations/a cancelled migration frees the guard", migrationsCancel},
	{"migrations/a killed session is an error and confuses nobody", migrationsKilledSession},
	{"migrations/a migration that leaves the guard's connection idle keeps the guard", migrationsIdleGuard},
	{"migrations/a killed process locks nobody out", migrationsKilledProcess},
	{"migrations/processes that start at once apply each migration once", migrationsProcesses},
	{"migrations/indexes are built concurrently while others wait", migrationsConcurrentIndex},
	{"migrations/setup is for every start and any number of replicas", migrationsSetup},
	{"migrations/setup refuses a table that is not its own", migrationsSetupForeign},
	{"migrations/setup notices that its table is gone", migrationsSetupGone},
	{"migrations/setup completes what a crash has left", migrationsSetupCrash},
	{"migrations/setup keeps lock tables apart", migrationsSetupTables},
	{"migrations/setup adds what an older version did not have", migrationsSetupUpdates},
	{"migrations/setup changes nothing where one table is not its own", migrationsSetupForeignOnce},
}

const versionTable = goose.DefaultTablename

// guardKey is the default guard of the default version table.
var guardKey = dblock.NewKey("migrations", versionTable)

// file is a file system of migrations, 00001.sql and so on, each of one
// statement that goes up and one that goes down.
func files(statements ...[2]string) fs.FS {
	folder := fstest.MapFS{}
	for i, s := range statements {
		text := fmt.Sprintf("-- +goose Up\n%s;\n-- +goose Down\n%s;\n", s[0], s[1])
		folder[fmt.Sprintf("%05d_step.sql", i+1)] = &fstest.MapFile{Data: []byte(text)}
	}
	return folder
}

var (
	createEntries = [2]string{"CREATE TABLE entries (id INT NOT NULL PRIMARY KEY)", "DROP TABLE entries"}
	insertEntry   = [2]string{"INSERT INTO entries VALUES (1)", "DELETE FROM entries"}
)

// gate is a Go migration that says when it has begun and goes on when it is told.
type gate struct {
	begun, open   chan struct{}
	begin         sync.Once
	before, after []string // statements
}

func newGate(before, after []string) *gate {
	return &gate{begun: make(chan struct{}), open: make(chan struct{}), before: before, after: after}
}

func (g *gate) run(ctx context.Context, tx *sql.Tx) error {
	if err := execAll(ctx, tx, g.before); err != nil {
		return err
	}
	g.begin.Do(func() { close(g.begun) })
	select {
	case <-g.open:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return execAll(ctx, tx, g.after)
}

func execAll(ctx context.Context, tx *sql.Tx, statements []string) error {
	for _, s := range statements {
		if _, err := tx.ExecContext(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// up and down make the gate a migration in that direction.
func (g *gate) up(version int64) goose.ProviderOption {
	return goose.WithGoMigrations(goose.NewGoMigration(version, &goose.GoFunc{RunTx: g.run}, nil))
}

func (g *gate) down(version int64) goose.ProviderOption {
	return goose.WithGoMigrations(goose.NewGoMigration(version, nil, &goose.GoFunc{RunTx: g.run}))
}

// replica is one that migrates while the clause goes on.
type replica struct {
	heard   chan dblock.Event // closed at the end
	done    chan struct{}
	results []*goose.MigrationResult
	err     error
}

// deploy starts a replica. Its run gets the options that it must pass on.
func deploy(t testing.TB, run func(ctx context.Context, o *migrations.Options) ([]*goose.MigrationResult, error)) *replica {
	r := &replica{heard: make(chan dblock.Event, 1000), done: make(chan struct{})}
	ctx := testContext(t)
	o := &migrations.Options{Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) { r.heard <- e })}
	go func() {
		r.results, r.err = run(ctx, o)
		close(r.heard)
		close(r.done)
	}()
	return r
}

// up is a replica's run of Up.
func up(db dblock.DB, fsys fs.FS, options ...goose.ProviderOption) func(context.Context, *migrations.Options) ([]*goose.MigrationResult, error) {
	return func(ctx context.Context, o *migrations.Options) ([]*goose.MigrationResult, error) {
		o.Provider = options
		return migrations.Up(ctx, db, fsys, o)
	}
}

// hears waits until the replica's observer heard of the kind.
func (r *replica) hears(t testing.TB, kind dblock.EventKind) dblock.Event {
	t.Helper()
	ctx := testContext(t)
	for {
		select {
		case e, ok := <-r.heard:
			if !ok {
				t.Fatalf("the replica ended before %q: %v", kind, r.err)
			}
			if e.Kind == kind {
				return e
			}
		case <-ctx.Done():
			t.Fatalf("the replica did not come to %q", kind)
		}
	}
}

// stillWaiting fails if the replica was granted the guard.
func (r *replica) stillWaiting(t testing.TB) {
	t.Helper()
	for {
		select {
		case e, ok := <-r.heard:
			if !ok {
				t.Fatalf("ended while another replica migrates: %v", r.err)
			}
			if e.Kind != dblock.EventWaiting {
				t.Fatalf("%q while another replica migrates", e.Kind)
			}
		default:
			return
		}
	}
}

// finish waits for the replica's end and returns the versions that it applied.
func (r *replica) finish(t testing.TB) []int64 {
	t.Helper()
	<-r.done
	if r.err != nil {
		t.Fatalf("replica: %v", r.err)
	}
	return versionsOf(r.results)
}

func versionsOf(results []*goose.MigrationResult) []int64 {
	var versions []int64
	for _, r := range results {
		versions = append(versions, r.Source.Version)
	}
	return versions
}

// begins waits until the gate's migration runs.
func (g *gate) begins(t testing.TB, r *replica) {
	t.Helper()
	select {
	case <-g.begun:
	case <-r.done:
		t.Fatalf("the replica ended before its migration began: %v", r.err)
	}
}

// mustUp applies all migrations.
func mustUp(t testing.TB, db dblock.DB, fsys fs.FS, options ...goose.ProviderOption) []int64 {
	t.Helper()
	results, err := migrations.Up(testContext(t), db, fsys, &migrations.Options{Provider: options})
	if err != nil {
		t.Fatalf("up: %v", err)
	}
	return versionsOf(results)
}

// recorded checks the rows of a version table.
func (d *Database) recorded(t testing.TB, table string, want ...int64) {
	t.Helper()
	if got := d.ints(t, "SELECT version_id FROM "+table+" ORDER BY version_id"); !slices.Equal(got, want) {
		t.Errorf("%s holds versions %v, want %v", table, got, want)
	}
}

func (d *Database) ints(t testing.TB, query string) []int64 {
	t.Helper()
	rows, err := d.SQL.QueryContext(testContext(t), query)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	defer rows.Close()
	var values []int64
	for rows.Next() {
		var v int64
		if err := rows.Scan(&v); err != nil {
			t.Fatal(err)
		}
		values = append(values, v)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return values
}

func (d *Database) exec(t testing.TB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := d.SQL.ExecContext(testContext(t), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// hasTable reports whether a table can be read.
func (d *Database) hasTable(t testing.TB, name string) bool {
	t.Helper()
	var n int
	return d.SQL.QueryRowContext(testContext(t), "SELECT COUNT(*) FROM "+name).Scan(&n) == nil
}
