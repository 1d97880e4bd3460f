//go:build linux

package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock/tests/servers"
)

// op is what is measured: the goroutine of that number runs it again and again.
type op func(ctx context.Context, goroutine int) error

// patience is for calls that never come back.
const patience = time.Minute

// comparison measures dblock against a peer. Both are opened anew for each
// repetition, and closed by the test's cleanup.
type comparison struct {
	name       string // for -run
	what       string
	goroutines int           // default: 1
	chunk      time.Duration // default: 5 ms
	target     targets
	only       servers.Kind       // "": every database
	need       func(t testing.TB) // skips the comparison where the peer is missing
	ours       func(t testing.TB, d *database) op
	theirs     func(t testing.TB, d *database) op
}

// plan is how much is measured.
type plan struct {
	repetitions int           // of loads of many goroutines
	alone       int           // of one goroutine, where the differences are small
	chunks      int           // of each side in a repetition
	chunk       time.Duration // 0: that of the comparison
	hot         time.Duration // for which a hot key is fought for
	held        int           // keys, in the scenario many
}

// moment shows that everything runs, no more.
var moment = plan{repetitions: 1, alone: 1, chunks: 2, chunk: 10 * time.Millisecond, hot: 200 * time.Millisecond, held: 100}

func measured(repetitions int) plan {
	return plan{repetitions: repetitions, alone: 3 * repetitions, chunks: 100, hot: 2 * time.Second, held: 10_000}
}

func (c comparison) run(t *testing.T, d *database, p plan) {
	if c.only != "" && c.only != d.kind {
		return
	}
	t.Run(c.name, func(t *testing.T) {
		r := row{what: c.what, target: c.target.of(d.kind)}
		defer func() { d.report.add(d.kind, r) }() // of what was skipped, too
		if c.need != nil {
			c.need(t)
		}
		repetitions := p.alone
		if c.goroutines > 1 {
			repetitions = p.repetitions
		}
		var ours, theirs []time.Duration
		for i := range repetitions {
			t.Run(fmt.Sprint(i+1), func(t *testing.T) {
				our, their := interleave(t, c, p, c.ours(t, d), c.theirs(t, d))
				ours, theirs = append(ours, our), append(theirs, their)
				r.values = append(r.values, r.target.ratio(our, their))
			})
		}
		if len(r.values) == 0 {
			return
		}
		r.detail = fmt.Sprintf("%s / %s", rounded(median(ours)), rounded(median(theirs)))
		if c.goroutines > 1 {
			r.detail = fmt.Sprintf("%s / %s", perSecond(median(ours)), perSecond(median(theirs)))
		}
	})
}

// interleave measures the two in turns, and returns the median time of an op of
// each. The time of concurrent ops is that between the ends of two of them.
func interleave(t testing.TB, c comparison, p plan, ours, theirs op) (our, their time.Duration) {
	length := c.chunk
	if length == 0 {
		length = 5 * time.Millisecond
	}
	if p.chunk != 0 {
		length = p.chunk
	}
	sides := []op{ours, theirs}
	times := make([][]time.Duration, len(sides))
	for i := range p.chunks + 1 {
		for n := range sides {
			side := (n + i) % len(sides) // none always comes first
			took := runChunk(t, max(1, c.goroutines), length, sides[side])
			if i > 0 { // the first chunk connects, prepares, and fills caches
				times[side] = append(times[side], took)
			}
		}
	}
	return median(times[0]), median(times[1])
}

// runChunk lets goroutines run the op for some time, and at least once each.
func runChunk(t testing.TB, goroutines int, length time.Duration, run op) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), length+patience)
	defer cancel()
	runtime.GC() // nobody pays for the other's garbage
	var ops atomic.Int64
	errs := make([]error, goroutines)
	var all sync.WaitGroup
	began := time.Now()
	for g := range goroutines {
		all.Go(func() {
			var done int64
			for done == 0 || time.Since(began) < length {
				if errs[g] = run(ctx, g); errs[g] != nil {
					return
				}
				done++
			}
			ops.Add(done)
		})
	}
	all.Wait()
	took := time.Since(began)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return took / time.Duration(ops.Load())
}
