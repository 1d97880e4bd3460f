package advisory

import (
	"context"
	"errors"
	"time"

	"github.com/sethvargo/go-retry"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// wait is the one wait in the database for a key, on behalf of all who queue for it
// in this process.
type wait struct {
	key    dialect.Key
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when nothing of it is left on the server but a grant that somebody took
}

var errNobodyWaits = errors.New("nobody waits any more")

// startWait begins to wait in the database, on a session of its own or on the one that
// holds the key. It belongs to those in the queue, whose calls are under way. The caller
// has queues.mu.
func (l *Locker) startWait(q *queue, first *waiter, holder *session) {
	k := first.key
	ctx, cancel := context.WithCancelCause(l.closing)
	w := &wait{key: k, cancel: cancel, done: make(chan struct{})}
	q.wait = w
	l.calls.Go(func() {
		defer close(w.done)
		defer cancel(errNobodyWaits)
		r := dialect.Request{Keys: []dialect.Key{k}, Fence: l.options.table()}
		s, tokens, err := l.await(ctx, first.call.keys, r, holder)
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		l.conclude(q, w, s, tokens, err)
	})
}

// wantedBy reports whether the first in the queue can take what is waited for. The caller
// has queues.mu.
func (w *wait) wantedBy(q *queue) bool {
	return len(q.waiters) > 0 && !q.waiters[0].call.several() && q.waiters[0].key.Mode == w.key.Mode
}

// conclude gives the outcome of a wait to the first in the queue.
func (l *Locker) conclude(q *queue, w *wait, s *session, tokens []int64, err error) {
	l.queues.mu.Lock()
	q.wait = nil
	wanted := w.wantedBy(q)
	if err == nil && wanted {
		first := q.waiters[0]
		lock := newLock(first.call, s, tokens)
		if s.add(lock) {
			q.waiters = q.waiters[1:]
			q.holders++
			q.mode = w.key.Mode
			q.gather(tokens)
			first.result <- result{lock: lock}
		} else {
			err = context.Cause(s.ended)
		}
	}
	if err != nil && err != errNobodyWaits { // for whoever came since, another wait begins
		q.fail(err)
	}
	unwanted := err == nil && !wanted
	if unwanted { // nobody in the process may ask for the key on the session that has it
		q.holders++
		q.mode = w.key.Mode
	}
	l.advance(q, w.key)
	l.queues.mu.Unlock()
	if unwanted {
		lock := &Lock{session: s, locked: []dialect.Key{w.key}}
		_ = lock.returnKeys() // after an error the session is closed
		l.disown(w.key)
	}
}

// fail tells those whom an error concerns: the first in the queue, or all of them if
// no connection is to be had. The caller has queues.mu.
func (q *queue) fail(err error) {
	n := min(len(q.waiters), 1)
	switch dialect.ClassOf(err) {
	case dblock.ErrClosed, dblock.ErrUnavailable, dblock.ErrCapacity, dblock.ErrUnsafe, dblock.ErrSetup, dblock.ErrDenied, dblock.ErrInvalidOption:
		n = len(q.waiters)
	}
	for _, w := range q.waiters[:n] {
		w.result <- result{err: err}
	}
	q.waiters = q.waiters[n:]
}

// await waits for the keys on a session of its own, out of a bounded number. Beyond
// the bound, or while the server or the pool has no connection for it, it tries again and
// again, at random moments. A holder is one of those sessions already.
func (l *Locker) await(ctx context.Context, keys []dblock.Key, r dialect.Request, holder *session) (*session, []int64, error) {
	if holder != nil {
		err := holder.renew(ctx, r.Keys[0])
		if dialect.ClassOf(err) != dblock.ErrLost || ctx.Err() != nil {
			return holder, nil, err
		}
		l.observeRetry(ctx, keys, err) // nobody holds anything on it
	}
	moment := time.NewTimer(shortestPause)
	defer moment.Stop()
	var pause retry.Backoff // made when it is needed: its source of chance costs as much as a statement
	slots := l.slots
	for {
		select {
		case slots <- struct{}{}:
			s, tokens, err := l.acquireOwn(ctx, keys, r, l.session)
			if err == nil {
				return s, tokens, l.takeSlot(s)
			}
			<-l.slots
			if dialect.ClassOf(err) != dblock.ErrCapacity { // there is no connection to wait on
				return nil, nil, err
			}
			slots = nil // until the next moment
		case <-moment.C:
			slots = l.slots
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
		s, tokens, err := l.tryAgain(&call{locker: l, ctx: ctx, wait: ctx, keys: keys, locked: r.Keys, forAll: true}, r)
		if dialect.ClassOf(err) != dblock.ErrNotAcquired {
			return s, tokens, err
		}
		if pause == nil {
			pause = retry.WithJitterPercent(50, retry.WithCappedDuration(longestPause, retry.NewExponential(shortestPause)))
		}
		d, _ := pause.Next()
		moment.Reset(d)
	}
}

// tryAgain takes turns where a try needs a session of its own, so that all of them need
// one together.
func (l *Locker) tryAgain(c *call, r dialect.Request) (*session, []int64, error) {
	if r.Fence == nil {
		return l.try(c, r)
	}
	select {
	case l.trying <- struct{}{}:
		defer func() { <-l.trying }()
		return l.try(c, r)
	case <-c.wait.Done():
		return nil, nil, context.Cause(c.wait)
	}
}

// takeSlot notes that the session has one of the slots.
func (l *Locker) takeSlot(s *session) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.ended.Err() != nil {
		<-l.slots
		return context.Cause(s.ended)
	}
	s.slot = true
	return nil
}

const (
	shortestPause = 5 * time.Millisecond
	longestPause  = 250 * time.Millisecond
)
