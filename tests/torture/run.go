//go:build linux

package torture

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/migrations"
	"github.com/dblock-go/dblock/tests/servers"
	"github.com/dblock-go/dblock/tests/torture/history"
)

const (
	processes         = 4
	clientsPerProcess = 4
	numberOfKeys      = 4

	drainWithin = time.Minute // every call has a limit of some seconds
	endWithin   = 30 * time.Second
	modelWithin = 2 * time.Minute // for each key
)

// torture is one run.
type torture struct {
	server   *servers.Server
	dsn      string // of an empty database, around the proxies
	program  string // the worker
	planted  string // its defect
	seed     uint64
	duration time.Duration
	// calls: no faults are done, and the run ends after so many calls, if that is
	// before its duration is over. 0: faults are done.
	calls int
	// recovery bounds, after the last fault, how long it takes until each key was
	// granted again, and then until the server has freed what lost sessions held.
	recovery time.Duration
}

// result is what came of it.
type result struct {
	torture
	attempts   []*attempt
	faults     []fault
	violations []violation
}

// run lets processes lock, work and release while faults are done to them, then
// lets them come to rest, and checks all that is known by then.
func (o torture) run(t testing.TB) result {
	t.Helper()
	db := o.open(t)
	if err := migrations.Setup(t.Context(), db); err != nil {
		t.Fatal(err)
	}
	admin := o.server.Open(t, o.dsn)
	admin.SetMaxIdleConns(0) // the server restarts: a fresh connection for each statement
	var keys []dblock.Key
	for i := range numberOfKeys {
		keys = append(keys, dblock.NewKey(fmt.Sprintf("k%d", i)))
	}
	createWitness(t, admin, keys)

	in := newInjector(t, o, db, admin, keys)
	ctx, cancel := context.WithTimeout(t.Context(), o.duration)
	defer cancel()
	if o.calls == 0 {
		in.inject(ctx)
	}
	for ctx.Err() == nil && (o.calls == 0 || len(attempts(in.records(0))) < o.calls) {
		time.Sleep(100 * time.Millisecond)
	}
	calm := history.Now()
	for deadline := time.Now().Add(o.recovery); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if len(checkLiveness(attempts(in.records(calm)), keys, calm)) == 0 {
			break
		}
	}
	found := slices.Concat(in.comeToRest(o.recovery), mustBeFree(t.Context(), db, keys))

	w, folder, records := readWitness(t, admin), artifacts(t), in.records(0)
	all := attempts(records)
	found = slices.Concat(found, checkOverlap(all), checkFencing(all), checkStale(all), checkWitness(all, w),
		checkHeard(all, in.faults), checkErrors(all), checkLiveness(all, keys, calm), checkModel(all, folder, modelWithin))
	if len(found) > 0 {
		write(t, filepath.Join(folder, "history.jsonl"), records)
		write(t, filepath.Join(folder, "witness.jsonl"), w.log)
		write(t, filepath.Join(folder, "faults.jsonl"), in.faults)
	}
	return result{torture: o, attempts: all, faults: in.faults, violations: found}
}

func (o torture) open(t testing.TB) dblock.DB {
	t.Helper()
	var db dblock.DB
	var err error
	if o.server.Kind == servers.KindPostgres {
		db, err = postgres.Open(t.Context(), o.dsn)
	} else {
		db, err = mysql.Open(t.Context(), o.dsn)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

// comeToRest lets the processes give everything back, and looks for what is left
// before they end, since their end would hide it.
func (i *injector) comeToRest(recovery time.Duration) (found []violation) {
	for _, s := range i.slots {
		if err := s.process.drain(); err != nil {
			found = append(found, violation{"process", fmt.Sprintf("%s: %v", s.process.name, err)})
		}
	}
	for _, s := range i.slots {
		found = append(found, s.process.within(drainWithin, "drained", s.process.drained)...)
	}
	found = append(found, nothingHeld(i.db, recovery)...)
	for _, s := range i.slots {
		if err := s.process.finish(); err != nil {
			found = append(found, violation{"process", fmt.Sprintf("%s: %v", s.process.name, err)})
		}
		found = append(found, s.process.within(endWithin, "ended", s.process.ended)...)
	}
	for _, p := range i.all {
		found = append(found, p.finished()...)
	}
	return found
}

// nothingHeld waits until the server's own view shows no lock.
func nothingHeld(db dblock.DB, within time.Duration) []violation {
	deadline := time.Now().Add(within)
	for {
		held, err := inspect(db)
		switch {
		case err == nil && len(held) == 0:
			return nil
		case time.Now().Before(deadline):
			time.Sleep(20 * time.Millisecond)
			continue
		case err != nil:
			return []violation{{leak, err.Error()}}
		}
		var found []violation
		for _, h := range held {
			found = append(found, violation{leak, fmt.Sprintf("%s is %s, %v after everything was given back", shown(h), dblock.DescribeBlocker(h), within)})
		}
		return found
	}
}

func inspect(db dblock.DB) ([]dblock.Blocker, error) {
	const within = 5 * time.Second
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return db.Inspect(ctx)
}

// leak is what nothingHeld and mustBeFree check.
const leak = "leak"

// mustBeFree takes all keys at once.
func mustBeFree(ctx context.Context, db dblock.DB, keys []dblock.Key) []violation {
	locks, err := advisory.New(db)
	if err != nil {
		return []violation{{leak, err.Error()}}
	}
	defer locks.Close()
	lock, err := locks.TryLock(ctx, keys...)
	if err == nil {
		err = lock.Release(ctx)
	}
	if err != nil {
		return []violation{{leak, err.Error()}}
	}
	return nil
}

// artifacts is a folder that stays if the test fails.
func artifacts(t testing.TB) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "dblock-torture-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the history is in %s", folder)
		} else if err := os.RemoveAll(folder); err != nil {
			t.Error(err)
		}
	})
	return folder
}

// write writes a list, one element a line.
func write[T any](t testing.TB, path string, list []T) {
	t.Helper()
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	for _, element := range list {
		if err := encoder.Encode(element); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}

// checksOf are the checks that found the violations.
func checksOf(violations []violation) []string {
	found := map[string]bool{}
	for _, v := range violations {
		found[v.check] = true
	}
	return slices.Sorted(maps.Keys(found))
}
