package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pressly/goose/v3/lock"
	"github.com/sethvargo/go-retry"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

const (
	// pollFirst doubles with each poll up to pollLast; jitter keeps replicas that
	// started together apart, and the longest pause below a second.
	pollFirst         = 50 * time.Millisecond
	pollLast          = 800 * time.Millisecond
	pollJitterPercent = 20
	// A wait is announced when it is not over soon, and then from time to time.
	announceAfter = 200 * time.Millisecond
	announceEvery = 5 * time.Second
	// inspectWithin bounds the question who is in the way: it delays the next poll,
	// and the pool may have no connection left for it.
	inspectWithin = 2 * time.Second
	// releaseWithin bounds the release, which the caller's context must not.
	releaseWithin = 5 * time.Second
)

// SessionLocker is the guard alone, for goose.WithSessionLocker, on every
// database of dblock. Of the options it uses Key, or VersionTable for the key's
// default, WaitLimit and Observer. It keeps no state of a wait, so several
// providers may share one.
//
// The guard lives on the connection that goose migrates on, so losing one is
// losing the other. A Go migration that runs on the pool (RunDB) leaves that
// connection idle: the server's limits on that (idle_session_timeout,
// wait_timeout) are lifted while the guard is held, and put back afterwards.
//
// The guard is released on the connection that took it. If that connection is
// not known to hold nothing afterwards, it is destroyed instead of going back to
// the pool.
//
// Errors: [dblock.ErrInvalidOption]. SessionLock returns [dblock.ErrTimeout] and
// [dblock.ErrCanceled] when its context or the wait limit ends, and the errors of
// the database, such as [dblock.ErrLost]; it holds nothing then. SessionUnlock
// returns [dblock.ErrLost] or [dblock.ErrNotHeld] if the guard was gone before:
// what ran since then may have run unguarded.
func SessionLocker(db dblock.DB, opts ...*Options) (lock.SessionLocker, error) {
	if dialect.IsNil(db) {
		return nil, errNilDB
	}
	o, err := resolve(opts)
	if err != nil {
		return nil, dblock.NewError("new session locker", db, nil, err)
	}
	g, err := newGuard(db, o)
	if err != nil {
		return nil, dblock.NewError("new session locker", db, []dblock.Key{o.Key}, err)
	}
	return g, nil
}

// guard implements lock.SessionLocker.
type guard struct {
	db      dblock.DB
	options Options
	locked  []dialect.Key

	mu    sync.Mutex
	holds map[*sql.Conn]hold
}

type hold struct {
	session dialect.Session
	restore func(ctx context.Context) error // what the connection was like before
	since   time.Time
}

func newGuard(db dblock.DB, o Options) (*guard, error) {
	locked, err := deadlock.Order(db, o.Key)
	if err != nil {
		return nil, err
	}
	return &guard{db: db, options: o, locked: locked, holds: map[*sql.Conn]hold{}}, nil
}

// SessionLock polls until the connection holds the guard.
func (g *guard) SessionLock(ctx context.Context, conn *sql.Conn) error {
	if g.holding(conn) {
		return g.error("lock", &dialect.Error{Class: dblock.ErrNotAcquired, Hint: "this connection holds the guard already"})
	}
	wait, stop := g.waitContext(ctx)
	defer stop()
	began := time.Now()
	h, err := g.acquire(wait, conn, began)
	if err != nil {
		return g.failure(wait, began, err)
	}
	g.mu.Lock()
	g.holds[conn] = h
	g.mu.Unlock()
	g.observe(ctx, dblock.Event{Kind: dblock.EventAcquired, Duration: h.since.Sub(began)})
	return nil
}

// SessionUnlock releases the guard, or destroys the connection if that fails.
func (g *guard) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	g.mu.Lock()
	h, ok := g.holds[conn]
	delete(g.holds, conn)
	g.mu.Unlock()
	if !ok {
		return g.error("unlock", &dialect.Error{Class: dblock.ErrNotHeld, Hint: "SessionLock did not succeed on this connection"})
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWithin)
	defer cancel()
	err := h.session.Release(bounded, g.locked)
	kind := dblock.EventReleased
	switch {
	case err != nil:
		kind = dblock.EventLost
		err = join(err, h.session.Close())
	case h.restore(bounded) != nil: // the guard was held all the time; only the connection is not fit for others
		err = h.session.Close()
	}
	g.observe(ctx, dblock.Event{Kind: kind, Duration: time.Since(h.since), Err: err})
	return g.error("unlock", err)
}

func (g *guard) holding(conn *sql.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, ok := g.holds[conn]
	return ok
}

// waitContext ends with ctx and with the wait limit.
func (g *guard) waitContext(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := g.options.WaitLimit
	if limit == 0 {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, limit, fmt.Errorf("wait limit of %v: %w", limit, context.DeadlineExceeded))
}

func (g *guard) acquire(ctx context.Context, conn *sql.Conn, began time.Time) (h hold, err error) {
	session, err := g.db.OnConn(ctx, conn)
	if err != nil {
		return hold{}, err
	}
	pauses := retry.WithJitterPercent(pollJitterPercent, retry.WithCappedDuration(pollLast, retry.NewExponential(pollFirst)))
	request := dialect.Request{Keys: g.locked, Try: true}
	announce := began.Add(announceAfter)
	doubtful := false
	err = retry.Do(ctx, pauses, func(ctx context.Context) error {
		_, err := session.Acquire(ctx, request)
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx) // which may have closed the connection after the grant
		}
		if dialect.ClassOf(err) != dblock.ErrNotAcquired {
			doubtful = err != nil
			return err
		}
		if now := time.Now(); !now.Before(announce) {
			announce = now.Add(announceEvery)
			g.announceWait(ctx, began)
		}
		return retry.RetryableError(err)
	})
	h = hold{session: session, since: time.Now()}
	if err == nil {
		h.restore, err = session.AllowSilence(ctx)
		doubtful = err != nil
	}
	if doubtful {
		err = join(err, session.Close())
	}
	return h, err
}

// announceWait tells the observer for whom the call waits, and for how long it
// has done so.
func (g *guard) announceWait(ctx context.Context, began time.Time) {
	if g.options.Observer == nil {
		return
	}
	blocker, err := g.blocker(ctx)
	g.observe(ctx, dblock.Event{Kind: dblock.EventWaiting, Duration: time.Since(began), Blocker: blocker, Err: err})
}

// blocker asks the server who holds the guard.
func (g *guard) blocker(ctx context.Context) (*dblock.Blocker, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), inspectWithin)
	defer cancel()
	found, err := g.db.Inspect(ctx, g.locked...)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(found, func(h dialect.Holding) bool { return !h.Waiting })
	if i < 0 {
		return nil, nil
	}
	return &found[i], nil
}

// failure says why there is no guard, and after a wait who is in the way.
func (g *guard) failure(wait context.Context, began time.Time, err error) error {
	if wait.Err() == nil {
		return g.error("lock", err)
	}
	after := fmt.Errorf("after %v: %w", time.Since(began).Round(time.Millisecond), context.Cause(wait))
	if !errors.Is(wait.Err(), context.DeadlineExceeded) {
		return g.error("lock", &dialect.Error{Class: dblock.ErrCanceled, Err: after})
	}
	blocker, inspectErr := g.blocker(wait)
	if inspectErr != nil {
		after = fmt.Errorf("%w; who is in the way is unknown: %w", after, inspectErr)
	}
	failure := g.error("lock", &dialect.Error{Class: dblock.ErrTimeout, Err: after}).(*dblock.Error)
	failure.Blocker = blocker
	return failure
}

func (g *guard) error(op string, err error) error {
	return dblock.NewError(op, g.db, []dblock.Key{g.options.Key}, err)
}

func (g *guard) observe(ctx context.Context, e dblock.Event) {
	if g.options.Observer != nil {
		e.Dialect = g.db.Name()
		e.Keys = []dblock.Key{g.options.Key}
		g.options.Observer.Observe(ctx, e)
	}
}

// join is errors.Join on one line.
func join(err, other error) error {
	switch {
	case other == nil:
		return err
	case err == nil:
		return other
	}
	return fmt.Errorf("%w; %w", err, other)
}
