//go:build linux

package torture

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// report shows the figures of a run as the rows of a table.
func (r result) report() string {
	var b strings.Builder
	row := func(name string, value any) { fmt.Fprintf(&b, "| %s | %v |\n", name, value) }
	row("seed", r.seed)
	row("duration", r.duration)
	classes := map[dialect.Class]int{}
	var granted, shared, several, lost, stale int
	writes := map[history.Way]int{}
	for _, a := range r.attempts {
		if a.granted == 0 {
			classes[dialect.Class(a.class)]++
			continue
		}
		granted++
		if len(a.keys) > 1 {
			several++
		}
		for _, k := range a.keys {
			if k.Shared {
				shared++
				break
			}
		}
		if a.heardLoss() != 0 {
			lost++
		}
		stale += len(a.stale)
		for _, w := range a.writes {
			writes[w.Way]++
		}
	}
	row("acquisitions", granted)
	row("… of several keys", several)
	row("… with a shared key", shared)
	row("refused tries", classes[dblock.ErrNotAcquired])
	row("timeouts", classes[dblock.ErrTimeout])
	row("cancels", classes[dblock.ErrCanceled])
	row("calls that met a fault", classes[dblock.ErrLost]+classes[dblock.ErrUnavailable])
	row("writes on the lock's session", writes[history.OnSession])
	row("writes with a fencing number", writes[history.Fenced])
	row("stale writes refused", stale)
	for _, k := range kinds {
		row("fault: "+string(k), r.count(k))
	}
	row("locks lost", lost)
	row("longest from the kill of a session to its holder's hearing of it", r.hearing().Round(time.Millisecond))
	row("longest that two believed to hold a key, neither of them paused", r.believed().Round(time.Millisecond))
	leaks := 0
	for _, v := range r.violations {
		if v.check == leak {
			leaks++
		}
	}
	row("violations", len(r.violations)-leaks)
	row("leaks", leaks)
	return b.String()
}

func (r result) count(k kind) (n int) {
	for _, f := range r.faults {
		if f.Kind == k {
			n++
		}
	}
	return n
}

// hearing is the longest time between the kill of a session and the moment when
// the holder of an exclusive key on it heard of that, where no other fault hit
// the holder meanwhile.
func (r result) hearing() (longest time.Duration) {
	others := slices.DeleteFunc(slices.Clone(kinds), func(k kind) bool { return k == killSession || k == cancelStatement })
	byKey := holdsByKey(r.attempts)
	for _, f := range r.faults {
		if f.Kind != killSession || f.Key == "" {
			continue
		}
		for _, h := range byKey[f.Key] {
			heard := h.heardLoss()
			if h.shared || h.granted > f.From || heard < f.From || disturbed(r.faults, h, f.From, heard, others...) {
				continue
			}
			longest = max(longest, history.Duration(f.From, heard))
		}
	}
	return longest
}

// disturbed reports a fault of some kinds that hit the holder between two moments.
func disturbed(faults []fault, h hold, from, to int64, by ...kind) bool {
	process, _, _ := strings.Cut(h.op, "-")
	return slices.ContainsFunc(faults, func(f fault) bool {
		return slices.Contains(by, f.Kind) && (f.Process == "" || f.Process == process) && f.From < to && f.To > from
	})
}

// believed is the longest time that a holder which had lost its lock did not know
// it while somebody else had the key already. That is what fencing numbers are for.
// Left out are processes that were paused, and work on the lock's session, which
// needs not know.
func (r result) believed() (longest time.Duration) {
	for _, b := range beliefs(r.attempts, r.faults) {
		longest = max(longest, b.both)
	}
	return longest
}
