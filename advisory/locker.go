package advisory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

const (
	// inspectWithin bounds the question who is in the way, so that an answer
	// without the blocker comes soon rather than late.
	inspectWithin = 2 * time.Second
	// waitingAfter is how long a Lock waits before the observer hears of it.
	waitingAfter = 200 * time.Millisecond
)

// Locker takes advisory locks on sessions of its own. It is safe for concurrent
// use; a process needs one for each database.
//
// Its locks share a few connections: one to four, more where the network is slow, and
// one for each 500 keys held on PostgreSQL, 10,000 on MySQL, 2,000 on MariaDB. Tries and
// releases of many goroutines travel in one statement. A key that is not free is waited
// for on a connection of its own, once for all callers of the process, who get it in the
// order in which they came: whoever is in the queue when the server grants the key gets
// it without asking the server again, up to 64 calls and for 100 ms, before it goes back
// to the server for others; see [Options.MaxWaits]. A fenced lock, and each function of
// [InTx] and [OnSession], has a connection to itself. What is unused is closed after
// 10 s. [Options.SessionPerLock] gives each lock a connection instead.
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

	multiplexed []*session // those that take the keys of many calls
	opening     *opening   // one more of them; nil if there is none on its way
	growAfter   time.Time
	quickest    atomic.Int64  // nanoseconds; see timed
	slots       chan struct{} // holds one element for each session that waits, or holds what it waited for
	trying      chan struct{} // holds one element while a waiter beyond those tries on a session of its own

	queues queues
	names  *names // nil: none are written
}

// New makes a Locker. It connects with the first call. At most one Options value
// may be given. Errors: [dblock.ErrInvalidOption], and [dblock.ErrUnsupported] for
// [Options.Deadlock].
func New(db dblock.DB, opts ...*Options) (*Locker, error) {
	if dialect.IsNil(db) {
		return nil, fmt.Errorf("dblock: advisory.New: %w", dialect.Invalidf("the database is nil"))
	}
	o, err := resolve(db, opts)
	if err != nil {
		return nil, dblock.NewError("new locker", db, nil, err)
	}
	l := &Locker{db: db, options: o, sessions: map[*session]struct{}{},
		slots: make(chan struct{}, o.MaxWaits), trying: make(chan struct{}, 1), queues: queues{byName: db.Features().ByName, keys: map[lockID]*queue{}}}
	l.closing, l.close = context.WithCancelCause(context.Background())
	l.names = newNames(l)
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
	return l.acquire(ctx, "lock", false, keys)
}

// TryLock takes all of the keys if they are free now, or none of them. It does
// not wait for a holder; behind a queue of waiters it counts as not free.
//
// Errors: [dblock.ErrNotAcquired], which says who holds the key where the server
// tells, and those of [Locker.Lock].
func (l *Locker) TryLock(ctx context.Context, keys ...dblock.Key) (*Lock, error) {
	return l.acquire(ctx, "try", true, keys)
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
	guarded, cancel := context.WithCancelCause(l.hold.Context(context.WithValue(ctx, lockInContext{}, l)))
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
	var ends sync.WaitGroup // side by side: where the network is dead each takes seconds
	for s := range sessions {
		ends.Go(func() { s.retire(errLockerClosed) })
	}
	ends.Wait()
	l.monitors.Wait()
	return nil
}

var errLockerClosed = &dialect.Error{Class: dblock.ErrClosed, Err: errors.New("the locker was closed")}

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

// failure says why an acquire failed: for which time, and who is in the way.
func (l *Locker) failure(c *call, err error) error {
	wait := c.ctx
	if c.wait != nil {
		wait = c.wait
	}
	// A driver's own timer may be a little ahead of the context's.
	if deadline, ok := wait.Deadline(); ok && time.Until(deadline) <= 0 {
		<-wait.Done()
	}
	if c.ended() != nil && c.wait != nil {
		<-wait.Done() // of which that of its parent may be a little ahead, too
	}
	if wait.Err() != nil {
		err = ended(wait, time.Since(c.began), err)
	}
	return l.withBlocker(wait, c.op, c.keys, c.locked, err, 0)
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
			lock.finish(errReleased)
			_ = lock.giveBack() // after an error the session is closed
		}
	}()
	l.observe(ctx, dblock.Event{Kind: dblock.EventAcquired, Keys: lock.keys, Duration: waited})
	returned = true
}

func (l *Locker) observeRetry(ctx context.Context, keys []dblock.Key, err error) {
	l.observe(ctx, dblock.Event{Kind: dblock.EventRetried, Keys: keys, Err: err})
}

func (l *Locker) observe(ctx context.Context, e dblock.Event) {
	if l.options.Observer != nil {
		e.Dialect = l.db.Name()
		l.options.Observer.Observe(ctx, e)
	}
}
