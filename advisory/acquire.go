package advisory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// call is one acquire from its begin to its end.
type call struct {
	locker *Locker
	ctx    context.Context
	op     string
	keys   []dblock.Key
	locked []dialect.Key
	try    bool
	forAll bool // it is the wait on behalf of all who queue for the key
	began  time.Time
	hold   *deadlock.Hold // nil without a Checker

	wait     context.Context // see waitContext
	stopWait func()
}

func (c *call) several() bool { return len(c.locked) > 1 }

func (c *call) request() dialect.Request {
	return dialect.Request{Keys: c.locked, Try: c.try, Fence: c.locker.options.table()}
}

// waitContext ends with the call's context, with the wait limit, and with the locker.
// A call that does not wait does not need it.
func (c *call) waitContext() context.Context {
	if c.wait != nil {
		return c.wait
	}
	wait, cancel := context.WithCancelCause(c.ctx)
	unhook := context.AfterFunc(c.locker.closing, func() { cancel(errLockerClosed) })
	stopTimer := func() {}
	if within := c.locker.options.WaitLimit; within > 0 {
		limit := fmt.Errorf("wait limit of %v: %w", within, context.DeadlineExceeded)
		wait, stopTimer = context.WithDeadlineCause(wait, c.began.Add(within), limit)
	}
	c.wait = wait
	c.stopWait = func() {
		stopTimer()
		unhook()
		cancel(context.Canceled)
	}
	return wait
}

func (c *call) end() {
	if c.stopWait != nil {
		c.stopWait()
	}
}

func (l *Locker) acquire(ctx context.Context, op string, try bool, keys []dblock.Key) (*Lock, error) {
	return l.acquireWith(ctx, op, try, keys, acquireAsAsked)
}

// acquireAsAsked takes the keys on a session that the locker's locks share, or on one of
// their own.
func acquireAsAsked(c *call) (*Lock, error) {
	l := c.locker
	switch {
	case l.options.SessionPerLock:
		return l.acquireAlone(c, l.session)
	case c.several():
		return l.acquireSeveral(c)
	}
	return l.acquireOne(c)
}

func (l *Locker) acquireWith(ctx context.Context, op string, try bool, keys []dblock.Key, acquire func(*call) (*Lock, error)) (*Lock, error) {
	locked, err := deadlock.Order(l.db, keys...)
	if err != nil {
		return nil, dblock.NewError(op, l.db, keys, err)
	}
	if !l.begin() {
		return nil, dblock.NewError(op, l.db, keys, errLockerClosed)
	}
	defer l.calls.Done()
	if l.options.Fencing {
		addNames(locked, keys)
	}
	l.names.note(keys)
	c := &call{locker: l, ctx: ctx, op: op, keys: keys, locked: locked, try: try, began: time.Now()}
	defer c.end()
	if !try && l.options.Observer != nil {
		defer l.announceWait(ctx, keys, locked)()
	}
	if ctx.Err() != nil {
		return nil, l.failure(c, context.Cause(ctx))
	}
	c.hold = l.beginHold(ctx, try, nil, keys, locked)
	lock, err := acquire(c)
	if err != nil {
		return nil, l.failure(c, err)
	}
	c.hold.Acquired()
	if l.options.Observer != nil {
		l.observeGrant(ctx, lock, time.Since(c.began))
	}
	return lock, nil
}

// beginHold tells the Checker of a call that begins.
func (l *Locker) beginHold(ctx context.Context, try bool, tx dblock.Tx, keys []dblock.Key, locked []dialect.Key) *deadlock.Hold {
	return l.options.Checker.Begin(ctx, deadlock.Call{Kind: "advisory", Keys: keys, Order: locked, Try: try, Tx: tx})
}

// addNames is for the rows that fencing numbers come from, which have names where locks
// have none.
func addNames(locked []dialect.Key, keys []dblock.Key) {
	names := make(map[int64]string, len(keys))
	for _, k := range keys {
		names[k.ID()] = k.Name("")
	}
	for i, k := range locked {
		if k.Name == "" {
			locked[i].Name = names[k.ID]
		}
	}
}

// acquireAlone takes the keys on a session that holds nothing else.
func (l *Locker) acquireAlone(c *call, draw draw) (*Lock, error) {
	s, tokens, err := l.acquireOwn(c.waitContext(), c.keys, c.request(), draw)
	if err != nil {
		return nil, err
	}
	lock := newLock(c, s, tokens)
	lock.alone = true
	if !s.add(lock) {
		return nil, context.Cause(s.ended)
	}
	return lock, nil
}

// acquireOwn asks the server on a session of its own.
func (l *Locker) acquireOwn(ctx context.Context, keys []dblock.Key, r dialect.Request, draw draw) (*session, []int64, error) {
	for {
		s, reused, err := draw(ctx)
		if err != nil {
			return nil, nil, err
		}
		tokens, err := s.acquire(ctx, r)
		if err == nil {
			return s, tokens, nil
		}
		// An idle session may have died unnoticed; it can hold nothing any more.
		if reused && dialect.ClassOf(err) == dblock.ErrLost && ctx.Err() == nil {
			l.observeRetry(ctx, keys, err)
			continue
		}
		return nil, nil, err
	}
}

// acquireOne takes a key of which nobody else in the process has a share, on a session
// that holds other keys too.
func (l *Locker) acquireOne(c *call) (*Lock, error) {
	k := c.locked[0]
	tried := l.claim(k) == 1
	switch {
	case !tried && c.try:
		return nil, errRefused
	case tried && (c.try || !l.options.Fencing):
		lock, err := l.tryOwned(c)
		if err == nil || c.try || dialect.ClassOf(err) != dblock.ErrNotAcquired {
			if err != nil {
				l.disown(k)
			}
			return lock, err
		}
	}
	lock, err := l.wait(c, k, tried)
	if err != nil {
		return nil, err
	}
	return lock, nil
}

// errRefused is for a try for a key that is not free, in this process or on the server.
var errRefused = &dialect.Error{Class: dblock.ErrNotAcquired}

// tryOwned tries for keys that the call has within the process.
func (l *Locker) tryOwned(c *call) (*Lock, error) {
	s, tokens, err := l.try(c, c.request())
	if err != nil {
		return nil, err
	}
	lock := newLock(c, s, tokens)
	if !s.add(lock) {
		return nil, context.Cause(s.ended)
	}
	return lock, nil
}

// acquireSeveral takes the keys within the process in their order, then all of them in the
// database. They are not passed on within the process.
func (l *Locker) acquireSeveral(c *call) (lock *Lock, err error) {
	claimed := 0
	defer func() {
		if err != nil {
			l.disown(c.locked[:claimed]...)
		}
	}()
	for claimed = l.claim(c.locked...); claimed < len(c.locked); claimed += l.claim(c.locked[claimed:]...) {
		if c.try {
			return nil, errRefused
		}
		if _, err := l.wait(c, c.locked[claimed], false); err != nil {
			return nil, err
		}
		claimed++
	}
	if c.try || !l.options.Fencing {
		lock, err := l.tryOwned(c)
		if err == nil || c.try || dialect.ClassOf(err) != dblock.ErrNotAcquired {
			return lock, err
		}
	}
	s, tokens, err := l.await(c.waitContext(), c.keys, c.request(), nil)
	if err != nil {
		return nil, err
	}
	lock = newLock(c, s, tokens)
	if !s.add(lock) {
		return nil, context.Cause(s.ended)
	}
	return lock, nil
}

// try asks the server once and waits for nobody: on a multiplexed session, or on one of
// its own where a fencing number is drawn, since that waits for the row's table.
func (l *Locker) try(c *call, r dialect.Request) (*session, []int64, error) {
	r.Try = true
	if r.Fence != nil {
		return l.acquireOwn(c.waitContext(), c.keys, r, l.session)
	}
	for {
		s, reused, err := l.place(c)
		if err != nil {
			return nil, nil, err
		}
		if err = s.try(r); err == nil {
			if cause := c.ended(); cause != nil {
				lock := &Lock{session: s, locked: c.locked}
				_ = lock.returnKeys() // after an error the session is closed
				return nil, nil, cause
			}
			return s, nil, nil
		}
		l.vacate(s, r.Keys)
		// The session may have died unnoticed while nobody used it.
		if reused && dialect.ClassOf(err) == dblock.ErrLost && c.ended() == nil {
			l.observeRetry(c.ctx, c.keys, err)
			continue
		}
		return nil, nil, err
	}
}

// ended says why the call must not succeed any more; nil if it may.
func (c *call) ended() error {
	switch {
	case c.locker.closing.Err() != nil:
		return errLockerClosed
	case c.ctx.Err() != nil:
		return context.Cause(c.ctx)
	case c.wait != nil && c.wait.Err() != nil:
		return context.Cause(c.wait)
	}
	return nil
}

// try asks for the keys on a session that holds others. What cannot be settled costs the
// session.
func (s *session) try(r dialect.Request) error {
	if len(r.Keys) == 1 {
		o := &operation{key: r.Keys[0], try: true}
		s.exchange(o)
		if o.err == nil && !o.done {
			return errRefused
		}
		return o.err
	}
	s.operations.Add(1)
	defer s.operations.Add(-1)
	return s.useBounded(func(ctx context.Context) error {
		_, err := s.conn.Acquire(ctx, r)
		if err == nil || dialect.ClassOf(err) == dblock.ErrNotAcquired {
			return err
		}
		if _, unsettled := s.resolve(r.Keys, nil, err); unsettled != nil {
			s.lose(unsettled)
			return unsettled
		}
		return err
	})
}

// acquire asks the server. A session that is in doubt afterwards is closed before
// anybody hears of the error; one that was not even asked is as good as before.
func (s *session) acquire(ctx context.Context, r dialect.Request) (tokens []int64, err error) {
	asked, err := s.askFor(ctx, r.Keys, func() (err error) {
		tokens, err = s.conn.Acquire(ctx, r)
		return err
	})
	if !asked || dialect.ClassOf(err) == dblock.ErrNotAcquired {
		s.locker.recycle(s)
	}
	return tokens, err
}

// renew gives back the key, the only one that the session holds, and takes it again. After
// an error the session is closed.
func (s *session) renew(ctx context.Context, k dialect.Key) error {
	_, err := s.askFor(ctx, []dialect.Key{k}, func() error { return s.conn.Renew(ctx, k) })
	if err != nil {
		s.retire(err)
	}
	return err
}

// askFor makes the call that asks the server for the keys.
func (s *session) askFor(ctx context.Context, keys []dialect.Key, call func() error) (asked bool, err error) {
	err = s.use(ctx, func() error {
		asked = true
		began := time.Now()
		err := call()
		if err == nil && time.Since(began) >= s.locker.options.KeepAlive {
			err = s.confirm(ctx, keys)
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
	return asked, err
}

// confirm asks whether keys are held that were granted after a wait. The answer may
// have been under way for so long that the server has ended the session meanwhile,
// of which it had heard nothing since the wait began.
func (s *session) confirm(ctx context.Context, keys []dialect.Key) error {
	bounded, cancel := context.WithTimeout(ctx, s.locker.options.AnswerWithin)
	defer cancel()
	held, err := dialect.HoldsAll(bounded, s.conn, keys)
	switch {
	case err == nil && !held:
		return &dialect.Error{Class: dblock.ErrLost, Err: errors.New("the grant came after the server had ended the session")}
	case err != nil && ctx.Err() == nil && dialect.ClassOf(err) != dblock.ErrLost: // no answer in time
		return &dialect.Error{Class: dblock.ErrLost, Err: err}
	}
	return err
}
