package advisory

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

const (
	// maxIdle sessions are kept open for the next call, for idleTime at most: a
	// new connection costs as much as many calls.
	maxIdle  = 4
	idleTime = 10 * time.Second
	// connectWithin bounds the making of a connection that no single call owns.
	connectWithin = 30 * time.Second
	// firstRoom is what the first multiplexed session may hold although the server
	// has little room left.
	firstRoom = 64
	// growPause follows an attempt to open one more session that failed.
	growPause = time.Second
)

type idleSession struct {
	*session
	since time.Time
}

// opening is a multiplexed session on its way.
type opening struct {
	done chan struct{}
	err  error
}

// errIdle is why a session was closed that nobody needed.
var errIdle = errors.New("unused")

// draw gives an acquire a session of its own; reused, if it may have died unnoticed.
type draw func(ctx context.Context) (s *session, reused bool, err error)

// session draws an idle session, a multiplexed one that holds nothing, or opens one.
func (l *Locker) session(ctx context.Context) (s *session, reused bool, err error) {
	if ctx.Err() != nil {
		return nil, false, context.Cause(ctx)
	}
	l.mu.Lock()
	s = l.unused()
	l.mu.Unlock()
	if s != nil {
		return s, true, nil
	}
	s, err = l.open(ctx, dialect.SessionOptions{KeepAlive: l.options.KeepAlive, AnswerWithin: l.options.AnswerWithin})
	return s, false, err
}

// unused takes out a session that holds nothing. The last one of those for many calls
// stays: there may be no connection for another one while those who wait have all the
// others. The caller has l.mu.
func (l *Locker) unused() *session {
	if n := len(l.idle); n > 0 {
		s := l.idle[n-1].session
		l.idle = l.idle[:n-1]
		return s
	}
	for i, s := range l.multiplexed {
		if s.load == 0 && len(l.multiplexed) > 1 {
			l.multiplexed = slices.Delete(l.multiplexed, i, i+1)
			s.multiplexed = false
			return s
		}
	}
	return nil
}

func (l *Locker) open(ctx context.Context, o dialect.SessionOptions) (*session, error) {
	o.Application = l.options.Application
	conn, err := l.db.OpenSession(ctx, o)
	if err != nil {
		return nil, err
	}
	s := newSession(l, conn)
	s.lendable = o.StatementGap > 0
	l.mu.Lock()
	l.sessions[s] = struct{}{}
	l.mu.Unlock()
	l.monitors.Go(s.monitor)
	return s, nil
}

// place finds a multiplexed session with room for the keys and reserves it; vacate
// undoes that. No session holds a key twice: of a key that it holds once it is
// certain what a statement that failed did.
func (l *Locker) place(c *call) (s *session, reused bool, err error) {
	reused = true
	for {
		l.mu.Lock()
		if s := l.leastBusy(c.locked); s != nil {
			s.reserve(c)
			l.mu.Unlock()
			return s, reused, nil
		}
		o := l.grow()
		l.mu.Unlock()
		wait := c.waitContext()
		select {
		case <-o.done:
			if o.err != nil {
				return nil, false, o.err
			}
			reused = false
		case <-wait.Done():
			return nil, false, context.Cause(wait)
		}
	}
}

// leastBusy is nil if no session has room. It sees to it that there will be more
// sessions if all are busy whose statements can be under way at a time. Those that hold
// few keys come first, for they are quickest. The caller has l.mu.
func (l *Locker) leastBusy(keys []dialect.Key) *session {
	const much = 64 // fewer keys make no difference
	fewest, operations := math.MaxInt, int32(0)
	for _, s := range l.multiplexed {
		operations += s.operations.Load()
		if s.admits(keys) {
			fewest = min(fewest, s.load/much)
		}
	}
	var best *session
	depth, candidates := l.depth(int(operations)), 0
	for _, s := range l.multiplexed {
		if !s.admits(keys) || s.load/much > fewest {
			continue
		}
		if best == nil || s.operations.Load() < best.operations.Load() {
			best = s
		}
		if candidates++; candidates == depth {
			break
		}
	}
	if best != nil && best.operations.Load() > 0 && candidates < depth && len(l.multiplexed) < depth && time.Now().After(l.growAfter) {
		l.grow()
	}
	return best
}

// depth is how many statements should be under way at a time. Each of a few goroutines
// has one of its own. With many, an operation that has just missed a statement waits
// for the next; where the server is near, fewer statements with more operations each
// save more than that costs.
func (l *Locker) depth(operations int) int {
	const few, apart, deepest = 4, 250 * time.Microsecond, 16
	depth := int(min(max(time.Duration(l.quickest.Load())/apart, 1), deepest))
	if operations <= few {
		return max(depth, few)
	}
	return depth
}

// timed notes how long an exchange took; the quickest is the round trip.
func (l *Locker) timed(d time.Duration) {
	for {
		quickest := l.quickest.Load()
		if quickest != 0 && int64(d) >= quickest || l.quickest.CompareAndSwap(quickest, int64(d)) {
			return
		}
	}
}

// grow makes one more session multiplexed: an idle one, or a new one. The connection
// belongs to no call, and stays for the next one if this call ends before it is
// made. The caller has l.mu.
func (l *Locker) grow() *opening {
	if l.opening != nil {
		return l.opening
	}
	o := &opening{done: make(chan struct{})}
	l.opening = o
	first := len(l.multiplexed) == 0
	var s *session
	if n := len(l.idle); n > 0 {
		s = l.idle[n-1].session
		l.idle = l.idle[:n-1]
	}
	l.calls.Go(func() {
		ctx, cancel := context.WithTimeout(l.closing, connectWithin)
		defer cancel()
		s, err := l.makeRoom(ctx, s, first)
		l.mu.Lock()
		defer l.mu.Unlock()
		if err == nil {
			s.multiplexed, s.empty = true, time.Time{}
			l.multiplexed = append(l.multiplexed, s)
		} else {
			l.growAfter = time.Now().Add(growPause)
		}
		o.err, l.opening = err, nil
		close(o.done)
	})
	return o
}

// makeRoom opens the session if there is none yet, and asks how much it may hold.
func (l *Locker) makeRoom(ctx context.Context, s *session, first bool) (*session, error) {
	for {
		reused := s != nil
		if !reused {
			var err error
			if s, err = l.open(ctx, dialect.SessionOptions{KeepAlive: l.options.KeepAlive, AnswerWithin: l.options.AnswerWithin}); err != nil {
				return nil, err
			}
		}
		err := s.use(ctx, func() (err error) {
			if s.room, err = s.conn.Room(ctx); err != nil && dialect.ClassOf(err) != dblock.ErrCapacity {
				s.close(err)
			}
			return err
		})
		switch {
		case err == nil:
			return s, nil
		case reused && dialect.ClassOf(err) == dblock.ErrLost && ctx.Err() == nil:
			s = nil
			continue
		case first && dialect.ClassOf(err) == dblock.ErrCapacity:
			s.room = firstRoom
			return s, nil
		}
		s.retire(err)
		return nil, err
	}
}

// reserve counts the keys. Of a key that is held, only a shared one, or a wait on behalf of
// all, can be asked for by a second call. The caller has l.mu.
func (s *session) reserve(c *call) {
	s.load += len(c.locked)
	s.empty = time.Time{}
	for _, k := range c.locked {
		if k.Mode == dblock.Shared || c.forAll {
			s.keys[s.locker.queues.lockOf(k)] = struct{}{}
		}
	}
}

// admits reports whether the session has room for the keys and holds none of them. One
// call for more keys than there is room for gets a session that is empty. The caller has
// l.mu.
func (s *session) admits(keys []dialect.Key) bool {
	if s.load > 0 && s.load+len(keys) > s.room {
		return false
	}
	return len(s.keys) == 0 || !slices.ContainsFunc(keys, func(k dialect.Key) bool {
		_, holds := s.keys[s.locker.queues.lockOf(k)]
		return holds
	})
}

// vacate says that the session does not hold the keys any more.
func (l *Locker) vacate(s *session, keys []dialect.Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.load -= len(keys)
	for _, k := range keys {
		if len(s.keys) > 0 {
			delete(s.keys, s.locker.queues.lockOf(k))
		}
	}
}

// recycle keeps a session that is known to hold nothing for the next call, if it
// lives and nobody else's statements changed it.
func (l *Locker) recycle(s *session) {
	l.mu.Lock()
	l.leaveSlot(s)
	if s.ended.Err() == nil && !s.lendable && len(l.idle) < maxIdle {
		l.idle = append(l.idle, idleSession{s, time.Now()})
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	s.retire(errIdle)
}

// expire takes the session out if it has been found unused for long.
func (l *Locker) expire(s *session) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, idle := range l.idle {
		if idle.session == s && time.Since(idle.since) >= idleTime {
			l.idle = slices.Delete(l.idle, i, i+1)
			return true
		}
	}
	for i, m := range l.multiplexed {
		if m != s || s.load > 0 {
			continue
		}
		if s.empty.IsZero() {
			s.empty = time.Now()
		}
		if time.Since(s.empty) >= idleTime {
			l.multiplexed = slices.Delete(l.multiplexed, i, i+1)
			return true
		}
	}
	return false
}

// forget drops a session that has ended.
func (l *Locker) forget(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leaveSlot(s)
	delete(l.sessions, s)
	l.idle = slices.DeleteFunc(l.idle, func(i idleSession) bool { return i.session == s })
	l.multiplexed = slices.DeleteFunc(l.multiplexed, func(m *session) bool { return m == s })
}

// leaveSlot frees the session's place among those that wait. The caller has l.mu.
func (l *Locker) leaveSlot(s *session) {
	if s.slot {
		s.slot = false
		<-l.slots
	}
}
