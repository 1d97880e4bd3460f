package conformance

import (
	"errors"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
)

func advisoryShared(t *testing.T, h *Harness) {
	d := h.Database(t)
	a, b := newLocker(t, d.DB), newLocker(t, d.Open(t))
	key, other := dblock.NewKey("catalog"), dblock.NewKey("stock")

	if !d.DB.Features().Shared {
		_, err := a.Lock(testContext(t), key.Shared())
		if !errors.Is(err, dblock.ErrUnsupported) || !strings.Contains(err.Error(), "exclusively") {
			t.Errorf("%v", err)
		}
		return
	}

	first, second := mustLock(t, a, key.Shared()), mustLock(t, b, key.Shared())
	mustBeHeld(t, a, key)
	mustRelease(t, first)
	mustBeHeld(t, a, key)
	mustRelease(t, second)
	mustBeFree(t, a, key)

	// One call may mix modes; of one key in both modes the exclusive one counts.
	mixed := mustLock(t, a, key.Shared(), other, key)
	mustBeHeld(t, b, key.Shared())
	mustBeHeld(t, b, other.Shared())
	if err := mixed.Check(testContext(t)); err != nil {
		t.Errorf("check: %v", err)
	}
	mustRelease(t, mixed)
	mixed = mustLock(t, a, key.Shared(), other)
	shared := mustLock(t, b, key.Shared())
	mustRelease(t, shared)
	mustBeHeld(t, b, other)
	mustRelease(t, mixed)

	// A try does not overtake a queued writer.
	reader := mustLock(t, a, key.Shared())
	writer := passes(testContext(t), b, key)
	d.waiting(t, key, 1)
	mustBeHeld(t, newLocker(t, d.Open(t)), key.Shared())
	mustRelease(t, reader)
	if err := <-writer; err != nil {
		t.Errorf("the writer: %v", err)
	}
	d.nothingLeft(t)
}
