package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/migrations"
)

// The slow migration creates two tables, which on MySQL and MariaDB commits
// twice before it is done.
func migrationsReplicas(t *testing.T, h *Harness) {
	d := h.Database(t)
	slow := newGate([]string{"CREATE TABLE a (id INT PRIMARY KEY)", "CREATE TABLE b (id INT PRIMARY KEY)"},
		[]string{"INSERT INTO a VALUES (1)", "INSERT INTO b VALUES (1)"})
	first := deploy(t, up(d.DB, nil, slow.up(1)))
	slow.begins(t, first)

	var waiters []*replica
	for range 4 {
		waiters = append(waiters, deploy(t, up(d.Open(t), nil, slow.up(1))))
	}
	for _, w := range waiters {
		e := w.hears(t, dblock.EventWaiting)
		for e.Err != nil { // the server was too busy to say
			e = w.hears(t, dblock.EventWaiting)
		}
		if e.Duration <= 0 || e.Blocker == nil || e.Blocker.Session != d.holder(t, guardKey) {
			t.Errorf("announced %+v, the server shows session %d", e, d.holder(t, guardKey))
		}
	}
	for _, w := range waiters {
		w.stillWaiting(t)
	}
	close(slow.open)
	if got := first.finish(t); !slices.Equal(got, []int64{1}) {
		t.Errorf("the first replica applied %v", got)
	}
	for _, w := range waiters {
		w.hears(t, dblock.EventAcquired)
		if got := w.finish(t); len(got) != 0 {
			t.Errorf("a replica that waited applied %v", got)
		}
	}
	d.recorded(t, versionTable, 0, 1)
	if got := d.ints(t, "SELECT a.id FROM a JOIN b ON a.id = b.id"); !slices.Equal(got, []int64{1}) {
		t.Errorf("rows %v", got)
	}
	d.nothingLeft(t)
}

func migrationsUpTo(t *testing.T, h *Harness) {
	d := h.Database(t)
	slow := newGate([]string{createEntries[0]}, nil)
	upTo := func(db dblock.DB) func(context.Context, *migrations.Options) ([]*goose.MigrationResult, error) {
		return func(ctx context.Context, o *migrations.Options) ([]*goose.MigrationResult, error) {
			o.Provider = []goose.ProviderOption{slow.up(1), newGate(nil, nil).up(2)}
			return migrations.UpTo(ctx, db, nil, 1, o)
		}
	}
	first := deploy(t, upTo(d.DB))
	slow.begins(t, first)
	second := deploy(t, upTo(d.Open(t)))
	second.hears(t, dblock.EventWaiting)
	close(slow.open)
	if got := first.finish(t); !slices.Equal(got, []int64{1}) {
		t.Errorf("the first replica applied %v", got)
	}
	if got := second.finish(t); len(got) != 0 {
		t.Errorf("the replica that waited applied %v", got)
	}
	d.recorded(t, versionTable, 0, 1)
}

func migrationsDown(t *testing.T, h *Harness) {
	d := h.Database(t)
	fsys := files(createEntries)
	mustUp(t, d.DB, fsys, newGate(nil, nil).down(2))
	slow := newGate(nil, nil)
	down := func(db dblock.DB) func(context.Context, *migrations.Options) ([]*goose.MigrationResult, error) {
		return func(ctx context.Context, o *migrations.Options) ([]*goose.MigrationResult, error) {
			o.Provider = []goose.ProviderOption{slow.down(2)}
			result, err := migrations.Down(ctx, db, fsys, o)
			return []*goose.MigrationResult{result}, err
		}
	}
	first := deploy(t, down(d.DB))
	slow.begins(t, first)
	second := deploy(t, down(d.Open(t)))
	second.hears(t, dblock.EventWaiting)
	close(slow.open)
	if got := append(first.finish(t), second.finish(t)...); !slices.Equal(got, []int64{2, 1}) {
		t.Errorf("rolled back %v, want 2 then 1", got)
	}
	d.recorded(t, versionTable, 0)
	if _, err := migrations.Down(testContext(t), d.DB, fsys); !errors.Is(err, goose.ErrNoNextVersion) {
		t.Errorf("down on an empty database: %v", err)
	}
}

func migrationsBootstrap(t *testing.T, h *Harness) {
	const replicas, rounds = 20, 3
	fsys := files(createEntries, insertEntry)
	for range rounds {
		d := h.Database(t)
		dbs := make([]dblock.DB, replicas)
		for i := range dbs {
			dbs[i] = d.Open(t)
		}
		start := make(chan struct{})
		applied := make([][]int64, replicas)
		var all sync.WaitGroup
		for i, db := range dbs {
			all.Go(func() {
				<-start
				results, err := migrations.Up(testContext(t), db, fsys)
				if err != nil {
					t.Errorf("replica %d: %v", i, err)
				}
				applied[i] = versionsOf(results)
			})
		}
		close(start)
		all.Wait()
		if got := slices.Concat(applied...); !slices.Equal(got, []int64{1, 2}) {
			t.Errorf("applied %v, want each once", got)
		}
		d.recorded(t, versionTable, 0, 1, 2)
		d.nothingLeft(t)
	}
}

// A crash between the creation of the version table and its first row leaves an
// empty table where DDL commits implicitly. Goose alone refuses it.
func migrationsHalfBootstrap(t *testing.T, h *Harness) {
	d := h.Database(t)
	fsys := files(createEntries)
	if _, err := migrations.Down(testContext(t), d.DB, fsys); !errors.Is(err, goose.ErrNoNextVersion) {
		t.Fatal(err)
	}
	d.exec(t, "DELETE FROM "+versionTable)
	if version, err := migrations.Version(testContext(t), d.DB, fsys); version != 0 || err != nil {
		t.Errorf("version %d, %v", version, err)
	}
	if got := mustUp(t, d.DB, fsys); !slices.Equal(got, []int64{1}) {
		t.Errorf("applied %v", got)
	}
	d.recorded(t, versionTable, 0, 1)
}

func migrationsStatus(t *testing.T, h *Harness) {
	d := h.Database(t)
	fsys := files(createEntries)
	state := func() (int64, []goose.State) {
		t.Helper()
		slow := newGate(nil, nil).up(2)
		o := &migrations.Options{Provider: []goose.ProviderOption{slow}}
		version, err := migrations.Version(testContext(t), d.DB, fsys, o)
		if err != nil {
			t.Fatalf("version: %v", err)
		}
		status, err := migrations.Status(testContext(t), d.DB, fsys, o)
		if err != nil {
			t.Fatalf("status: %v", err)
		}
		var states []goose.State
		for _, s := range status {
			states = append(states, s.State)
		}
		return version, states
	}
	if version, states := state(); version != 0 || !slices.Equal(states, []goose.State{goose.StatePending, goose.StatePending}) {
		t.Errorf("of an empty database: %d, %v", version, states)
	}
	if d.hasTable(t, versionTable) {
		t.Error("a question created the version table")
	}
	slow := newGate(nil, nil)
	r := deploy(t, up(d.DB, fsys, slow.up(2)))
	slow.begins(t, r)
	if version, states := state(); version != 1 || !slices.Equal(states, []goose.State{goose.StateApplied, goose.StatePending}) {
		t.Errorf("during a migration: %d, %v", version, states)
	}
	close(slow.open)
	r.finish(t)
	if version, _ := state(); version != 2 {
		t.Errorf("in the end: %d", version)
	}
}

func migrationsScope(t *testing.T, h *Harness) {
	one, other := h.Database(t), h.Database(t)
	slow := newGate(nil, nil)
	r := deploy(t, up(one.DB, nil, slow.up(1)))
	slow.begins(t, r)
	if got := mustUp(t, other.DB, files(createEntries)); !slices.Equal(got, []int64{1}) {
		t.Errorf("applied %v", got)
	}
	close(slow.open)
	r.finish(t)
}

func migrationsSmallPool(t *testing.T, h *Harness) {
	d := h.Database(t)
	slow := newGate([]string{createEntries[0]}, nil)
	first := deploy(t, up(d.OpenMax(t, 1), nil, slow.up(1)))
	slow.begins(t, first)
	second := deploy(t, up(d.OpenMax(t, 1), nil, slow.up(1)))
	// The pool may have no connection left for the question who is in the way.
	if e := second.hears(t, dblock.EventWaiting); e.Blocker == nil && e.Err == nil {
		t.Error("no holder, and no reason why it is unknown")
	}
	close(slow.open)
	if got := append(first.finish(t), second.finish(t)...); !slices.Equal(got, []int64{1}) {
		t.Errorf("applied %v", got)
	}
	d.recorded(t, versionTable, 0, 1)
}

func migrationsWaitLimit(t *testing.T, h *Harness) {
	d := h.Database(t)
	slow := newGate(nil, nil)
	first := deploy(t, up(d.DB, nil, slow.up(1)))
	slow.begins(t, first)
	_, err := migrations.Up(testContext(t), d.Open(t), nil, &migrations.Options{
		WaitLimit: 300 * time.Millisecond,
		Provider:  []goose.ProviderOption{slow.up(1)},
	})
	var details *dblock.Error
	if !errors.Is(err, dblock.ErrTimeout) || !errors.As(err, &details) ||
		details.Blocker == nil || details.Blocker.Session != d.holder(t, guardKey) ||
		!slices.Equal(details.Keys, []string{guardKey.String()}) || !strings.Contains(err.Error(), "300ms") {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	second := deploy(t, func(_ context.Context, o *migrations.Options) ([]*goose.MigrationResult, error) {
		return up(d.Open(t), nil, slow.up(1))(ctx, o)
	})
	second.hears(t, dblock.EventWaiting)
	cancel()
	if <-second.done; !errors.Is(second.err, dblock.ErrCanceled) {
		t.Errorf("got %v", second.err)
	}
	close(slow.open)
	first.finish(t)
	d.nothingLeft(t)
}

func migrationsLimits(t *testing.T, h *Harness) {
	d := h.Database(t)
	db := d.Open(t)
	holder := newLocker(t, d.DB)
	lock := mustLock(t, holder, guardKey)
	apply := func(limit time.Duration, o *migrations.Options) error {
		o.WaitLimit = limit
		_, err := migrations.Up(testContext(t), db, files(createEntries), o)
		return err
	}
	for _, limit := range limits {
		began := time.Now()
		err := apply(limit, &migrations.Options{})
		if waited := time.Since(began); !errors.Is(err, dblock.ErrTimeout) || waited < limit {
			t.Errorf("limit %v: after %v: %v", limit, waited, err)
		}
	}
	if err := apply(-1, &migrations.Options{}); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("a negative limit: %v", err)
	}
	for i, limit := range longLimits {
		waiter := deploy(t, func(ctx context.Context, o *migrations.Options) ([]*goose.MigrationResult, error) {
			o.VersionTable, o.Key = fmt.Sprintf("versions_%d", i), guardKey
			return nil, apply(limit, o)
		})
		waiter.hears(t, dblock.EventWaiting)
		mustRelease(t, lock)
		if waiter.finish(t); waiter.err != nil {
			t.Errorf("limit %v: %v", limit, waiter.err)
		}
		d.exec(t, "DROP TABLE entries")
		lock = mustLock(t, holder, guardKey)
	}
	mustRelease(t, lock)
}
