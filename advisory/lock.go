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

// Lock is held from the call that returned it until Release, or until its
// session is lost. It is safe for concurrent use.
type Lock struct {
	session *session
	keys    []dblock.Key
	locked  []dialect.Key
	tokens  []int64 // beside locked; nil without fencing
	since   time.Time
	hold    *deadlock.Hold // nil without a Checker
	place   int            // in the list of the session's locks
	alone   bool           // on a session that no other lock can get, whatever the locker's queues say
	owned   sync.Once      // done when the locker's queues do not count the lock any more

	mu     sync.Mutex
	values context.Context // whose values the lock's context has
	ctx    context.Context // nil until somebody asks for it
	cancel context.CancelCauseFunc
	reason error // why the lock is not held any more

	once       sync.Once
	releaseErr error
}

// errReleased is why a lock that was given back is not held any more.
var errReleased = &dialect.Error{Class: dblock.ErrClosed, Err: errors.New("the lock was released")}

func newLock(c *call, s *session, tokens []int64) *Lock {
	return &Lock{session: s, keys: c.keys, locked: c.locked, tokens: tokens, since: time.Now(), hold: c.hold, values: c.hold.Context(c.ctx)}
}

// finish ends the lock for its holder; the first reason counts.
func (l *Lock) finish(reason error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.reason != nil {
		return
	}
	l.reason = reason
	l.hold.Release()
	if l.cancel != nil {
		l.cancel(reason)
	}
}

type lockInContext struct{}

// FromContext is the lock that the innermost [Locker.Do], [InTx] or [OnSession]
// around the caller holds; false outside of any.
func FromContext(ctx context.Context) (*Lock, bool) {
	lock, ok := ctx.Value(lockInContext{}).(*Lock)
	return lock, ok
}

// Keys are those of the call, as it gave them.
func (l *Lock) Keys() []dblock.Key { return slices.Clone(l.keys) }

// Context lasts as long as the lock is held. It carries the values of the
// context that the lock was taken with, but not its end: a deadline for the wait
// is none for the work. Its cause is that of [Lock.Err].
func (l *Lock) Context() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx == nil {
		l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(l.values))
		if l.reason != nil {
			l.cancel(l.reason)
		}
	}
	return l.ctx
}

// Done is closed when the lock is not held any more.
func (l *Lock) Done() <-chan struct{} { return l.Context().Done() }

// Err is nil while the lock is held, then says why it is not: dblock.ErrLost
// with what ended the session, or dblock.ErrClosed after Release or after the
// locker's Close.
func (l *Lock) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reason
}

// Token is the fencing number of the lock's first key, 0 without
// [Options.Fencing]. It grows with every grant of the key: who refuses a write
// that carries a smaller number than one seen before is safe from holders that
// do not know yet that they lost the lock. A holder shows its number there before
// it reads what it will write.
func (l *Lock) Token() int64 {
	token, _ := l.TokenOf(l.keys[0])
	return token
}

// TokenOf is the fencing number of one of the lock's keys; false if the lock was
// taken without that key or without [Options.Fencing].
func (l *Lock) TokenOf(key dblock.Key) (int64, bool) {
	if l.tokens == nil {
		return 0, false
	}
	id := key.ID()
	i := slices.IndexFunc(l.locked, func(k dialect.Key) bool { return k.ID == id })
	if i < 0 {
		return 0, false
	}
	return l.tokens[i], true
}

// Check asks the server whether the lock is held. If it is not, the lock is
// lost: Check returns dblock.ErrLost and the lock's context ends. The end of ctx
// ends only the wait for the answer, with dblock.ErrTimeout or dblock.ErrCanceled.
// dblock.ErrClosed after Release or the locker's Close, dblock.ErrUnsupported in a
// function of [InTx] or [OnSession].
func (l *Lock) Check(ctx context.Context) error {
	if err := l.Err(); err != nil {
		return err
	}
	if err := l.session.refuseLent("check", l.keys); err != nil {
		return err
	}
	err := l.session.useDetached(ctx, func(ctx context.Context) error {
		held, err := dialect.HoldsAll(ctx, l.session.conn, l.locked)
		if err == nil && !held {
			if released := l.Err(); released != nil { // meanwhile, which others on the session must not pay for
				return released
			}
			err = &dialect.Error{Class: dblock.ErrLost, Err: errors.New("the server says that the session does not hold it")}
		}
		if err != nil {
			l.session.lose(err)
		}
		return err
	})
	if lost := l.Err(); lost != nil {
		return lost
	}
	return dblock.NewError("check", l.session.locker.db, l.keys, err)
}

// Release gives the keys back. It works with a cancelled ctx. A server that does
// not answer within [Options.AnswerWithin] is given up and the session closed,
// which frees the keys. Calling it again returns the same result. A key that another
// caller of this process waits for may be passed on to it, or to the server's queue on its
// behalf, if the session lives as far as is known here; Release then does not wait for the
// server.
//
// An error says that the lock was not held until now, or may not have been:
// dblock.ErrLost, dblock.ErrNotHeld, or dblock.ErrClosed after the locker's
// Close. Either way nothing is held afterwards. Only dblock.ErrUnsupported, in a
// function of [InTx] or [OnSession], leaves the lock to the end of that function.
func (l *Lock) Release(ctx context.Context) error {
	if err := l.session.refuseLent("release", l.keys); err != nil {
		return err
	}
	l.once.Do(func() { l.releaseErr = l.release(ctx) })
	return l.releaseErr
}

func (l *Lock) release(ctx context.Context) error {
	// The holder's context ends before the key is free.
	l.finish(errReleased)
	if reason := l.Err(); reason != error(errReleased) {
		return reason
	}
	s := l.session
	err := l.giveBack()
	if err != nil {
		switch dialect.ClassOf(err) {
		case dblock.ErrNotHeld, dblock.ErrLost, dblock.ErrClosed:
		default: // no answer in time, for instance: nobody knows how long it was held
			err = &dialect.Error{Class: dblock.ErrLost, Err: err}
		}
	}
	if err != nil && !(s.isSettled() && dialect.ClassOf(err) == dblock.ErrLost) {
		err = dblock.NewError("release", s.locker.db, l.keys, err)
		s.locker.observe(ctx, dblock.Event{Kind: dblock.EventLost, Keys: l.keys, Duration: time.Since(l.since), Err: err})
		return err
	}
	s.locker.observe(ctx, dblock.Event{Kind: dblock.EventReleased, Keys: l.keys, Duration: time.Since(l.since)})
	return nil
}

// giveBack passes the key on within the process or returns the keys to the server.
// After an error the session is closed.
func (l *Lock) giveBack() error {
	s := l.session
	s.remove(l)
	if !l.alone {
		passed, err := s.locker.passOn(l)
		if passed {
			l.owned.Do(func() {})
			return nil
		}
		defer l.disown()
		if err != nil {
			s.retire(err)
			return err
		}
	}
	return l.returnKeys()
}

// returnKeys gives the keys back to the server, and the session to the locker.
func (l *Lock) returnKeys() error {
	s := l.session
	err := s.giveBack(l.locked)
	if err != nil {
		s.retire(err) // asked or not: the keys must not stay behind
		return err
	}
	if s.multiplexed {
		s.locker.vacate(s, l.locked)
	} else {
		s.locker.recycle(s)
	}
	return nil
}

func (s *session) giveBack(keys []dialect.Key) error {
	if s.multiplexed && len(keys) == 1 {
		o := &operation{key: keys[0]}
		s.exchange(o)
		if o.err == nil && !o.done {
			return &dialect.Error{Class: dblock.ErrNotHeld, Err: fmt.Errorf("key %s", keys[0].Label)}
		}
		return o.err
	}
	s.operations.Add(1)
	defer s.operations.Add(-1)
	return s.useBounded(func(ctx context.Context) error {
		if s.doubt != nil {
			return s.doubt
		}
		return s.conn.Release(ctx, keys)
	})
}

// disown lets others in the process have the keys, once.
func (l *Lock) disown() {
	if l.alone {
		return
	}
	l.owned.Do(func() { l.session.locker.disown(l.locked...) })
}

// observeEnd tells the observer that the session ended under the lock.
func (l *Lock) observeEnd(reason, closeErr error) {
	if closeErr != nil {
		reason = fmt.Errorf("%w; %w", reason, closeErr)
	}
	l.session.locker.observe(l.Context(), dblock.Event{
		Kind: dblock.EventLost, Keys: l.keys, Duration: time.Since(l.since),
		Err: dblock.NewError("hold", l.session.locker.db, l.keys, reason),
	})
}
