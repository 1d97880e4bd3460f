//go:build linux

package bench

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
)

// inspect: how long a snapshot takes of 1,000 advisory locks and as many row locks,
// with half of 100 waiters behind one of each.
func inspect(t *testing.T, d *database, p plan) {
	held, waiters := min(p.held, 1000), min(p.held/10, 100)
	r := row{what: fmt.Sprintf("a snapshot of %d advisory and %[1]d row locks and %d waiters, in milliseconds", held, waiters), target: atMost(100)}
	db, err := openDB(t.Context(), d.kind, d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	all := keys("inspect", held)
	if _, err := hold(t, d.locker(t), all); err != nil {
		t.Fatal(err)
	}
	d.holdRows(t, held)
	d.waitFor(t, all[0], waiters/2)
	look := func() (seen int, took time.Duration) {
		began := time.Now()
		s, err := deadlock.Inspect(t.Context(), db)
		if err != nil {
			t.Fatal(err)
		}
		return waitersOf(s), time.Since(began)
	}
	// InnoDB's views are renewed when nobody has looked for 100 ms.
	const pause = 150 * time.Millisecond
	for began := time.Now(); ; time.Sleep(pause) {
		if seen, _ := look(); seen == waiters/2*2 {
			break
		} else if time.Since(began) > patience {
			t.Fatalf("%d of %d waiters are seen", seen, waiters)
		}
	}
	var times []time.Duration
	for range min(p.chunks, 20) {
		_, took := look()
		times = append(times, took)
		time.Sleep(pause)
	}
	r.values = []float64{float64(median(times)) / float64(time.Millisecond)}
	r.detail = fmt.Sprintf("the quickest %s", rounded(slices.Min(times)))
	d.report.add(d.kind, r)
}

func waitersOf(s *deadlock.Snapshot) int {
	ids := map[int64]bool{}
	for _, w := range s.Waits {
		ids[w.Waiter] = true
	}
	return len(ids)
}

// holdRows updates rows in a transaction that stays open, as long as the test runs.
func (d *database) holdRows(t testing.TB, n int) {
	t.Helper()
	pool := d.server.Open(t, d.dsn)
	for _, statement := range []string{
		"CREATE TABLE inspected (id INT PRIMARY KEY, n INT NOT NULL)",
		"INSERT INTO inspected VALUES (0, 0)",
	} {
		if _, err := pool.ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	for size := 1; size < n; size *= 2 {
		if _, err := pool.ExecContext(t.Context(), fmt.Sprintf("INSERT INTO inspected SELECT id + %d, 0 FROM inspected WHERE id + %[1]d < %d", size, n)); err != nil {
			t.Fatal(err)
		}
	}
	tx, err := pool.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() }) // its error says that the pool is closed
	if _, err := tx.ExecContext(t.Context(), "UPDATE inspected SET n = 1"); err != nil {
		t.Fatal(err)
	}
}

// waitFor makes n sessions wait for the key and n for a row, until the test ends.
func (d *database) waitFor(t testing.TB, key dblock.Key, n int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		all.Wait()
	})
	locks := d.locker(t, &advisory.Options{SessionPerLock: true, MaxWaits: n})
	pool := d.server.Open(t, d.dsn)
	for range n {
		all.Go(func() { _, _ = locks.Lock(ctx, key) })
		all.Go(func() { _ = update(ctx, pool) })
	}
}

func update(ctx context.Context, pool *sql.DB) error {
	_, err := pool.ExecContext(ctx, "UPDATE inspected SET n = 2 WHERE id = 0")
	return err
}
