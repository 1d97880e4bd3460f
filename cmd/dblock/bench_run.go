package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

const (
	// fewestRounds are made in any case, usualRounds or more if the time allows.
	fewestRounds, usualRounds = 3, 9
	// longestSlice is how long a round spends on one operation at most. More time
	// makes for more rounds, so that it can be stopped early.
	longestSlice = 200 * time.Millisecond
	// turns are taken within a round between round trips and each operation.
	turns = 8
	// waitLimit bounds every wait. Nobody else uses the keys, so that a wait of
	// this length is a failure.
	waitLimit = 30 * time.Second
	// cleanUpWithin bounds what must be done although the context has ended.
	cleanUpWithin = 10 * time.Second
	// crowd is how many goroutines of each locker want one key.
	crowd = 8
)

// benchmark measures operations in round trips.
type benchmark struct {
	db       dblock.DB
	table    dialect.Table
	prefix   string // of its keys; random
	measures []*measure
	trips    []float64 // seconds of a round trip, beside each measure in each round
	rounds   int       // that were completed
}

// measure is one operation, and what was found of it.
type measure struct {
	name, text string
	pace       bool // of several goroutines, whose operations overlap
	// prepare is called once, and cleanUp in the end if that was successful. Nil:
	// there is nothing to do.
	prepare   func(ctx context.Context) (cleanUp func() error, err error)
	operation operation

	seconds, ratios []float64 // one of each round
	err             error     // why there is nothing, or no more
}

// operation is repeated for some time, but done once at least. It returns how many
// seconds it took: each, or on average.
type operation func(ctx context.Context, r *round, burst time.Duration) (seconds []float64, err error)

// round is what operations work with. Its connections are new ones: two that
// should be equally fast are not, depending on where the operating system puts
// the processes at their ends. So there are rounds, and their spread.
type round struct {
	trip  func(ctx context.Context) error
	locks [2]*advisory.Locker
}

func newBenchmark(db dblock.DB, table dialect.Table, goroutines, keys []int) *benchmark {
	b := &benchmark{db: db, table: table, prefix: rand.Text()}
	b.add(measure{name: "acquire_release", text: "acquire + release a free key", operation: b.acquireRelease(1)})
	for _, n := range distinct(keys) {
		b.add(measure{name: fmt.Sprintf("keys_%d", n), text: fmt.Sprintf("acquire + release %d keys in one call", n),
			operation: b.acquireRelease(n)})
	}
	for _, n := range distinct(goroutines) {
		b.add(measure{name: fmt.Sprintf("goroutines_%d", n), text: fmt.Sprintf("acquire + release by %d goroutines, a key each", n),
			pace: true, operation: b.sideBySide(n)})
	}
	b.add(measure{name: "hand_off", text: "hand-off between two lockers", operation: b.handOff(1)})
	b.add(measure{name: "hand_off_crowd", text: fmt.Sprintf("hand-off among %d goroutines of each", crowd),
		pace: true, operation: b.handOff(crowd)})
	b.add(measure{name: "transaction", text: "begin + commit, without a lock", operation: b.transaction()})
	b.add(measure{name: "transaction_lock", text: "begin + transaction lock + commit", operation: b.transactionLock()})
	b.add(measure{name: "row_lock", text: "begin + row lock + commit", prepare: b.prepareRow, operation: b.rowLock()})
	return b
}

func (b *benchmark) add(m measure) { b.measures = append(b.measures, &m) }

func distinct(numbers []int) []int {
	return slices.Compact(slices.Sorted(slices.Values(numbers)))
}

// key is one that nobody else uses.
func (b *benchmark) key(name string) dblock.Key { return dblock.NewKey("dblock bench", b.prefix, name) }

func (b *benchmark) keys(name string, n int) []dblock.Key {
	keys := make([]dblock.Key, n)
	for i := range keys {
		keys[i] = b.key(fmt.Sprintf("%s %d", name, i))
	}
	return keys
}

// run measures for about as long as it is told. What it found is there even if it
// fails.
func (b *benchmark) run(ctx context.Context, duration time.Duration) (err error) {
	for _, m := range b.measures {
		if m.prepare == nil {
			continue
		}
		var cleanUp func() error
		if cleanUp, m.err = m.prepare(ctx); m.err == nil {
			defer func() { err = errors.Join(err, cleanUp()) }()
		}
	}
	slice := min(longestSlice, duration/time.Duration(usualRounds*len(b.measures)))
	began := time.Now()
	for b.rounds < fewestRounds || time.Since(began) < duration {
		if err := b.round(ctx, slice); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return err
		}
		b.rounds++
	}
	return nil
}

// round measures everything once. The round trips are those of a session like the
// lockers' own.
func (b *benchmark) round(ctx context.Context, slice time.Duration) error {
	r := &round{}
	for i := range r.locks {
		locks, err := advisory.New(b.db, &advisory.Options{Application: "dblock bench", WaitLimit: waitLimit})
		if err != nil {
			return err
		}
		defer locks.Close()
		r.locks[i] = locks
	}
	return advisory.OnSession(ctx, r.locks[0], func(ctx context.Context, conn dblock.Tx) error {
		r.trip = func(ctx context.Context) error {
			_, err := conn.ExecContext(ctx, "SELECT 1")
			return b.db.Classify(err)
		}
		return b.measureEach(ctx, r, slice)
	}, b.key("round trip"))
}

func (b *benchmark) measureEach(ctx context.Context, r *round, slice time.Duration) error {
	for _, m := range b.measures {
		if m.err != nil {
			continue
		}
		trip, seconds, err := takeTurns(ctx, r, slice, m.operation)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, errTrip):
			return err
		case err != nil:
			m.err = err
			continue
		}
		b.trips = append(b.trips, trip)
		m.seconds = append(m.seconds, seconds)
		m.ratios = append(m.ratios, seconds/trip)
	}
	return nil
}

// takeTurns measures a round trip and an operation in turns, for what else the
// machine and the server do changes all the time.
func takeTurns(ctx context.Context, r *round, slice time.Duration, do operation) (trip, seconds float64, err error) {
	var trips, all []float64
	turn := func(burst time.Duration) error {
		some, err := repeat(r.roundTrip)(ctx, r, burst)
		if err != nil {
			return fmt.Errorf("%w: %w", errTrip, err)
		}
		trips = append(trips, some...)
		some, err = do(ctx, r, burst)
		all = append(all, some...)
		return err
	}
	// The first turn opens connections and prepares statements.
	if err := turn(0); err != nil {
		return 0, 0, err
	}
	trips, all = nil, nil
	for began := time.Now(); len(trips) == 0 || time.Since(began) < slice; {
		if err := turn(slice / (2 * turns)); err != nil {
			return 0, 0, err
		}
	}
	return spreadOf(trips).Median, spreadOf(all).Median, nil
}

var errTrip = errors.New("SELECT 1")

func (r *round) roundTrip(ctx context.Context, _ *round) error { return r.trip(ctx) }

// repeat does the same over and over.
func repeat(once func(ctx context.Context, r *round) error) operation {
	return func(ctx context.Context, r *round, burst time.Duration) (seconds []float64, err error) {
		began := time.Now()
		for last := began; len(seconds) == 0 || last.Sub(began) < burst; {
			if err := once(ctx, r); err != nil {
				return nil, err
			}
			now := time.Now()
			seconds = append(seconds, now.Sub(last).Seconds())
			last = now
		}
		return seconds, nil
	}
}

// together runs workers at the same time. The first error ends them all.
func together(ctx context.Context, n int, worker func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var workers sync.WaitGroup
	for i := range n {
		workers.Go(func() {
			if err := worker(ctx, i); err != nil {
				cancel(err)
			}
		})
	}
	workers.Wait()
	return context.Cause(ctx)
}

func (b *benchmark) acquireRelease(n int) operation {
	keys := b.keys(fmt.Sprintf("one of %d", n), n)
	return repeat(func(ctx context.Context, r *round) error { return acquireRelease(ctx, r.locks[0], keys...) })
}

func acquireRelease(ctx context.Context, locks *advisory.Locker, keys ...dblock.Key) error {
	lock, err := locks.Lock(ctx, keys...)
	if err != nil {
		return err
	}
	return lock.Release(ctx)
}

// sideBySide is n goroutines that are not in each other's way.
func (b *benchmark) sideBySide(n int) operation {
	keys := b.keys("side by side", n)
	return func(ctx context.Context, r *round, burst time.Duration) ([]float64, error) {
		var count atomic.Int64
		began := time.Now()
		err := together(ctx, n, func(ctx context.Context, i int) error {
			own := repeat(func(ctx context.Context, r *round) error { return acquireRelease(ctx, r.locks[0], keys[i]) })
			some, err := own(ctx, r, burst)
			count.Add(int64(len(some)))
			return err
		})
		return pace(began, &count), err
	}
}

// handOff is n goroutines of each locker around one key. A grant counts if
// somebody else had the key before.
func (b *benchmark) handOff(n int) operation {
	key := b.key(fmt.Sprintf("hand-off %d", n))
	return func(ctx context.Context, r *round, burst time.Duration) ([]float64, error) {
		var holder, count atomic.Int64
		began := time.Now()
		err := together(ctx, len(r.locks)*n, func(ctx context.Context, i int) error {
			self := int64(i + 1)
			for count.Load() == 0 || time.Since(began) < burst {
				lock, err := r.locks[i%len(r.locks)].Lock(ctx, key)
				if err != nil {
					return err
				}
				if before := holder.Swap(self); before != 0 && before != self {
					count.Add(1)
				}
				if err := lock.Release(ctx); err != nil {
					return err
				}
			}
			return nil
		})
		return pace(began, &count), err
	}
}

// pace is the seconds between two of what was counted.
func pace(began time.Time, count *atomic.Int64) []float64 {
	return []float64{time.Since(began).Seconds() / float64(count.Load())}
}

func (b *benchmark) transaction() operation {
	return repeat(func(ctx context.Context, _ *round) error {
		return b.inTx(ctx, func(dblock.Tx) error { return nil })
	})
}

func (b *benchmark) transactionLock() operation {
	key := b.key("transaction")
	return repeat(func(ctx context.Context, r *round) error {
		return advisory.DoTx(ctx, r.locks[0], func(context.Context, dblock.Tx) error { return nil }, key)
	})
}

func (b *benchmark) inTx(ctx context.Context, work func(tx dblock.Tx) error) error {
	tx, err := b.db.Begin(ctx, nil)
	if err != nil {
		return b.db.Classify(err)
	}
	if err := work(tx); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpWithin)
		defer cancel()
		return errors.Join(err, tx.Rollback(ctx))
	}
	return b.db.Classify(tx.Commit(ctx))
}

// rowKey is the key whose row is locked: it leaves no more than one behind.
func (b *benchmark) rowKey() dblock.Key { return b.key("row") }

func (b *benchmark) rowLock() operation {
	rows := rowlock.New(b.db, &rowlock.Options{Schema: b.table.Schema, Table: b.table.Name})
	return repeat(func(ctx context.Context, _ *round) error {
		return rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error { return nil }, b.rowKey())
	})
}

// prepareRow makes sure of the lock table, and of being able to delete the row,
// which needs a privilege that row locks do not.
func (b *benchmark) prepareRow(ctx context.Context) (cleanUp func() error, err error) {
	if _, err := b.db.CheckTable(ctx, b.table); err != nil {
		return nil, b.db.Classify(err)
	}
	if err := b.deleteRow(ctx); err != nil {
		return nil, fmt.Errorf("the row could not be deleted afterwards: %w", err)
	}
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpWithin)
		defer cancel()
		if err := b.deleteRow(ctx); err != nil {
			return fmt.Errorf("the row with id %d stays behind in the table %s: %w", b.rowKey().ID(), b.table.Name, err)
		}
		return nil
	}, nil
}

func (b *benchmark) deleteRow(ctx context.Context) error {
	return b.inTx(ctx, func(tx dblock.Tx) error {
		_, err := tx.ExecContext(ctx, fmt.Sprintf("DELETE FROM %s WHERE id = %d", b.quotedTable(), b.rowKey().ID()))
		return b.db.Classify(err)
	})
}

func (b *benchmark) quotedTable() string {
	quote := `"`
	if name := b.db.Name(); name == "mysql" || name == "mariadb" {
		quote = "`"
	}
	quoted := func(name string) string { return quote + strings.ReplaceAll(name, quote, quote+quote) + quote }
	if b.table.Schema == "" {
		return quoted(b.table.Name)
	}
	return quoted(b.table.Schema) + "." + quoted(b.table.Name)
}

// failed is the first failure of a measure that has nothing to do with what the
// database has.
func (b *benchmark) failed() error {
	for _, m := range b.measures {
		if m.err != nil && statusOf(m.err) == statusFailed {
			return fmt.Errorf("%s: %w", m.text, m.err)
		}
	}
	return nil
}

// results are those so far.
func (b *benchmark) results(complete bool) benchResult {
	ofTrips := make([]float64, len(b.trips))
	typical := spreadOf(b.trips).Median
	for i, seconds := range b.trips {
		ofTrips[i] = seconds / typical
	}
	trips := &measure{name: "round_trip", text: "SELECT 1", seconds: b.trips, ratios: ofTrips}
	r := benchResult{Database: b.db.Name(), Rounds: b.rounds, Complete: complete, Measurements: []measurement{trips.result()}}
	for _, m := range b.measures {
		r.Measurements = append(r.Measurements, m.result())
	}
	return r
}

func (m *measure) result() measurement {
	r := measurement{Name: m.name, Text: m.text, pace: m.pace}
	switch {
	case m.err != nil:
		r.Status, r.Reason = statusOf(m.err), reasonOf(m.err)
	case len(m.ratios) == 0:
		r.Status, r.Reason = statusSkipped, "stopped before that"
	default:
		r.Status = statusMeasured
		ratios, seconds := spreadOf(m.ratios), spreadOf(m.seconds)
		r.RoundTrips = &ratios
		r.Microseconds = &spread{microseconds(seconds.Median), microseconds(seconds.Min), microseconds(seconds.Max)}
	}
	return r
}

// statusOf tells what a database or its user does not have from failures.
func statusOf(err error) string {
	switch dialect.ClassOf(err) {
	case dblock.ErrUnsupported:
		return statusUnsupported
	case dblock.ErrSetup, dblock.ErrDenied:
		return statusSkipped
	}
	return statusFailed
}

// reasonOf leaves out of an error what the line says already.
func reasonOf(err error) string {
	var cause *dialect.Error
	if statusOf(err) == statusUnsupported && errors.As(err, &cause) && cause.Hint != "" {
		return oneLine(cause.Hint)
	}
	return errorText(err)
}

// microseconds has three decimals: clocks have no more.
func microseconds(seconds float64) float64 { return math.Round(seconds*1e9) / 1e3 }

// spread is what several rounds found.
type spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spreadOf takes one value at least.
func spreadOf(values []float64) spread {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return spread{Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, Min: sorted[0], Max: sorted[n-1]}
}
