package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
)

func accounts(n int) []dblock.Key {
	keys := make([]dblock.Key, n)
	for i := range keys {
		keys[i] = dblock.NewKey("account", fmt.Sprint(i))
	}
	return keys
}

func advisorySeveralTry(t *testing.T, h *Harness) {
	d := h.Database(t)
	mine, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	keys := accounts(20)
	for _, taken := range []int{0, 10, 19} {
		lock := mustLock(t, others, keys[taken])
		mustBeHeld(t, mine, keys...)
		for i, k := range keys {
			if i != taken {
				mustBeFree(t, others, k)
			}
		}
		mustRelease(t, lock)
	}
	all := mustLock(t, mine, keys...)
	for _, k := range keys {
		mustBeHeld(t, others, k)
	}
	mustRelease(t, all)
	for _, k := range keys {
		mustBeFree(t, others, k)
	}
	d.nothingLeft(t)
}

func advisorySeveralOrders(t *testing.T, h *Harness) {
	d := h.Database(t)
	keys := accounts(6)
	var inside [6]sync.Mutex // a second, independent witness of exclusion
	var workers sync.WaitGroup
	for w := range 8 {
		random := rand.New(rand.NewPCG(1, uint64(w)))
		l := newLocker(t, d.DB)
		workers.Go(func() {
			for range 25 {
				chosen := random.Perm(len(keys))[:3]
				call := []dblock.Key{keys[chosen[0]], keys[chosen[1]], keys[chosen[2]], keys[chosen[0]]}
				err := l.Do(testContext(t), func(context.Context) error {
					for _, i := range chosen {
						if !inside[i].TryLock() {
							t.Errorf("two holders of %s", keys[i])
							continue
						}
						defer inside[i].Unlock()
					}
					return nil
				}, call...)
				if err != nil {
					t.Errorf("%v", err)
					return
				}
			}
		})
	}
	workers.Wait()
	d.nothingLeft(t)
}

// Two different keys with one id, as in the golden vectors.
var (
	colliding     = dblock.NewKey("hash-\xbb\xc7k\x04\x11\x9a\x95\xe7")
	collidingWith = dblock.RawKey(-1)
)

func advisoryCollision(t *testing.T, h *Harness) {
	if colliding.ID() != collidingWith.ID() {
		t.Fatalf("the keys do not collide: %d and %d", colliding.ID(), collidingWith.ID())
	}
	d := h.Database(t)
	mine, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	lock, err := mine.TryLock(testContext(t), colliding, collidingWith)
	if err != nil {
		t.Fatalf("one call for both: %v", err)
	}
	mustBeHeld(t, others, colliding)
	mustBeHeld(t, others, collidingWith)
	if err := lock.Check(testContext(t)); err != nil {
		t.Errorf("check: %v", err)
	}
	mustRelease(t, lock)
	mustBeFree(t, others, colliding, collidingWith)
	d.nothingLeft(t)
}
