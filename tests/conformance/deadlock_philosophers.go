package conformance

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/rowlock"
)

const (
	philosophers = 5
	// mealsAtOnce is how often all of them together eat with both forks taken in one call,
	// in one way or another.
	mealsAtOnce = 10_000
)

// fork is to the right of the philosopher with that number.
func fork(n int) dblock.Key { return dblock.NewKey("fork", fmt.Sprint(n%philosophers)) }

// table is what philosophers sit at. Each has a place in the database, where a meal that
// ends well counts.
type table struct {
	*Database
	checker *deadlock.Checker
	inUse   [philosophers]atomic.Bool
	retries atomic.Int64
}

func newTable(t *testing.T, h *Harness) *table {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE meals (philosopher INT PRIMARY KEY, eaten INT NOT NULL)`)
	for n := range philosophers {
		d.exec(t, fmt.Sprintf(`INSERT INTO meals VALUES (%d, 0)`, n))
	}
	d.findDeadlocksSoon(t)
	return &table{Database: d, checker: deadlock.NewChecker(nil)}
}

// dine lets all of them eat a number of times. A function that eats returns the error of
// what it could not do.
func (s *table) dine(t *testing.T, each int, eat func(ctx context.Context, philosopher int) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	began := time.Now()
	var all sync.WaitGroup
	for n := range philosophers {
		all.Go(func() {
			for range each {
				if err := eat(ctx, n); err != nil {
					t.Errorf("philosopher %d: %v", n, err)
					return
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d meals in %v, %d of them begun again", philosophers*each, time.Since(began).Round(time.Millisecond), s.retries.Load())
}

// use fails if somebody else has one of the forks.
func (s *table) use(t *testing.T, philosopher int) (putDown func()) {
	forks := []*atomic.Bool{&s.inUse[philosopher], &s.inUse[(philosopher+1)%philosophers]}
	for _, f := range forks {
		if !f.CompareAndSwap(false, true) {
			t.Errorf("philosopher %d has a fork of somebody else", philosopher)
		}
	}
	return func() {
		for _, f := range forks {
			f.Store(false)
		}
	}
}

// eatIn counts in the transaction that has the forks.
func (s *table) eatIn(ctx context.Context, t *testing.T, tx dblock.Tx, philosopher int) error {
	defer s.use(t, philosopher)()
	return execute(ctx, tx, fmt.Sprintf(`UPDATE meals SET eaten = eaten + 1 WHERE philosopher = %d`, philosopher))
}

func (s *table) mustHaveEaten(t *testing.T, each int) {
	t.Helper()
	for n := range philosophers {
		if eaten := s.number(t, fmt.Sprintf(`SELECT eaten FROM meals WHERE philosopher = %d`, n)); eaten != each {
			t.Errorf("philosopher %d has eaten %d times, want %d", n, eaten, each)
		}
	}
}

// mustHaveInversion fails unless the Checker has found that forks are taken in a circle,
// and where.
func (s *table) mustHaveInversion(t *testing.T, kind string) {
	t.Helper()
	found := s.checker.Inversions()
	if len(found) != 1 {
		t.Fatalf("%d inversions, want that of the forks: %v", len(found), found)
	}
	for _, step := range found[0].Steps {
		for _, taken := range []deadlock.Taken{step.Held, step.Wanted} {
			if taken.Kind != kind || taken.Class != "fork" || filepath.Base(taken.Place.File) != "deadlock_philosophers.go" {
				t.Errorf("%s of class %s at %s", taken, taken.Class, taken.Place)
			}
		}
		if step.Held.Place.Line >= step.Wanted.Place.Line {
			t.Errorf("%s inside of %s", step.Wanted.Place, step.Held.Place)
		}
	}
	if steps := len(found[0].Steps); steps != philosophers {
		t.Errorf("%d steps, want %d", steps, philosophers)
	}
	t.Logf("%s", found[0])
}

// once passes deadlocks on.
var once = &deadlock.RetryOptions{Attempts: 1}

func philosophersAtOnce(t *testing.T, h *Harness) {
	s := newTable(t, h)
	db := s.OpenMax(t, crowd)
	ways := map[string]func(t *testing.T) func(ctx context.Context, philosopher int) error{
		"advisory": func(t *testing.T) func(context.Context, int) error {
			var lockers [philosophers]*advisory.Locker
			for n := range lockers {
				lockers[n] = newLocker(t, db, &advisory.Options{Checker: s.checker})
			}
			return func(ctx context.Context, n int) error {
				return lockers[n].Do(ctx, func(context.Context) error {
					s.use(t, n)()
					return nil
				}, fork(n), fork(n+1))
			}
		},
		"rows": func(t *testing.T) func(context.Context, int) error {
			rows := rowlock.New(db, &rowlock.Options{Checker: s.checker, Retry: once})
			return func(ctx context.Context, n int) error {
				return rowlock.InTx(ctx, rows, func(_ context.Context, tx dblock.Tx) error {
					s.use(t, n)()
					return nil
				}, fork(n), fork(n+1))
			}
		},
	}
	if db.Features().Transaction {
		ways["transaction"] = func(t *testing.T) func(context.Context, int) error {
			l := newLocker(t, db, &advisory.Options{Checker: s.checker, Retry: once})
			return func(ctx context.Context, n int) error {
				return advisory.DoTx(ctx, l, func(_ context.Context, tx dblock.Tx) error {
					s.use(t, n)()
					return nil
				}, fork(n), fork(n+1))
			}
		}
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) { s.dine(t, mealsAtOnce/philosophers/len(ways)+1, way(t)) })
	}
	s.checker.Report(t)
}

// first makes the others wait until each has done something for the first time.
type first struct {
	count atomic.Int64
	done  [philosophers]sync.Once
	all   chan struct{}
}

func newFirst() *first { return &first{all: make(chan struct{})} }

func (f *first) wait(ctx context.Context, n int) {
	f.done[n].Do(func() {
		if f.count.Add(1) == philosophers {
			close(f.all)
		}
		select {
		case <-f.all:
		case <-ctx.Done():
		}
	})
}

// One fork after the other in one transaction: the server sees the circle.
func philosophersInTransactions(t *testing.T, h *Harness) {
	const each = 20
	for _, way := range []struct {
		name, kind string
		// lock makes a function that locks in a transaction.
		lock func(t *testing.T, s *table, db dblock.DB) func(ctx context.Context, tx dblock.Tx, key ...dblock.Key) error
	}{
		{"rows", "row", func(t *testing.T, s *table, db dblock.DB) func(context.Context, dblock.Tx, ...dblock.Key) error {
			return rowlock.New(db, &rowlock.Options{Checker: s.checker}).Lock
		}},
		{"advisory", "advisory", func(t *testing.T, s *table, db dblock.DB) func(context.Context, dblock.Tx, ...dblock.Key) error {
			l := newLocker(t, db, &advisory.Options{Checker: s.checker})
			if s.refusesDoTx(t, l) {
				return nil
			}
			return l.LockTx
		}},
	} {
		t.Run(way.name, func(t *testing.T) {
			s := newTable(t, h)
			db := s.OpenMax(t, crowd)
			lock := way.lock(t, s, db)
			if lock == nil {
				return
			}
			haveOne := newFirst()
			again := &deadlock.RetryOptions{Attempts: 1000, MaxBackoff: 50 * time.Millisecond, Observer: countRetries(t, &s.retries)}
			s.dine(t, each, func(ctx context.Context, n int) error {
				return deadlock.Retry(ctx, db, func(ctx context.Context) error {
					tx, err := db.Begin(ctx, nil)
					if err != nil {
						return err
					}
					defer rollback(t, tx)
					if err := lock(ctx, tx, fork(n)); err != nil {
						return err
					}
					haveOne.wait(ctx, n)
					if err := lock(ctx, tx, fork(n+1)); err != nil {
						if !errors.Is(err, dblock.ErrDeadlock) {
							t.Errorf("%v, want %v", err, dblock.ErrDeadlock)
						}
						return err
					}
					if err := s.eatIn(ctx, t, tx, n); err != nil {
						return err
					}
					return tx.Commit(ctx)
				}, again)
			})
			if s.retries.Load() == 0 {
				t.Error("no deadlock was provoked: this clause shows nothing")
			}
			s.mustHaveEaten(t, each)
			s.mustHaveInversion(t, way.kind)
		})
	}
}

// One fork after the other by a Locker, each of whose waits has a session of its own, so
// that no server sees the circle: the waits end with their limit.
func philosophersOnSessions(t *testing.T, h *Harness) {
	const each = 4
	for _, way := range []struct {
		name string
		own  bool
	}{{"one Locker", false}, {"a Locker each", true}} {
		t.Run(way.name, func(t *testing.T) {
			s := newTable(t, h)
			options := &advisory.Options{Checker: s.checker, WaitLimit: 300 * time.Millisecond}
			common := newLocker(t, s.DB, options)
			var lockers [philosophers]*advisory.Locker
			for n := range lockers {
				lockers[n] = common
				if way.own {
					lockers[n] = newLocker(t, s.DB, options)
				}
			}
			haveOne := newFirst()
			again := &deadlock.RetryOptions{Attempts: 1000, Timeouts: true, Backoff: 100 * time.Millisecond, Observer: countRetries(t, &s.retries)}
			s.dine(t, each, func(ctx context.Context, n int) error {
				return deadlock.Retry(ctx, s.DB, func(ctx context.Context) error {
					return lockers[n].Do(ctx, func(ctx context.Context) error {
						haveOne.wait(ctx, n)
						lock, err := lockers[n].Lock(ctx, fork(n+1))
						if err != nil {
							if !errors.Is(err, dblock.ErrTimeout) {
								t.Errorf("%v, want %v", err, dblock.ErrTimeout)
							}
							return err
						}
						s.exec(t, fmt.Sprintf(`UPDATE meals SET eaten = eaten + 1 WHERE philosopher = %d`, n))
						s.use(t, n)()
						return lock.Release(ctx)
					}, fork(n))
				}, again)
			})
			if s.retries.Load() == 0 {
				t.Error("no circle was provoked: this clause shows nothing")
			}
			s.mustHaveEaten(t, each)
			s.mustHaveInversion(t, "advisory")
		})
	}
}
