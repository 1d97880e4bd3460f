//go:build linux

package bench

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/dblock-go/dblock/tests/servers"
)

// allocationsFile has, for each database, how many allocations an acquire and
// release of a free key by one goroutine may make.
const allocationsFile = "allocations.json"

// updateAllocations writes what is measured into the file:
//
//	go test -run TestPeers//allocations -allocations.update .
var updateAllocations = flag.Bool("allocations.update", false, "write "+allocationsFile+" instead of comparing with it")

// allocationsMargin is for what versions of Go and of the drivers change; the race
// detector adds about 8 %.
const allocationsMargin = 1.2

// allocations: an acquire and release by one goroutine must not make more of them
// than it did. Whoever makes fewer, or has a reason for more, updates the file.
func allocations(t *testing.T, d *database, _ plan) {
	figures, err := readAllocations()
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := allocationsOf(t, lockerPair("allocations", 1)(t, d)), allocationsOf(t, rawPair(t, d))
	if *updateAllocations {
		figures[d.kind] = ours
		if err := writeAllocations(figures); err != nil {
			t.Fatal(err)
		}
	}
	limit := figures[d.kind] * allocationsMargin
	if ours > limit {
		t.Errorf("an acquire and release makes %.0f allocations, and %.0f at most are accepted: make fewer, or write a new figure with -allocations.update", ours, limit)
	}
	d.report.add(d.kind, row{what: "allocations per acquire + release, 1 goroutine", target: atMost(limit), values: []float64{ours},
		detail: fmt.Sprintf("%.0f / %.0f, the raw statements", ours, theirs)})
}

func allocationsOf(t testing.TB, run op) float64 {
	return testing.AllocsPerRun(1000, func() {
		if err := run(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	})
}

func readAllocations() (map[servers.Kind]float64, error) {
	content, err := os.ReadFile(allocationsFile)
	if err != nil {
		return nil, err
	}
	figures := map[servers.Kind]float64{}
	return figures, json.Unmarshal(content, &figures)
}

func writeAllocations(figures map[servers.Kind]float64) error {
	content, err := json.MarshalIndent(figures, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(allocationsFile, append(content, '\n'), 0o644)
}
