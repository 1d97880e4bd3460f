//go:build linux

package bench

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// several: many keys in one call, against a round trip for each of them.
func several(t *testing.T, d *database, p plan) {
	const n = 100
	p.chunks, p.alone = min(p.chunks, 10), p.repetitions
	comparison{
		name: "100", what: fmt.Sprintf("%d keys in one call, against %[1]d round trips each way", n),
		chunk:  100 * time.Millisecond,
		target: mostly(atLeast(50), atLeast(20)),
		ours: func(t testing.TB, d *database) op {
			locks, all := d.locker(t), keys("several", n)
			lock, err := locks.Lock(t.Context(), all...)
			if err != nil {
				t.Fatal(err)
			}
			d.mustBeHeld(t, all[0], all[n-1])
			if err := lock.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			return func(ctx context.Context, _ int) error {
				lock, err := locks.Lock(ctx, all...)
				if err != nil {
					return err
				}
				return lock.Release(ctx)
			}
		},
		theirs: func(t testing.TB, d *database) op {
			conn, ids := d.dial(t), rawKeys("several", n)
			return func(ctx context.Context, _ int) error {
				for _, id := range ids {
					if err := conn.lock(ctx, id); err != nil {
						return err
					}
				}
				for _, id := range ids {
					if err := conn.unlock(ctx, id); err != nil {
						return err
					}
				}
				return nil
			}
		},
	}.run(t, d, p)
}
