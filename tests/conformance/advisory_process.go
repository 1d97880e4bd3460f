package conformance

import (
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/tests/program"
)

func advisoryProcess(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("leader")
	l := newLocker(t, d.DB)

	holder := program.Worker(t, "hold", d.DSN, "leader")
	holder.Expect("held")
	mustBeHeld(t, l, key)
	waiter := program.Worker(t, "hold", d.DSN, "leader")
	d.waiting(t, key, 1)

	holder.Kill()
	waiter.Expect("held")
	mustBeHeld(t, l, key)
	waiter.Kill()
	lock := mustLock(t, l, key)
	mustRelease(t, lock)
	d.nothingLeft(t)
}
