//go:build linux

package bench

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"
)

// several: many keys in one call, against a round trip for each of them.
func several(t *testing.T, d *database, p plan) {
	const n = 100
	p.chunks, p.alone = min(p.chunks, 10), p.repetitions
	inTurn := func(t testing.TB, d *database) op {
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
	}
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
		theirs: inTurn,
	}.run(t, d, p)
	comparison{
		name: "bound", what: "what bounds it: two bare statements for all of the keys, against the same",
		chunk:  100 * time.Millisecond,
		target: targets{}, ours: bareSeveral(n), theirs: inTurn,
	}.run(t, d, p)
}

// bareSeveral is the quickest statement of each database that locks several keys, with
// neither their names nor a look at who answers.
func bareSeveral(n int) func(t testing.TB, d *database) op {
	return func(t testing.TB, d *database) op {
		ids := rawKeys("bare", n)
		switch conn := d.dial(t).(type) {
		case pgxRaw:
			return func(ctx context.Context, _ int) error {
				for _, function := range []string{"pg_try_advisory_lock", "pg_advisory_unlock"} {
					var done int
					if err := conn.conn.QueryRow(ctx, "SELECT count(*) FILTER (WHERE "+function+"(id)) FROM unnest($1::bigint[]) AS k (id)", ids).Scan(&done); err != nil {
						return err
					}
					if err := must(function, done == n); err != nil {
						return err
					}
				}
				return nil
			}
		case sqlRaw:
			statement := func(before, after string) string {
				calls := make([]string, n)
				for i, id := range ids {
					calls[i] = fmt.Sprint(before, id, after)
				}
				return "SELECT " + strings.Join(calls, " AND ")
			}
			statements := []string{statement("GET_LOCK('", "', 0)"), statement("RELEASE_LOCK('", "')")}
			return func(ctx context.Context, _ int) error {
				for _, s := range statements {
					var done bool
					if err := conn.conn.QueryRowContext(ctx, s).Scan(&done); err != nil {
						return err
					}
					if err := must(s[:20], done); err != nil {
						return err
					}
				}
				return nil
			}
		}
		return func(context.Context, int) error { return fmt.Errorf("no statement for %T", d) }
	}
}
