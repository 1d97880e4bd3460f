package conformance

import (
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// A locker's calls each have their own hold, which a second call does not enter
// (see "is not re-entrant"). The session below is re-entrant, and counts.
func advisoryCounting(t *testing.T, h *Harness) {
	d := h.Database(t)
	ctx := testContext(t)
	key := dblock.NewKey("job")
	keys := []dialect.Key{key.Resolve(d.DB.Features().Scope)}
	others := newLocker(t, d.Open(t))
	s, err := d.DB.OpenSession(ctx, dialect.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const times = 3
	for range times {
		if _, err := s.Acquire(ctx, dialect.Request{Keys: keys}); err != nil {
			t.Fatal(err)
		}
	}
	for range times {
		mustBeHeld(t, others, key)
		if held, err := dialect.HoldsAll(ctx, s, keys); err != nil || !held {
			t.Errorf("held: %v, %v", held, err)
		}
		if err := s.Release(ctx, keys); err != nil {
			t.Fatal(err)
		}
	}
	mustBeFree(t, others, key)
	if held, err := dialect.HoldsAll(ctx, s, keys); err != nil || held {
		t.Errorf("held after the last release: %v, %v", held, err)
	}
	if err := s.Release(ctx, keys); dialect.ClassOf(err) != dialect.NotHeld {
		t.Errorf("one release too many: %v", err)
	}
}
