//go:build linux

package torture

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/dblock-go/dblock/tests/program"
	"github.com/dblock-go/dblock/tests/servers"
	"github.com/dblock-go/dblock/tests/torture/history"
)

var (
	duration = flag.Duration("torture.duration", enoughForAll, "how long to torture each database")
	seed     = flag.Uint64("torture.seed", 0, "what the random choices come from; 0: a random one")
)

func TestMain(m *testing.M) { servers.Main(m, program.Remove) }

func TestUnderTorture(t *testing.T) {
	for _, kind := range []servers.Kind{servers.KindPostgres, servers.KindMySQL, servers.KindMariaDB} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			underTorture(t, kind)
		})
	}
}

func underTorture(t *testing.T, kind servers.Kind) {
	server := servers.Start(t, kind)
	r := torture{server: server, dsn: server.Database(t), program: program.Build(t, "tests/worker"),
		seed: chosen(t), duration: *duration, recovery: 30 * time.Second}.run(t)
	t.Logf("\n%s", r.report())
	for _, v := range r.violations {
		t.Errorf("seed %d: %v", r.seed, v)
	}
	for _, k := range kinds {
		if r.count(k) == 0 && r.duration >= enoughForAll {
			t.Errorf("seed %d: no fault of the kind %q", r.seed, k)
		}
	}
}

// enoughForAll is a duration in which every kind of fault has its turn.
const enoughForAll = time.Minute

func chosen(t *testing.T) uint64 {
	t.Helper()
	s := *seed
	for s == 0 {
		s = rand.Uint64()
	}
	t.Logf("-torture.seed=%d", s)
	return s
}

// Whoever trusts the torture must have seen it fail.
func TestPlantedBugsAreFound(t *testing.T) {
	for planted, checks := range map[string][]string{
		history.ReleasedEarly: {"linearizability", "overlap"},
		history.ReleasedInTx:  {"witness", "linearizability", "overlap"},
		history.NotReleased:   {leak},
		history.OldToken:      {"fencing", "linearizability"},
	} {
		t.Run(planted, func(t *testing.T) {
			t.Parallel()
			worker := program.Build(t, "tests/worker", "planted_bug")
			var found []string
			missing := checks
			// A busy machine does so little in one run that chance can hide a bug from a check.
			for run := 0; run < 4 && len(missing) > 0; run++ {
				r := undisturbed(t, planted, worker, 5*time.Second)
				t.Logf("found: %v", r.violations)
				found = append(found, checksOf(r.violations)...)
				missing = slices.DeleteFunc(slices.Clone(checks), func(c string) bool { return slices.Contains(found, c) })
			}
			if len(missing) > 0 {
				t.Errorf("%q found nothing, but %q", missing, found)
			}
		})
	}
}

// With neither bugs nor faults nothing goes wrong: what the planted bugs show is
// theirs.
func TestNothingIsFoundWithoutABug(t *testing.T) {
	t.Parallel()
	r := undisturbed(t, "", program.Build(t, "tests/worker"), 30*time.Second)
	for _, v := range r.violations {
		t.Errorf("seed %d: %v", r.seed, v)
	}
	for _, a := range r.attempts {
		if a.heardLoss() != 0 {
			t.Errorf("seed %d: %s lost its lock: %s", r.seed, a.op, a.err)
		}
	}
}

// undisturbed is a run without faults.
func undisturbed(t *testing.T, planted, worker string, recovery time.Duration) result {
	t.Helper()
	server := servers.Postgres(t)
	r := torture{server: server, dsn: server.Database(t), program: worker, planted: planted,
		seed: chosen(t), duration: 2 * time.Minute, calls: 500, recovery: recovery}.run(t)
	t.Logf("\n%s", r.report())
	return r
}
