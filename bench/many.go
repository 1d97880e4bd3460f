//go:build linux

package bench

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/tests/servers"
)

// many: one process holds many keys, each by a lock of its own. It counts the
// connections that the server has for them, and compares acquire + release of one
// more key with those of a locker that holds nothing.
func many(t *testing.T, d *database, p plan) {
	p.alone = p.repetitions
	all := keys("many", p.held)
	holding := fmt.Sprintf("%d keys held by one process", len(all))
	opened := row{what: holding + ": connections",
		target: targets{servers.KindPostgres: atMost(20), servers.KindMySQL: atMost(2), servers.KindMariaDB: atMost(10)}.of(d.kind)}
	comparison{
		name: "held", what: holding + ": acquire + release of one more, against a locker that holds nothing",
		target: everywhere(atMost(2)),
		ours: func(t testing.TB, d *database) op {
			before := d.connections(t)
			locks := d.locker(t)
			pools := d.connections(t) - before
			held, err := hold(t, locks, all)
			if errors.Is(err, dblock.ErrCapacity) {
				opened.detail = fmt.Sprintf("%d keys, then: %v", held, dblock.ErrCapacity)
				t.Skipf("%d keys, then: %v", held, err)
			} else if err != nil {
				t.Fatal(err)
			}
			opened.values = append(opened.values, float64(d.connections(t)-before-pools))
			d.mustBeHeld(t, all[0], all[len(all)/2], all[len(all)-1])
			return pairOn(locks, keys("one more", 1))
		},
		theirs: lockerPair("empty", 1),
	}.run(t, d, p)
	d.report.add(d.kind, opened)
}

// hold locks the keys, each by itself, until one fails.
func hold(t testing.TB, locks *advisory.Locker, keys []dblock.Key) (held int, err error) {
	var next, locked atomic.Int64
	var failure atomic.Pointer[error]
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			for failure.Load() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(keys) {
					return
				}
				if _, err := locks.Lock(t.Context(), keys[i]); err != nil {
					failure.CompareAndSwap(nil, &err)
					return
				}
				locked.Add(1)
			}
		})
	}
	all.Wait()
	if first := failure.Load(); first != nil {
		err = *first
	}
	return int(locked.Load()), err
}
