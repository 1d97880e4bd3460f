package advisory

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// settle is how long a session must be unused before its monitor listens, so
// that quick successions of calls do not pay for starting and stopping it.
const settle = 100 * time.Millisecond

// session is a connection of the locker's own together with the locks that live
// on it and the monitor that watches over it.
type session struct {
	locker *Locker
	conn   dialect.Session

	lendable bool  // its holder's own statements may run on it
	doubt    error // why it cannot be used after those; whoever has the turn reads and writes it

	turn      chan struct{} // holds one element while somebody uses conn
	ended     context.Context
	end       context.CancelCauseFunc // with the reason; ends the monitor
	mu        sync.Mutex
	pending   int                // calls that use conn or wait for their turn
	used      time.Time          // when conn was last used, and the server heard of us
	listen    context.CancelFunc // ends the monitor's Idle, nil while it is not listening
	locks     []*Lock
	lent      bool // to its holder, who uses conn until the function returns
	settled   bool // see settle
	queue     []*operation
	leading   bool         // somebody carries out operations
	batch     []*operation // those; the leader's
	tries     []dialect.Key
	releases  []dialect.Key
	exchanges int // so far; the leader's

	operations atomic.Int32 // in the queue and under way

	// What the locker knows of the session, guarded by its mutex.
	multiplexed bool                // takes the keys of many calls; does not change while it holds any
	room        int                 // how many keys it may hold then
	load        int                 // how many it holds or is trying for
	keys        map[lockID]struct{} // those for which another call may ask meanwhile
	empty       time.Time           // when it was found to hold nothing; zero since then it was used
	slot        bool                // has one of the locker's slots
}

func newSession(l *Locker, conn dialect.Session) *session {
	s := &session{locker: l, conn: conn, turn: make(chan struct{}, 1), keys: map[lockID]struct{}{}}
	s.ended, s.end = context.WithCancelCause(context.Background())
	s.used = time.Now()
	return s
}

// use runs call as the only user of the connection.
func (s *session) use(ctx context.Context, call func() error) error {
	s.mu.Lock()
	s.pending++
	if s.listen != nil {
		s.listen()
	}
	s.mu.Unlock()
	if err := s.takeTurn(ctx); err != nil {
		s.leave(false)
		return err
	}
	defer func() { <-s.turn }()
	if s.ended.Err() != nil {
		s.leave(false)
		return context.Cause(s.ended)
	}
	defer s.leave(true)
	return call()
}

func (s *session) takeTurn(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case s.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *session) leave(used bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending--
	if used {
		s.used = time.Now()
	}
}

func (s *session) note() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used = time.Now()
}

// useDetached is use for statements that a context must not interrupt, since
// that would cost the connection and every lock on it: when ctx ends the caller
// goes on, and the statement ends by itself within its own bound.
func (s *session) useDetached(ctx context.Context, call func(ctx context.Context) error) error {
	if !s.locker.begin() {
		return errLockerClosed
	}
	result := make(chan error, 1)
	go func() {
		defer s.locker.calls.Done()
		bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.locker.options.AnswerWithin)
		defer cancel()
		result <- s.use(bounded, func() error { return call(bounded) })
	}()
	began := time.Now()
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		return ended(ctx, time.Since(began), nil)
	}
}

// monitor listens for the end of the session whenever nobody uses it, until the
// session ends.
func (s *session) monitor() {
	pause := time.NewTimer(settle)
	defer pause.Stop()
	for {
		select {
		case <-pause.C:
		case <-s.ended.Done():
			return
		}
		select {
		case s.turn <- struct{}{}:
		case <-s.ended.Done():
			return
		}
		interrupted, err := s.listenOnce()
		switch {
		case err != nil:
			s.lose(err)
		case s.locker.expire(s):
			s.close(errIdle)
		}
		<-s.turn
		if interrupted {
			pause.Reset(settle)
		} else {
			pause.Reset(0)
		}
	}
}

// listenOnce returns when a call wants the connection, or after a sign of life.
func (s *session) listenOnce() (interrupted bool, err error) {
	s.mu.Lock()
	if s.pending > 0 || s.ended.Err() != nil || s.settled {
		s.mu.Unlock()
		return true, nil
	}
	ctx, cancel := context.WithDeadline(s.ended, s.used.Add(s.locker.options.KeepAlive))
	defer cancel()
	s.listen = cancel
	s.mu.Unlock()

	err = s.conn.Idle(ctx)

	s.mu.Lock()
	s.listen = nil
	interrupted = s.pending > 0
	s.mu.Unlock()
	if err != nil || interrupted {
		return interrupted, err
	}
	ctx, cancel = context.WithTimeout(context.Background(), s.locker.options.AnswerWithin)
	defer cancel()
	err = s.conn.Ping(ctx)
	s.note()
	return false, err
}

// lose ends the session because of an error. The caller has the turn.
func (s *session) lose(cause error) {
	if dialect.ClassOf(cause) != dblock.ErrLost {
		cause = &dialect.Error{Class: dblock.ErrLost, Err: cause}
	}
	s.close(cause)
}

// close ends the session for the reason given and everything on it: first the
// holders hear of it, then the server. The caller has the turn.
func (s *session) close(reason error) {
	s.mu.Lock()
	if s.ended.Err() != nil {
		s.mu.Unlock()
		return
	}
	s.end(reason)
	locks := s.locks
	s.locks = nil
	s.mu.Unlock()
	for _, lock := range locks {
		lock.finish(dblock.NewError("hold", s.locker.db, lock.keys, reason))
	}
	s.locker.forget(s)
	closeErr := s.conn.Close()
	for _, lock := range locks {
		lock.observeEnd(reason, closeErr)
		lock.disown()
	}
}

// add puts a lock on the session; false if the session has ended meanwhile.
func (s *session) add(lock *Lock) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended.Err() != nil {
		return false
	}
	lock.place = len(s.locks)
	s.locks = append(s.locks, lock)
	return true
}

func (s *session) remove(lock *Lock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended.Err() != nil {
		return
	}
	n := len(s.locks) - 1
	last := s.locks[n]
	s.locks[lock.place], last.place = last, lock.place
	s.locks[n] = nil
	s.locks = s.locks[:n]
}

// useBounded is use for statements that no caller's context may interrupt. Their bound
// does not include the wait for the turn, which ends since all that others do on the
// session is bounded: that many use a session is no reason to close it.
func (s *session) useBounded(call func(ctx context.Context) error) error {
	return s.use(context.Background(), func() error {
		ctx, cancel := context.WithTimeout(context.Background(), s.locker.options.AnswerWithin)
		defer cancel()
		return call(ctx)
	})
}

// alive looks whether the session has ended, in most cases without a round trip.
func (s *session) alive() error {
	return s.use(context.Background(), func() error { return s.conn.Alive(time.Now().Add(s.locker.options.AnswerWithin)) })
}

// retire closes the session as soon as nobody uses it.
func (s *session) retire(reason error) {
	_ = s.use(context.Background(), func() error { // an error says that it has ended
		s.close(reason)
		return nil
	})
}
