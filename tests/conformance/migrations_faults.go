package conformance

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/migrations"
	"github.com/dblock-go/dblock/tests/program"
	"github.com/dblock-go/dblock/tests/servers"
)

func migrationsFailure(t *testing.T, h *Harness) {
	d := h.Database(t)
	bad := files(createEntries, [2]string{"INSERT INTO nowhere VALUES (1)", "DELETE FROM entries"})
	results, err := migrations.Up(testContext(t), d.DB, bad)
	var partial *goose.PartialError
	if err == nil || !strings.Contains(err.Error(), "00002_step.sql") || !strings.Contains(err.Error(), "nowhere") ||
		!errors.As(err, &partial) || errors.Is(err, dblock.ErrLost) {
		t.Errorf("got %v", err)
	}
	if got := versionsOf(results); !slices.Equal(got, []int64{1}) {
		t.Errorf("results beside the error: %v", got)
	}
	d.recorded(t, versionTable, 0, 1)
	d.nothingLeft(t)

	_, err = migrations.Up(testContext(t), d.DB, fstest.MapFS{"00001_step.sql": {Data: []byte("-- +goose Up\n")}, "00002_step.sql": {Data: []byte("no annotation")}})
	if err == nil || !strings.Contains(err.Error(), "00002_step.sql") {
		t.Errorf("of a file that goose cannot read: %v", err)
	}
	if got := mustUp(t, d.Open(t), files(createEntries, insertEntry)); !slices.Equal(got, []int64{2}) {
		t.Errorf("after the repair: %v", got)
	}
}

// idleLimits end sessions that the server has heard nothing of for 2 s. SQL Server
// has none.
var idleLimits = map[servers.Kind][]string{
	servers.KindPostgres: {"idle_session_timeout=2s", "idle_in_transaction_session_timeout=2s"},
	servers.KindMySQL:    {"wait-timeout=2", "interactive-timeout=2"},
	servers.KindMariaDB:  {"wait-timeout=2", "interactive-timeout=2"},
}

func migrationsIdleGuard(t *testing.T, h *Harness) {
	d := h.PrivateDatabase(t, idleLimits[h.Server(t).Kind]...)
	begun := make(chan struct{})
	onThePool := goose.NewGoMigration(1, &goose.GoFunc{RunDB: func(ctx context.Context, pool *sql.DB) error {
		close(begun)
		<-time.After(5 * time.Second)
		_, err := pool.ExecContext(ctx, "CREATE TABLE entries (id INT NOT NULL PRIMARY KEY)")
		return err
	}}, nil)
	up := func(db dblock.DB) ([]*goose.MigrationResult, error) {
		return migrations.Up(testContext(t), db, nil, &migrations.Options{Provider: []goose.ProviderOption{goose.WithGoMigrations(onThePool)}})
	}
	var replicas sync.WaitGroup
	replicas.Go(func() {
		if results, err := up(d.DB); err != nil || len(results) != 1 {
			t.Errorf("the migrator: %d results, %v", len(results), err)
		}
	})
	<-begun
	replica := d.Open(t)
	replicas.Go(func() {
		if results, err := up(replica); err != nil || len(results) != 0 {
			t.Errorf("the replica that waited: %d results, %v", len(results), err)
		}
	})
	replicas.Wait()
	d.recorded(t, versionTable, 0, 1)
}

func migrationsCancel(t *testing.T, h *Harness) {
	d := h.Database(t)
	mustUp(t, d.DB, files(createEntries))
	slow := newGate([]string{insertEntry[0]}, nil)
	ctx, cancel := context.WithCancel(testContext(t))
	r := deploy(t, func(_ context.Context, o *migrations.Options) ([]*goose.MigrationResult, error) {
		return up(d.DB, files(createEntries), slow.up(2))(ctx, o)
	})
	slow.begins(t, r)
	cancel()
	if <-r.done; !errors.Is(r.err, context.Canceled) {
		t.Errorf("got %v", r.err)
	}
	d.nothingLeft(t)
	if got := mustUp(t, d.DB, files(createEntries, insertEntry)); !slices.Equal(got, []int64{2}) {
		t.Errorf("the next run applied %v", got)
	}
	d.recorded(t, versionTable, 0, 1, 2)
}

// The guard and the migration are on one connection, so that losing one is losing
// the other: what the lost session did not do is not recorded.
func migrationsKilledSession(t *testing.T, h *Harness) {
	d := h.Database(t)
	mustUp(t, d.DB, files(createEntries))
	slow := newGate([]string{insertEntry[0]}, []string{"INSERT INTO entries VALUES (2)"})
	r := deploy(t, up(d.DB, files(createEntries), slow.up(2)))
	slow.begins(t, r)
	d.kill(t, d.holder(t, guardKey))
	d.nothingLeft(t)

	// Another replica need not wait for the one that lost the guard.
	if got := mustUp(t, d.Open(t), files(createEntries, insertEntry)); !slices.Equal(got, []int64{2}) {
		t.Errorf("the next run applied %v", got)
	}
	close(slow.open)
	if <-r.done; !errors.Is(r.err, dblock.ErrLost) || !strings.Contains(r.err.Error(), "version 2") {
		t.Errorf("got %v", r.err)
	}
	t.Log(r.err)
	lost := false
	for e := range r.heard {
		lost = lost || e.Kind == dblock.EventLost
	}
	if !lost {
		t.Error("the observer did not hear of the loss")
	}
	d.recorded(t, versionTable, 0, 1, 2)
	if got := d.ints(t, "SELECT id FROM entries"); !slices.Equal(got, []int64{1}) {
		t.Errorf("entries %v", got)
	}
	if got := mustUp(t, d.DB, files(createEntries, insertEntry)); len(got) != 0 {
		t.Errorf("the pool's next run applied %v", got)
	}
}

func migrationsKilledProcess(t *testing.T, h *Harness) {
	for _, step := range []string{"acquired", "first", "second", "released"} {
		t.Run(step, func(t *testing.T) {
			d := h.Database(t)
			w := program.Worker(t, "migrate", d.DSN, step)
			w.Expect(step)
			w.Kill()
			program.Worker(t, "migrate", d.DSN).Finish()
			d.recorded(t, versionTable, 0, 1, 2, 3)
			if got := d.ints(t, "SELECT id FROM entries ORDER BY id"); !slices.Equal(got, []int64{1, 2, 3, 4}) {
				t.Errorf("entries %v", got)
			}
			d.nothingLeft(t)
		})
	}
}

func migrationsProcesses(t *testing.T, h *Harness) {
	d := h.Database(t)
	var workers []*program.Process
	for range 10 {
		workers = append(workers, program.Worker(t, "migrate", d.DSN))
	}
	var applied []string
	for _, w := range workers {
		for _, line := range w.Finish() {
			if strings.HasPrefix(line, "applied") {
				applied = append(applied, line)
			}
		}
	}
	slices.Sort(applied)
	if want := []string{"applied 1", "applied 2", "applied 3"}; !slices.Equal(applied, want) {
		t.Errorf("applied %v", applied)
	}
	d.recorded(t, versionTable, 0, 1, 2, 3)
	if got := d.ints(t, "SELECT id FROM entries ORDER BY id"); !slices.Equal(got, []int64{1, 2, 3, 4}) {
		t.Errorf("entries %v", got)
	}
}

// CREATE INDEX CONCURRENTLY waits for every snapshot, so nobody may wait for the
// guard inside the server.
func migrationsConcurrentIndex(t *testing.T, h *Harness) {
	d := h.Database(t)
	if d.DB.Name() != "postgres" {
		t.Skip("CREATE INDEX CONCURRENTLY is PostgreSQL's")
	}
	fsys := fstest.MapFS{"00002_index.sql": {Data: []byte("-- +goose NO TRANSACTION\n-- +goose Up\nCREATE INDEX CONCURRENTLY by_name ON people (name);\n")}}
	slow := newGate([]string{"CREATE TABLE people (id INT PRIMARY KEY, name TEXT)"}, nil)
	first := deploy(t, up(d.DB, fsys, slow.up(1)))
	slow.begins(t, first)
	second := deploy(t, up(d.Open(t), fsys, slow.up(1)))
	second.hears(t, dblock.EventWaiting)
	close(slow.open)
	if got := append(first.finish(t), second.finish(t)...); !slices.Equal(got, []int64{1, 2}) {
		t.Errorf("applied %v", got)
	}
	if got := d.ints(t, "SELECT count(*) FROM pg_index WHERE indexrelid = 'by_name'::regclass AND indisvalid"); !slices.Equal(got, []int64{1}) {
		t.Error("the index is not valid")
	}
}
