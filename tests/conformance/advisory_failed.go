package conformance

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// inOrder are n keys in the order in which a call takes them.
func (d *Database) inOrder(t testing.TB, n int) []dblock.Key {
	t.Helper()
	keys := accounts(n)
	ordered, err := deadlock.Order(d.DB, keys...)
	if err != nil {
		t.Fatal(err)
	}
	place := func(k dblock.Key) int {
		return slices.IndexFunc(ordered, func(o dialect.Key) bool { return o.ID == k.ID() })
	}
	slices.SortFunc(keys, func(a, b dblock.Key) int { return place(a) - place(b) })
	return keys
}

// The keys that a call was granted before it failed are free at the very moment
// when it returns, and not only once the server has heard that a session ended.
func advisoryFailedWait(t *testing.T, h *Harness) {
	if h.Interrupt == "" {
		t.Skip("this server can only end whole sessions")
	}
	d := h.Database(t)
	keys := d.inOrder(t, 4)
	granted, busy := keys[:3], keys[3]
	others, waiters := newLocker(t, d.DB), newLocker(t, d.Open(t))
	lock := mustLock(t, others, busy)
	mustBeFree(t, others, granted...) // so that others have a session that waits for use
	for range 20 {
		result := make(chan error, 1)
		go func() {
			_, err := waiters.Lock(testContext(t), keys...)
			result <- err
		}()
		d.waiting(t, busy, 1)
		if _, err := d.SQL.ExecContext(t.Context(), fmt.Sprintf(h.Interrupt, d.holder(t, granted[0]))); err != nil {
			t.Fatal(err)
		}
		if err := <-result; !errors.Is(err, dblock.ErrCanceled) {
			t.Fatalf("interrupted by an administrator: %v", err)
		}
		mustBeFree(t, others, granted...)
	}
	mustRelease(t, lock)
}

// So are all keys of a call whose fencing numbers could not be drawn.
func advisoryFailedFencing(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	keys := d.inOrder(t, 3)
	others, fenced := newLocker(t, d.DB), newLocker(t, d.Open(t), &advisory.Options{Fencing: true})
	mustRelease(t, mustLock(t, fenced, keys...))
	used := dialect.FenceRows([]dialect.Key{keys[2].Resolve("")})[0].ID
	d.exec(t, fmt.Sprintf("UPDATE locks SET fence = %d WHERE id = %d", math.MaxInt64, used))
	for range 20 {
		mustBeFree(t, others, dblock.NewKey("warm"))
		for what, call := range map[string]func(context.Context, ...dblock.Key) (*advisory.Lock, error){"lock": fenced.Lock, "try": fenced.TryLock} {
			if _, err := call(testContext(t), keys...); err == nil || !strings.Contains(err.Error(), "out of range") {
				t.Fatalf("%s with a number that is used up: %v", what, err)
			}
			mustBeFree(t, others, keys...)
		}
	}
}

// A victim of a deadlock gives back what its failed call was granted, and keeps
// what it held before.
func advisoryFailedDeadlock(t *testing.T, h *Harness) {
	d := h.Database(t)
	ctx := testContext(t)
	keys := d.inOrder(t, 4)
	resolved := make([]dialect.Key, len(keys))
	for i, k := range keys {
		resolved[i] = k.Resolve(d.DB.Features().Scope)
	}
	others := newLocker(t, d.Open(t))
	mustBeFree(t, others, dblock.NewKey("warm"))

	type party struct {
		session     dialect.Session
		held, extra int // keys
	}
	parties := []*party{{held: 0, extra: 2}, {held: 1, extra: 3}}
	for _, p := range parties {
		var err error
		if p.session, err = d.DB.OpenSession(ctx, dialect.SessionOptions{}); err != nil {
			t.Fatal(err)
		}
		defer p.session.Close()
		if _, err := p.session.Acquire(ctx, dialect.Request{Keys: resolved[p.held : p.held+1]}); err != nil {
			t.Fatal(err)
		}
	}
	victims, ended := make(chan *party, 2), make(chan error, 2)
	for i, p := range parties {
		go func() {
			_, err := p.session.Acquire(ctx, dialect.Request{Keys: []dialect.Key{resolved[p.extra], resolved[parties[1-i].held]}})
			if errors.Is(err, dialect.Deadlock) {
				var lock *advisory.Lock
				if lock, err = others.TryLock(ctx, keys[p.extra]); err == nil {
					err = lock.Release(ctx)
				}
				victims <- p
			}
			ended <- err
		}()
	}
	select {
	case victim := <-victims:
		if held, err := dialect.HoldsAll(ctx, victim.session, resolved[victim.held:victim.held+1]); err != nil || !held {
			t.Errorf("what the victim held before: %v, %v", held, err)
		}
		if err := victim.session.Close(); err != nil { // so that the other party goes on
			t.Error(err)
		}
	case <-ctx.Done():
		t.Error("no victim")
	}
	for range parties {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}
