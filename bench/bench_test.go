//go:build linux

package bench

import (
	"flag"
	"io"
	"os"
	"testing"

	"github.com/dblock-go/dblock/tests/servers"
)

var (
	repetitions = flag.Int("peers.repetitions", 0, "how often each comparison is measured; 0: everything runs for a moment only, and no figure is meant")
	results     = flag.String("peers.results", "", "the file for the figures")
)

func TestMain(m *testing.M) {
	if workIfAsked() {
		return
	}
	servers.Main(m)
}

var kinds = []servers.Kind{servers.KindPostgres, servers.KindMySQL, servers.KindMariaDB}

var scenarios = []struct {
	name string
	run  func(*testing.T, *database, plan)
}{
	{"pair", pair},
	{"transaction", transaction},
	{"throughput", throughput},
	{"hot", hot},
	{"several", several},
	{"many", many},
	{"rows", rows},
	{"inspect", inspect},
	{"allocations", allocations},
}

// TestPeers runs every scenario on every database.
func TestPeers(t *testing.T) {
	p, r := moment, newReport(io.Discard)
	if *repetitions > 0 {
		p, r = measured(*repetitions), newReport(os.Stdout)
	}
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			d := newDatabase(t, kind, r)
			for _, s := range scenarios {
				t.Run(s.name, func(t *testing.T) { s.run(t, d, p) })
			}
		})
	}
	if *repetitions > 0 && *results != "" && !t.Failed() {
		if err := os.WriteFile(*results, []byte(r.document(*repetitions)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkPair is an acquire and release of a free key, by one goroutine.
func BenchmarkPair(b *testing.B) {
	for _, kind := range kinds {
		b.Run(string(kind), func(b *testing.B) {
			run := lockerPair("pair", 1)(b, newDatabase(b, kind, newReport(io.Discard)))
			b.ReportAllocs()
			for b.Loop() {
				if err := run(b.Context(), 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
