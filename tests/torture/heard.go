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
}

// beliefs are those of holders that had lost the lock and did not know it yet. Left
// out are processes that were paused, and work on the lock's session, which needs
// not know.
func beliefs(all []*attempt, faults []fault) (found []belief) {
	for key, holds := range holdsByKey(all) {
		for _, h := range holds {
			heard := h.heardLoss()
			if heard == 0 || h.call == history.InTx || disturbed(faults, h, h.asked, heard, pauseProcess, freezeProcess) {
				continue
			}
			for _, x := range holds {
				if x.token > h.token && !(x.shared && h.shared) && x.granted != 0 && x.granted < heard {
					found = append(found, belief{key, h.op, x.op, history.Duration(x.granted, heard)})
				}
			}
		}
	}
	return found
}

// heardWithin is the longest that a loss may stay unknown while somebody else has the
// key: where no sign of life is under way that is a heartbeat. The rest is room for
// a busy machine.
const heardWithin = 5 * time.Second

// checkHeard: a holder hears of its loss in time.
func checkHeard(all []*attempt, faults []fault) []violation {
	f := findings{check: "heard"}
	for _, b := range beliefs(all, faults) {
		if b.both > heardWithin {
			f.add("%s: %s did not know for %v that it had lost the key to %s", b.key, b.first, b.both.Round(time.Millisecond), b.new)
		}
	}
	return f.all()
}
