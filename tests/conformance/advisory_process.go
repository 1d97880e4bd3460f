package conformance

import (
	"testing"

	"github.com/dblock-go/dblock"
)

func advisoryProcess(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("leader")
	l := newLocker(t, d.DB)

	holder := startWorker(t, "hold", d.DSN, "leader")
	holder.expect("held")
	mustBeHeld(t, l, key)
	waiter := startWorker(t, "hold", d.DSN, "leader")
	d.waiting(t, key, 1)

	holder.kill()
	waiter.expect("held")
	mustBeHeld(t, l, key)
	waiter.kill()
	lock := mustLock(t, l, key)
	mustRelease(t, lock)
	d.nothingLeft(t)
}
