package advisory

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// A session that asks twice for a key gets it twice, and the goroutines of a process
// share sessions. So the locker keeps its own table of who holds which key, and of who
// waits for it, first come, first served. A key is waited for in the database by one
// of them at a time, on behalf of all.
type queues struct {
	byName bool // see dialect.Features
	mu     sync.Mutex
	keys   map[lockID]*queue
}

// lockID is what the server locks: a name, or an id. Several keys may be the same
// lock: one of another program's, by its number.
type lockID struct {
	id   int64
	name string
}

func (qs *queues) lockOf(k dialect.Key) lockID {
	if qs.byName {
		return lockID{name: k.Name}
	}
	return lockID{id: k.ID}
}

// queue is what goes on for one key in this process.
type queue struct {
	holders int // locks, and calls that may become one
	mode    dialect.Mode
	waiters []*waiter
	wait    *wait // in the database, nil if nobody waits there
	cohort  cohort
	arrived int64 // waiters so far
}

// waiter is a call that waits for its turn.
type waiter struct {
	call   *call
	key    dialect.Key
	number int64
	result chan result // one
}

// result ends a wait: a lock, an error, or neither, where the call has got the key
// within the process and must still ask the database.
type result struct {
	lock *Lock
	err  error
}

// claim takes the keys within the process up to one that somebody else there has or waits
// for, and returns how many.
func (l *Locker) claim(keys ...dialect.Key) int {
	l.queues.mu.Lock()
	defer l.queues.mu.Unlock()
	for i, k := range keys {
		q := l.queues.of(k)
		if len(q.waiters) > 0 || q.wait != nil || !q.admits(k.Mode) {
			return i
		}
		q.holders++
		q.mode = k.Mode
	}
	return len(keys)
}

// of makes the queue if there is none.
func (qs *queues) of(k dialect.Key) *queue {
	q := qs.keys[qs.lockOf(k)]
	if q == nil {
		q = &queue{}
		qs.keys[qs.lockOf(k)] = q
	}
	return q
}

func (q *queue) admits(m dialect.Mode) bool {
	return q.holders == 0 || m == dblock.Shared && q.mode == dblock.Shared
}

// disown gives the keys back within the process, after the database.
func (l *Locker) disown(keys ...dialect.Key) {
	l.queues.mu.Lock()
	defer l.queues.mu.Unlock()
	for _, k := range keys {
		q := l.queues.of(k)
		q.holders--
		l.advance(q, k)
	}
}

// advance lets the first waiter go on if it can. The caller has queues.mu.
func (l *Locker) advance(q *queue, k dialect.Key) {
	for len(q.waiters) > 0 && q.wait == nil {
		first := q.waiters[0]
		if first.call.several() {
			if !q.admits(first.key.Mode) {
				return
			}
			q.waiters = q.waiters[1:]
			q.holders++
			q.mode = first.key.Mode
			first.result <- result{}
			continue
		}
		if q.holders == 0 || q.mode == dblock.Shared {
			l.startWait(q, first, nil)
		}
		return
	}
	if q.holders == 0 && len(q.waiters) == 0 && q.wait == nil {
		delete(l.queues.keys, l.queues.lockOf(k))
	}
}

// wait queues up for the key and waits. Who has tried in the database already, and has the
// key within the process, stays in front.
func (l *Locker) wait(c *call, k dialect.Key, tried bool) (*Lock, error) {
	w := &waiter{call: c, key: k, result: make(chan result, 1)}
	l.queues.mu.Lock()
	q := l.queues.of(k)
	q.arrived++
	w.number = q.arrived
	if tried {
		q.holders--
		q.waiters = slices.Insert(q.waiters, 0, w)
	} else {
		q.waiters = append(q.waiters, w)
	}
	l.advance(q, k)
	l.queues.mu.Unlock()

	ctx := c.ctx
	if l.options.WaitLimit > 0 {
		ctx = c.waitContext()
	}
	select {
	case r := <-w.result:
		if c.ended() == nil || r.err != nil {
			return r.lock, r.err
		}
		l.decline(r, k)
	case <-ctx.Done():
		l.withdraw(q, w)
	case <-l.closing.Done():
		l.withdraw(q, w)
	}
	return nil, c.ended()
}

// withdraw takes the waiter out of the queue. When it returns nothing waits on its
// behalf, nor is anything held.
func (l *Locker) withdraw(q *queue, w *waiter) {
	l.queues.mu.Lock()
	i := slices.Index(q.waiters, w)
	if i < 0 {
		l.queues.mu.Unlock()
		l.decline(<-w.result, w.key)
		return
	}
	q.waiters = slices.Delete(q.waiters, i, i+1)
	last := q.wait
	if last != nil && last.wantedBy(q) {
		last = nil
	}
	l.advance(q, w.key)
	l.queues.mu.Unlock()
	if last != nil {
		last.cancel(errNobodyWaits)
		<-last.done
	}
}

// decline gives back what a call was given that does not want it any more.
func (l *Locker) decline(r result, k dialect.Key) {
	switch {
	case r.lock != nil:
		r.lock.finish(errReleased)
		_ = r.lock.giveBack() // after an error the session is closed
	case r.err == nil:
		l.disown(k)
	}
}

// cohort are those who were in the queue when the database granted the key: they get
// it one after the other without asking the database again. That saves round trips, and
// is fair to other processes, since those who come later do not prolong it.
type cohort struct {
	last  int64 // number of the last waiter in it
	left  int   // how many may still get the key
	until time.Time
	token int64 // the latest fencing number that was given out; those that follow are the cohort's too
}

const (
	cohortSize = dialect.FenceStride // each has a fencing number of one draw
	cohortTime = 100 * time.Millisecond
)

// gather makes the cohort of a grant, with the fencing numbers that it drew. The caller
// has queues.mu.
func (q *queue) gather(tokens []int64) {
	q.cohort = cohort{}
	if len(q.waiters) == 0 {
		return
	}
	q.cohort = cohort{last: q.arrived, left: cohortSize - 1, until: time.Now().Add(cohortTime)}
	if len(tokens) > 0 {
		q.cohort.token = tokens[0]
	}
}

// next is the waiter who gets the key without the database, if there is one. There may
// not even be a queue, if the session of the lock was lost meanwhile. The caller has
// queues.mu.
func (q *queue) next() *waiter {
	if q == nil || len(q.waiters) == 0 || q.cohort.left == 0 {
		return nil
	}
	w := q.waiters[0]
	if w.number > q.cohort.last || w.call.several() || w.key.Mode != dblock.Exclusive || time.Now().After(q.cohort.until) {
		return nil
	}
	return w
}

// passOn gives the lock's key, with its session, to the next of the cohort, or behind it
// to the queue of the server, where the session then waits for those who came later. It
// does neither unless the session lives.
func (l *Locker) passOn(lock *Lock) (passed bool, err error) {
	k := lock.locked[0]
	if len(lock.locked) > 1 || k.Mode != dblock.Exclusive {
		return false, nil
	}
	l.queues.mu.Lock()
	q := l.queues.keys[l.queues.lockOf(k)]
	wanted := q.next() != nil || q.renews(lock.session)
	l.queues.mu.Unlock()
	if !wanted {
		return false, nil
	}
	if err := lock.session.alive(); err != nil {
		return false, err
	}
	l.queues.mu.Lock()
	defer l.queues.mu.Unlock()
	next := q.next()
	switch {
	case next == nil && !q.renews(lock.session):
		return false, nil
	case next == nil:
		q.holders--
		l.startWait(q, q.waiters[0], lock.session)
		return true, nil
	}
	var tokens []int64
	if lock.tokens != nil {
		tokens = []int64{q.cohort.token + 1}
	}
	given := newLock(next.call, lock.session, tokens)
	if !lock.session.add(given) {
		return false, context.Cause(lock.session.ended)
	}
	q.waiters = q.waiters[1:]
	q.cohort.left--
	q.cohort.token++
	next.result <- result{lock: given}
	return true, nil
}

// renews reports whether the session that holds the key can wait for it again on behalf of
// those in the queue: it holds nothing else then, and draws no fencing numbers. The caller
// has queues.mu.
func (q *queue) renews(s *session) bool {
	return q != nil && len(q.waiters) > 0 && q.wait == nil && q.waiters[0].key.Mode == dblock.Exclusive && !q.waiters[0].call.several() &&
		!s.multiplexed && s.locker.options.table() == nil
}
