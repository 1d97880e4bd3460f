package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

// DBLOCK_TEST_CROSSINGS is how many times each of these four clauses lets a grant
// and the end of the wait cross; `make crossings` has them do it 5,000 times each.
const defaultCrossings = 80

func crossings(t testing.TB) int {
	given := os.Getenv("DBLOCK_TEST_CROSSINGS")
	if given == "" {
		return defaultCrossings
	}
	n, err := strconv.Atoi(given)
	if err != nil || n < 1 {
		t.Fatalf("DBLOCK_TEST_CROSSINGS is %q, not a number of rounds", given)
	}
	return n
}

const (
	// The rounds run in lanes, each with a key of its own.
	crossingLanes = 8
	// A wait lasts so long, so that it is one on a busy machine too. A limit of all
	// waits must leave time for connecting.
	crossingWait  = 15 * time.Millisecond
	crossingLimit = 2 * time.Second
	// The holder gives the key back so much sooner or later than the wait ends, and
	// as much sooner as lets grants and refusals be about as many.
	crossingSweep = 5 * time.Millisecond
	crossingStep  = 200 * time.Microsecond
	// freeWithin is how long after its error what a waiter was granted may still be
	// seen on the server, which learns of the end of a connection a little later
	// than its client. The machine may be busy.
	freeWithin = 5 * time.Second
)

// waitEnd is one way for a wait to end.
type waitEnd struct {
	class dialect.Class // of the error then
	// options of the waiters.
	options *advisory.Options
	after   time.Duration // the wait has begun, at least
	// begin bounds a wait that is about to begin, if by its context; end ends it, if
	// by an event.
	begin func(ctx context.Context, after time.Duration) (context.Context, context.CancelFunc)
	end   func(t testing.TB, d *Database, session int64)
}

var (
	byCancel = waitEnd{class: dblock.ErrCanceled, after: crossingWait, begin: func(ctx context.Context, after time.Duration) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(ctx)
		timer := time.AfterFunc(after, cancel)
		return ctx, func() { timer.Stop(); cancel() }
	}}
	byDeadline  = waitEnd{class: dblock.ErrTimeout, after: crossingWait, begin: context.WithTimeout}
	byWaitLimit = waitEnd{class: dblock.ErrTimeout, after: crossingLimit, options: &advisory.Options{WaitLimit: crossingLimit}}
	// With a session per lock it is known which one will wait.
	byAdministrator = waitEnd{class: dblock.ErrCanceled, after: crossingWait, options: &advisory.Options{SessionPerLock: true}, end: func(t testing.TB, d *Database, session int64) {
		if _, err := d.SQL.ExecContext(t.Context(), fmt.Sprintf(d.h.Interrupt, session)); err != nil {
			t.Logf("interrupt session %d: %v", session, err) // it may have ended
		}
	}}
)

// crossing: the holder gives the key back at the moment when the wait ends.
// Whatever the waiter is told, what it does not hold is free.
func crossing(by waitEnd) func(t *testing.T, h *Harness) {
	return func(t *testing.T, h *Harness) {
		if by.end != nil && h.Interrupt == "" {
			t.Skip("this server can only end whole sessions")
		}
		d := h.Database(t)
		rounds := crossings(t)
		const seed = 3
		var total crossed
		var keys []dblock.Key
		var mu sync.Mutex
		var lanes sync.WaitGroup
		for i := range crossingLanes {
			lanes.Go(func() {
				random := rand.New(rand.NewPCG(seed, uint64(i)))
				lane := newCrossingLane(t, d, by, fmt.Sprintf("lane %d", i))
				defer lane.close(t)
				share := (rounds + crossingLanes - 1 - i) / crossingLanes
				for n := 0; n < share && !t.Failed(); n++ {
					lane.round(t, time.Duration(random.Int64N(2*int64(crossingSweep)))-crossingSweep)
				}
				mu.Lock()
				defer mu.Unlock()
				total.add(lane.crossed)
				keys = append(keys, lane.key, lane.warm)
			})
		}
		lanes.Wait()
		t.Logf("seed %d: %d granted, %d refused, %d left; after an error the key was free at once %d times, else within %v",
			seed, total.granted, total.refused, total.left, total.atOnce, total.longest.Round(100*time.Microsecond))
		if rounds >= defaultCrossings && (total.granted == 0 || total.refused == 0) {
			t.Error("the grant and the end of the wait did not cross")
		}
		// Of these keys only: a server may show the locks of other clauses too.
		if left, err := d.holdings(keys...); err != nil || len(left) > 0 {
			t.Errorf("left in the end: %+v, %v", left, err)
		}
	}
}

// crossed counts outcomes.
type crossed struct {
	granted, refused, left int
	atOnce                 int           // free when the error came
	longest                time.Duration // from the error to the key being free
}

func (c *crossed) add(other crossed) {
	c.granted += other.granted
	c.refused += other.refused
	c.left += other.left
	c.atOnce += other.atOnce
	c.longest = max(c.longest, other.longest)
}

type crossingLane struct {
	d                *Database
	by               waitEnd
	key, warm        dblock.Key
	holders, waiters *advisory.Locker
	lead             time.Duration // of the release
	grantedLast      bool          // what the last round brought
	streak           int           // how many rounds before brought the same
	crossed
}

func newCrossingLane(t testing.TB, d *Database, by waitEnd, name string) *crossingLane {
	lane := &crossingLane{d: d, by: by, key: dblock.NewKey(name), warm: dblock.NewKey(name, "warm")}
	var err error
	if lane.holders, err = advisory.New(d.DB); err == nil {
		lane.waiters, err = advisory.New(d.DB, by.options)
	}
	if err != nil {
		t.Error(err)
	}
	return lane
}

func (lane *crossingLane) close(t testing.TB) {
	for _, l := range []*advisory.Locker{lane.holders, lane.waiters} {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// move lets the other outcome be likelier, ever more while there is always the same.
func (lane *crossingLane) move(granted bool) {
	const most = 5 // 200 ms, longer than a busy machine takes for a release
	if granted == lane.grantedLast {
		lane.streak = min(lane.streak+1, most)
	} else {
		lane.streak, lane.grantedLast = 0, granted
	}
	step := crossingStep << (2 * lane.streak)
	if granted {
		step = -step
	}
	lane.lead += step
}

// round runs in a goroutine of its own, so it reports errors and never ends the
// test.
func (lane *crossingLane) round(t testing.TB, late time.Duration) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	session, err := lane.prepare(ctx)
	if err != nil {
		t.Errorf("before the round: %v", err)
		return
	}
	lock, err := lane.holders.Lock(ctx, lane.key)
	if err != nil {
		t.Errorf("the holder: %v", err)
		return
	}

	released := make(chan error, 1)
	began := time.Now()
	after := max(lane.by.after, lane.lead+crossingWait)
	release := max(0, after-lane.lead+late)
	time.AfterFunc(release, func() { released <- lock.Release(ctx) })
	interrupted := make(chan struct{})
	if lane.by.end != nil {
		time.AfterFunc(after, func() {
			defer close(interrupted)
			lane.by.end(t, lane.d, session)
		})
	} else {
		close(interrupted)
	}
	wait, stop := ctx, func() {}
	if lane.by.begin != nil {
		wait, stop = lane.by.begin(ctx, after)
	}
	granted, err := lane.waiters.Lock(wait, lane.key)
	told := time.Now()
	stop()
	if releaseErr := <-released; releaseErr != nil {
		t.Errorf("the holder's release: %v", releaseErr)
		return
	}
	told = latest(told, began.Add(release))
	switch {
	case err == nil:
		lane.granted++
		lane.move(true)
		err = granted.Release(ctx)
		// An administrator's cancel that comes too late for the wait may end the
		// release, which then says that it does not know.
		if err != nil && !(lane.by.end != nil && errors.Is(err, dblock.ErrLost)) {
			t.Errorf("the waiter's release: %v", err)
		}
		told = time.Now()
	case errors.Is(err, lane.by.class):
		lane.refused++
		lane.move(false)
	default:
		t.Errorf("the waiter: %v", err)
	}
	if err != nil {
		lane.awaitFree(t, ctx, told)
	}
	<-interrupted
}

// prepare makes sure that the waiter has a session that waits for use, so that its
// wait begins at once, and says which: one that a wait was granted a key on.
func (lane *crossingLane) prepare(ctx context.Context) (session int64, err error) {
	lock, err := lane.waitFor(ctx, lane.warm)
	for errors.Is(err, dblock.ErrTimeout) && ctx.Err() == nil { // connecting took longer than the limit
		lock, err = lane.waitFor(ctx, lane.warm)
	}
	if err != nil {
		return 0, err
	}
	if lane.by.end != nil {
		held, err := lane.d.holdings(lane.warm)
		if err != nil || len(held) != 1 {
			return 0, fmt.Errorf("who holds %v: %v %w", lane.warm, held, err)
		}
		session = held[0].Session
	}
	return session, lock.Release(ctx)
}

// waitFor has the waiter wait in the database for the key until it is granted.
func (lane *crossingLane) waitFor(ctx context.Context, key dblock.Key) (lock *advisory.Lock, err error) {
	before, err := lane.holders.Lock(ctx, key)
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		lock, err = lane.waiters.Lock(ctx, key)
	}()
	seen := lane.awaitWaiter(key, ended)
	released := before.Release(ctx)
	<-ended
	return lock, errors.Join(err, seen, released)
}

// awaitWaiter returns when the server shows a waiter, or the wait has ended.
func (lane *crossingLane) awaitWaiter(key dblock.Key, ended <-chan struct{}) error {
	for {
		found, err := lane.d.holdings(key)
		if err != nil || slices.ContainsFunc(found, func(h dialect.Holding) bool { return h.Waiting }) {
			return err
		}
		select {
		case <-ended:
			return nil
		case <-time.After(time.Millisecond):
		}
	}
}

// awaitFree looks at the server's own lock view.
func (lane *crossingLane) awaitFree(t testing.TB, ctx context.Context, since time.Time) {
	for looks := 0; ; looks++ {
		found, err := lane.d.holdings(lane.key)
		after := time.Since(since)
		switch {
		case err != nil:
			t.Errorf("the server's lock view: %v", err)
			return
		case len(found) == 0:
			if looks == 0 {
				lane.atOnce++
			} else {
				lane.longest = max(lane.longest, after)
			}
			return
		case after > freeWithin || ctx.Err() != nil:
			lane.left++
			t.Errorf("%v after the error: %s", after, dblock.DescribeBlocker(found[0]))
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
