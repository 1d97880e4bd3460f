//go:build linux

package torture

import (
	"time"

	"github.com/dblock-go/dblock/tests/torture/history"
)

// belief is how long two clients believed to hold a key.
type belief struct {
	key        string
	first, new string // calls
	both       time.Duration
	cutOff     bool // from the server: it hears of nothing but the silence
}

// beliefs are those of holders that had lost the lock and did not know it yet. Left
// out are processes that were paused, and work on the lock's session, which needs
// not know.
func beliefs(all []*attempt, faults []fault) (found []belief) {
	for key, holds := range holdsByKey(all) {
		for _, h := range holds {
			heard := h.heardLoss()
			if h.releasing != 0 { // who gives back believes no more
				heard = min(heard, h.releasing)
			}
			if heard == 0 || h.call == history.InTx || disturbed(faults, h, h.asked, heard, pauseProcess, freezeProcess) {
				continue
			}
			for _, x := range holds {
				if x.token > h.token && !(x.shared && h.shared) && x.granted != 0 && x.granted < heard {
					found = append(found, belief{key, h.op, x.op, history.Duration(x.granted, heard),
						disturbed(faults, h, h.asked, heard, silence, latency)})
				}
			}
		}
	}
	return found
}

// The longest that a loss may stay unknown while somebody else has the key: a
// heartbeat, or, if the server crashes behind a silent network for instance, what
// bounds a silence. The rest is room for a busy machine.
const (
	heardWithin       = 5 * time.Second
	heardWithinCutOff = 12 * time.Second
)

// checkHeard: a holder hears of its loss in time.
func checkHeard(all []*attempt, faults []fault) []violation {
	f := findings{check: "heard"}
	for _, b := range beliefs(all, faults) {
		if b.both > heardWithinCutOff || b.both > heardWithin && !b.cutOff {
			f.add("%s: %s did not know for %v that it had lost the key to %s", b.key, b.first, b.both.Round(time.Millisecond), b.new)
		}
	}
	return f.all()
}
