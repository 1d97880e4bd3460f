package advisory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

const (
	// maxIdle sessions are kept open for the next call, for idleTime at most: a
	// new connection costs as much as many calls.
	maxIdle  = 2
	idleTime = 10 * time.Second
	// inspectWithin bounds the question who is in the way, so that an answer
	// without the blocker comes soon rather than late.
	inspectWithin = 2 * time.Second
	// waitingAfter is how long a Lock waits before the observer hears of it.
	waitingAfter = 200 * time.Millisecond
)

// Locker takes advisory locks on sessions of its own. It is safe for concurrent
// use; a process needs one for each database.
//
// Each call that waits and each [Lock] that is held has one of the server's
// connections, whatever the number of its keys; two idle ones are kept for 10 s.
// Many keys that are held together belong into one call.
type Locker struct {
	db      dblock.DB
	options Options

	closing  context.Context // ends when Close begins
	close    context.CancelCauseFunc
	monitors sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	calls    sync.WaitGroup // under way; none begins after closed is set
	sessions map[*session]struct{}
	idle     []idleSession // least recently used first
}

type idleSession struct {
	*session
	since time.Time
}

// New makes a Locker. It connects with the first call. At most one Options value
// may be given. Errors: [dblock.ErrInvalidOption].
func New(db dblock.DB, opts ...*Options) (*Locker, error) {
	if dialect.IsNil(db) {
		return nil, fmt.Errorf("dblock: advisory.New: %w", dialect.Invalidf("the database is nil"))
	}
	o, err := resolve(db, opts)
	if err != nil {
		return nil, dblock.NewError("new locker", db, nil, err)
	}
	l := &Locker{db: db, options: o, sessions: map[*session]struct{}{}}
	l.closing, l.close = context.WithCancelCause(context.Background())
	return l, nil
}

// Lock waits until it holds all of the keys, or until ctx or the wait limit
// ends; on a dead network it then takes some seconds more to give up the
// connection. What happens to ctx afterwards does not matter to the lock; see
// [Lock.Context].
//
// Errors: [dblock.ErrTimeout], [dblock.ErrCanceled], [dblock.ErrDeadlock],
// [dblock.ErrCapacity], [dblock.ErrUnavailable], [dblock.ErrInvalidKey],
// [dblock.ErrUnsupported], [dblock.ErrClosed], [dblock.ErrLost]; with
// [Options.Fencing] also [dblock.ErrSetup] and [dblock.ErrDenied]; and
// [dblock.ErrUnsafe] if the server has become a standby. After any of them nothing
// is held.
//
// On PostgreSQL a wait is asked for anew every 20 s, behind those who wait then: its
// snapshot holds up VACUUM and CREATE INDEX CONCURRENTLY, and each renewal is an
// error in the server's log (lock_timeout).
func (l *Locker) Lock(ctx context.Context, keys ...dblock.Key) (*Lock, error) {
	return l.acquire(ctx, "lock", false, l.session, keys)
}

// TryLock takes all of the keys if they are free now, or none of them. It does
// not wait for a holder; behind a queue of waiters it counts as not free.
//
// Errors: [dblock.ErrNotAcquired], which says who holds the key where the server
// tells, and those of [Locker.Lock].
func (l *Locker) TryLock(ctx context.Context, keys ...dblock.Key) (*Lock, error) {
	return l.acquire(ctx, "try", true, l.session, keys)
}

// Do runs fn, once, while it holds the keys. The context that fn gets ends with ctx and
// with the lock; its cause tells which. The lock is released when fn returns or
// panics; a panic goes on. [FromContext] gives fn the lock itself, for its fencing
// number.
//
// Do returns the error of fn joined with that of the release: a lock that was
// lost in the meantime is an error even if fn returned nil, since part of fn
// may have run unguarded.
func (l *Locker) Do(ctx context.Context, fn func(ctx context.Context) error, keys ...dblock.Key) error {
	if fn == nil {
		return dblock.NewError("do", l.db, keys, dialect.Invalidf("the function is nil"))
	}
	lock, err := l.Lock(ctx, keys...)
	if err != nil {
		return err
	}
	return lock.guard(ctx, fn)
}

// guard runs fn while the lock is held, and releases it.
func (l *Lock) guard(ctx context.Context, fn func(ctx context.Context) error) (err error) {
	guarded, cancel := context.WithCancelCause(context.WithValue(ctx, lockInContext{}, l))
	stop := context.AfterFunc(l.Context(), func() { cancel(l.Err()) })
	defer func() {
		stop()
		cancel(context.Canceled)
		if releaseErr := l.Release(ctx); releaseErr != nil {
			err = errors.Join(err, releaseErr)
		}
	}()
	return fn(guarded)
}

// Close ends every session. Locks that are still held are lost for their
// holders, with dblock.ErrClosed as the cause; waiting calls return
// dblock.ErrClosed. When Close returns, nothing is held and no goroutine of the
// locker runs. Safe to call again, but neither from an observer nor from a function
// of [InTx] or [OnSession]: Close waits for those, after their contexts have ended.
func (l *Locker) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.close(errLockerClosed)
	l.calls.Wait()

	l.mu.Lock()
	sessions := l.sessions
	l.sessions = map[*session]struct{}{}
	l.mu.Unlock()
	for s := range sessions {
		s.retire(errLockerClosed)
	}
	l.monitors.Wait()
	return nil
}

var (
	errLockerClosed = &dialect.Error{Class: dblock.ErrClosed, Err: errors.New("the locker was closed")}
	errIdle         = errors.New("unused")
)

// draw gives an acquire its session; reused, if it may have died unnoticed.
type draw func(ctx context.Context) (s *session, reused bool, err error)

func (l *Locker) acquire(ctx context.Context, op string, try bool, draw draw, keys []dblock.Key) (*Lock, error) {
	locked, err := deadlock.Order(l.db, keys...)
	if err != nil {
		return nil, dblock.NewError(op, l.db, keys, err)
	}
	if !l.begin() {
		return nil, dblock.NewError(op, l.db, keys, errLockerClosed)
	}
	defer l.calls.Done()

	wait, stop := l.waitContext(ctx)
	defer stop()
	began := time.Now()
	if !try {
		defer l.announceWait(ctx, keys, locked)()
	}
	request := dialect.Request{Keys: locked, Try: try, Fence: l.options.table()}
	for {
		s, reused, err := draw(wait)
		if err != nil {
			return nil, l.failure(wait, op, keys, locked, began, err)
		}
		tokens, err := s.acquire(wait, request)
		if err == nil {
			lock := newLock(ctx, s, keys, locked, tokens)
			if s.add(lock) {
				l.observeGrant(ctx, lock, time.Since(began))
				return lock, nil
			}
			err = context.Cause(s.ended)
		}
		// An idle session may have died unnoticed; it can hold nothing any more.
		if reused && dialect.ClassOf(err) == dblock.ErrLost && wait.Err() == nil {
			l.observe(ctx, dblock.Event{Kind: dblock.EventRetried, Keys: keys, Err: err})
			continue
		}
		return nil, l.failure(wait, op, keys, locked, began, err)
	}
}

// acquire asks the server. A session that is in doubt afterwards is closed before
// anybody hears of the error; one that was not even asked is as good as before.
func (s *session) acquire(ctx context.Context, r dialect.Request) (tokens []int64, err error) {
	asked := false
	err = s.use(ctx, func() error {
		asked = true
		began := time.Now()
		tokens, err = s.conn.Acquire(ctx, r)
		if err == nil && time.Since(began) >= s.locker.options.KeepAlive {
			err = s.confirm(ctx, r.Keys)
		}
		if err == nil && ctx.Err() != nil {
			// A driver closes the connection when the context ends, and may report the
			// success of a statement whose answer it had already.
			err = context.Cause(ctx)
		}
		if err != nil && dialect.ClassOf(err) != dblock.ErrNotAcquired {
			s.close(err)
		}
		return err
	})
	if !asked || dialect.ClassOf(err) == dblock.ErrNotAcquired {
		s.locker.recycle(s)
	}
	return tokens, err
}

// confirm asks whether keys are held that were granted after a wait. The answer may
// have been under way for so long that the server has ended the session meanwhile,
// of which it had heard nothing since the wait began.
func (s *session) confirm(ctx context.Context, keys []dialect.Key) error {
	bounded, cancel := context.WithTimeout(ctx, s.locker.options.AnswerWithin)
	defer cancel()
	held, err := s.conn.Held(bounded, keys)
	switch {
	case err == nil && !held:
		return &dialect.Error{Class: dblock.ErrLost, Err: errors.New("the grant came after the server had ended the session")}
	case err != nil && ctx.Err() == nil && dialect.ClassOf(err) != dblock.ErrLost: // no answer in time
		return &dialect.Error{Class: dblock.ErrLost, Err: err}
	}
	return err
}

// begin registers a call, so that Close waits for it; false after Close.
func (l *Locker) begin() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.calls.Add(1)
	return true
}

// waitContext ends with ctx, with the wait limit, and with the locker.
func (l *Locker) waitContext(ctx context.Context) (context.Context, func()) {
	wait, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(l.closing, func() { cancel(errLockerClosed) })
	stopTimer := func() {}
	if l.options.WaitLimit > 0 {
		limit := fmt.Errorf("wait limit of %v: %w", l.options.WaitLimit, context.DeadlineExceeded)
		wait, stopTimer = context.WithTimeoutCause(wait, l.options.WaitLimit, limit)
	}
	return wait, func() {
		stopTimer()
		unhook()
		cancel(context.Canceled)
	}
}

// session draws an idle session or opens one.
func (l *Locker) session(ctx context.Context) (s *session, reused bool, err error) {
	if ctx.Err() != nil {
		return nil, false, context.Cause(ctx)
	}
	l.mu.Lock()
	if n := len(l.idle); n > 0 {
		s = l.idle[n-1].session
		l.idle = l.idle[:n-1]
		l.mu.Unlock()
		return s, true, nil
	}
	l.mu.Unlock()
	return l.open(ctx, dialect.SessionOptions{KeepAlive: l.options.KeepAlive, AnswerWithin: l.options.AnswerWithin})
}

func (l *Locker) open(ctx context.Context, o dialect.SessionOptions) (s *session, reused bool, err error) {
	o.Application = l.options.Application
	conn, err := l.db.OpenSession(ctx, o)
	if err != nil {
		return nil, false, err
	}
	s = newSession(l, conn)
	s.lendable = o.StatementGap > 0
	l.mu.Lock()
	l.sessions[s] = struct{}{}
	l.mu.Unlock()
	l.monitors.Go(s.monitor)
	return s, false, nil
}

// recycle keeps a session that is known to hold nothing for the next call, if it
// lives and nobody else's statements changed it.
func (l *Locker) recycle(s *session) {
	l.mu.Lock()
	if s.ended.Err() == nil && !s.lendable && len(l.idle) < maxIdle {
		l.idle = append(l.idle, idleSession{s, time.Now()})
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	s.retire(errIdle)
}

// expire takes the session out of the idle ones if it has been unused for long.
func (l *Locker) expire(s *session) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, idle := range l.idle {
		if idle.session == s && time.Since(idle.since) >= idleTime {
			l.idle = slices.Delete(l.idle, i, i+1)
			return true
		}
	}
	return false
}

// forget drops a session that has ended.
func (l *Locker) forget(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.sessions, s)
	l.idle = slices.DeleteFunc(l.idle, func(i idleSession) bool { return i.session == s })
}

// failure says why an acquire failed: for which time, and who is in the way.
func (l *Locker) failure(wait context.Context, op string, keys []dblock.Key, locked []dialect.Key, began time.Time, err error) error {
	// A driver's own timer may be a little ahead of the context's.
	if deadline, ok := wait.Deadline(); ok && time.Until(deadline) <= 0 {
		<-wait.Done()
	}
	if wait.Err() != nil {
		err = ended(wait, time.Since(began), err)
	}
	return l.withBlocker(wait, op, keys, locked, err, 0)
}

// withBlocker is the error of a call, and says who is in the way if somebody was:
// anybody but the session itself.
func (l *Locker) withBlocker(ctx context.Context, op string, keys []dblock.Key, locked []dialect.Key, err error, self int64) error {
	failure := dblock.NewError(op, l.db, keys, err).(*dblock.Error)
	switch dialect.ClassOf(err) {
	case dblock.ErrNotAcquired, dblock.ErrTimeout:
		blocker, inspectErr := l.blocker(ctx, locked, self)
		failure.Blocker = blocker
		if inspectErr != nil {
			failure.Err = fmt.Errorf("%w; who is in the way is unknown: %w", err, inspectErr)
		}
	}
	return failure
}

// ended says why a wait ended early. What the driver made of it adds nothing
// unless the server had a reason of its own.
func ended(wait context.Context, waited time.Duration, err error) error {
	cause := context.Cause(wait)
	if errors.Is(cause, dblock.ErrClosed) {
		return cause
	}
	class := dblock.ErrCanceled
	if errors.Is(wait.Err(), context.DeadlineExceeded) || errors.Is(cause, context.DeadlineExceeded) {
		class = dblock.ErrTimeout
	}
	reason := fmt.Errorf("after %v: %w", waited.Round(time.Millisecond), cause)
	switch dialect.ClassOf(err) {
	case dblock.ErrCanceled, dblock.ErrTimeout, dblock.ErrLost, "":
	default:
		reason = fmt.Errorf("%w: %w", reason, err)
	}
	return &dialect.Error{Class: class, Err: reason}
}

// blocker asks the server who is in the way: the first holder, else the first
// waiter, other than the session itself. It does not depend on the context of the
// call, which may have ended.
func (l *Locker) blocker(ctx context.Context, locked []dialect.Key, self int64) (*dblock.Blocker, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), inspectWithin)
	defer cancel()
	found, err := l.db.Inspect(ctx, locked...)
	found = slices.DeleteFunc(found, func(h dialect.Holding) bool { return self != 0 && h.Session == self })
	if err != nil || len(found) == 0 {
		return nil, err
	}
	first := max(0, slices.IndexFunc(found, func(h dialect.Holding) bool { return !h.Waiting }))
	return &found[first], nil
}

// announceWait tells the observer of a wait that is not over soon. The function
// that it returns ends that.
func (l *Locker) announceWait(ctx context.Context, keys []dblock.Key, locked []dialect.Key) (stop func()) {
	if l.options.Observer == nil {
		return func() {}
	}
	done := make(chan struct{})
	timer := time.AfterFunc(waitingAfter, func() {
		defer close(done)
		blocker, err := l.blocker(ctx, locked, 0)
		l.observe(ctx, dblock.Event{Kind: dblock.EventWaiting, Keys: keys, Duration: waitingAfter, Blocker: blocker, Err: err})
	})
	return func() {
		if !timer.Stop() {
			<-done
		}
	}
}

// observeGrant releases the lock if the observer panics, since nobody would have
// it.
func (l *Locker) observeGrant(ctx context.Context, lock *Lock, waited time.Duration) {
	returned := false
	defer func() {
		if !returned {
			lock.session.remove(lock)
			lock.finish(errReleased)
			lock.session.retire(errReleased)
		}
	}()
	l.observe(ctx, dblock.Event{Kind: dblock.EventAcquired, Keys: lock.keys, Duration: waited})
	returned = true
}

func (l *Locker) observe(ctx context.Context, e dblock.Event) {
	if l.options.Observer != nil {
		e.Dialect = l.db.Name()
		l.options.Observer.Observe(ctx, e)
	}
}
