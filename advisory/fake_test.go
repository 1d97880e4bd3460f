package advisory_test

import (
	"context"
	"database/sql"
	"errors"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// fakeServer is a database in memory whose faults a test can choose, for what a
// real server does too rarely or too slowly. It locks keys first come, first
// served.
type fakeServer struct {
	dialect.DB // panics on what these tests do not use

	hears    bool
	openErr  error
	slowOpen time.Duration
	delay    time.Duration            // round trip
	slowEnd  time.Duration            // of each session
	slowPing atomic.Int64             // nanoseconds that the answer takes
	cutOff   atomic.Bool              // no answer at all
	acquired func(*fakeSession) error // runs after a grant; its error is returned although the keys are held

	checked sync.Once // for sessions left open

	mu                   sync.Mutex
	changed              *sync.Cond
	opened               int
	exchanges            int
	room                 int          // of each session; 0: 500
	full                 bool         // there is no room for more sessions that hold keys
	waiting, mostWaiting int          // sessions
	exchange             func() error // runs after an exchange; its error is returned although it was done
	sessions             map[*fakeSession]struct{}
	holders              map[int64]*fakeSession
	lines                map[int64][]*fakeSession // waiting, in their order
	tokens               map[int64]int64
}

func newFakeServer() *fakeServer {
	f := &fakeServer{sessions: map[*fakeSession]struct{}{}, holders: map[int64]*fakeSession{}, lines: map[int64][]*fakeSession{}, tokens: map[int64]int64{}}
	f.changed = sync.NewCond(&f.mu)
	return f
}

func (f *fakeServer) Name() string { return "fake" }
func (f *fakeServer) Features() dialect.Features {
	return dialect.Features{Shared: true, HearsLoss: f.hears}
}

func (f *fakeServer) OpenSession(ctx context.Context, o dialect.SessionOptions) (dialect.Session, error) {
	select {
	case <-time.After(f.slowOpen):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.openErr != nil {
		return nil, f.openErr
	}
	f.opened++
	s := &fakeSession{server: f, id: int64(f.opened), dead: make(chan struct{})}
	f.sessions[s] = struct{}{}
	return s, nil
}

func (f *fakeServer) Natives() (conn, tx reflect.Type) {
	return reflect.TypeFor[*fakeSession](), reflect.TypeFor[*sql.Tx]()
}

func (f *fakeServer) Classify(err error) error {
	if errors.Is(err, context.Canceled) {
		return &dialect.Error{Class: dialect.Canceled, Err: err}
	}
	return err
}

func (f *fakeServer) OnConn(context.Context, *sql.Conn) (dialect.Session, error) {
	return nil, errors.New("not in this fake")
}

func (f *fakeServer) Inspect(_ context.Context, keys ...dialect.Key) ([]dialect.Holding, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var found []dialect.Holding
	for _, k := range keys {
		if s := f.holders[k.ID]; s != nil {
			found = append(found, dialect.Holding{ID: k.ID, Session: s.id, Application: "fake"})
		}
	}
	return found, nil
}

// open and held are what an administrator would see.
func (f *fakeServer) open() int        { f.mu.Lock(); defer f.mu.Unlock(); return len(f.sessions) }
func (f *fakeServer) opens() int       { f.mu.Lock(); defer f.mu.Unlock(); return f.opened }
func (f *fakeServer) waiters() int     { f.mu.Lock(); defer f.mu.Unlock(); return f.waiting }
func (f *fakeServer) mostWaiters() int { f.mu.Lock(); defer f.mu.Unlock(); return f.mostWaiting }
func (f *fakeServer) holds(k dblock.Key) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.holders[k.ID()] != nil
}
func (f *fakeServer) held() int { f.mu.Lock(); defer f.mu.Unlock(); return len(f.holders) }

// kill ends all sessions, as an administrator or a restart would.
func (f *fakeServer) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := range f.sessions {
		f.drop(s)
	}
}

// killHolder ends the session that holds a key.
func (f *fakeServer) killHolder(id int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop(f.holders[id])
}

// killWaiter ends the first session that waits for a key.
func (f *fakeServer) killWaiter(id int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.lines[id] {
		if f.holders[id] != s {
			f.drop(s)
			return
		}
	}
}

func (f *fakeServer) drop(s *fakeSession) {
	if _, ok := f.sessions[s]; !ok {
		return
	}
	delete(f.sessions, s)
	close(s.dead)
	for id, holder := range f.holders {
		if holder == s {
			delete(f.holders, id)
		}
	}
	f.changed.Broadcast()
}

// steal takes a key away from a live session, as no server should.
func (f *fakeServer) steal(id int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.holders, id)
}

type fakeSession struct {
	server *fakeServer
	id     int64
	dead   chan struct{}
	busy   sync.Mutex // detects two users of one connection
}

var errGone = &dialect.Error{Class: dialect.Lost, Code: "57P01", Err: errors.New("terminated by an administrator")}

func (s *fakeSession) AllowSilence(context.Context) (func(context.Context) error, error) {
	return nil, errors.New("not in this fake")
}

func (s *fakeSession) Statements() dialect.Statements { return fakeStatements{s} }

func (s *fakeSession) Begin(context.Context, *sql.TxOptions) (dialect.OwnedTx, error) {
	return nil, errors.New("not in this fake")
}

func (s *fakeSession) EndStatements(ctx context.Context) error { return s.Ping(ctx) }

// fakeStatements is its session's only user.
type fakeStatements struct{ *fakeSession }

func (c fakeStatements) Native() any { return c.fakeSession }

func (c fakeStatements) ExecContext(ctx context.Context, _ string, _ ...any) (sql.Result, error) {
	return nil, c.Ping(ctx)
}

func (s *fakeSession) alone() func() {
	if !s.busy.TryLock() {
		panic("two calls at once on one session")
	}
	return s.busy.Unlock
}

func (s *fakeSession) isAlive() error {
	select {
	case <-s.dead:
		return errGone
	default:
		return nil
	}
}

func (s *fakeSession) ID() int64 { return s.id }

func (s *fakeSession) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	defer s.alone()()
	time.Sleep(s.server.delay)
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { f.mu.Lock(); defer f.mu.Unlock(); f.changed.Broadcast() })
	defer stop()
	var tokens []int64
	for _, k := range r.Keys {
		f.lines[k.ID] = append(f.lines[k.ID], s)
		defer func() {
			f.lines[k.ID] = slices.DeleteFunc(f.lines[k.ID], func(waiter *fakeSession) bool { return waiter == s })
			f.changed.Broadcast()
		}()
		for f.holders[k.ID] != s && (f.holders[k.ID] != nil || f.lines[k.ID][0] != s) && s.isAlive() == nil && ctx.Err() == nil {
			if r.Try {
				for id, holder := range f.holders {
					if holder == s && slices.ContainsFunc(r.Keys, func(k dialect.Key) bool { return k.ID == id }) {
						delete(f.holders, id)
					}
				}
				return nil, &dialect.Error{Class: dialect.NotAcquired}
			}
			f.waiting++
			f.mostWaiting = max(f.mostWaiting, f.waiting)
			f.changed.Wait()
			f.waiting--
		}
		if err := s.isAlive(); err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		f.holders[k.ID] = s
		tokens = append(tokens, f.tokens[k.ID]+1)
		f.tokens[k.ID] += dialect.FenceStride
	}
	if f.acquired != nil {
		if err := f.acquired(s); err != nil {
			return nil, err
		}
	}
	if r.Fence == nil {
		return nil, nil
	}
	return tokens, nil
}

func (s *fakeSession) Release(ctx context.Context, keys []dialect.Key) error {
	defer s.alone()()
	time.Sleep(s.server.delay)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := s.isAlive(); err != nil {
		return err
	}
	for _, k := range keys {
		if f.holders[k.ID] != s {
			return &dialect.Error{Class: dialect.NotHeld}
		}
		delete(f.holders, k.ID)
	}
	f.changed.Broadcast()
	return nil
}

func (s *fakeSession) Held(_ context.Context, keys []dialect.Key) ([]bool, error) {
	defer s.alone()()
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	held := make([]bool, len(keys))
	for i, k := range keys {
		held[i] = f.holders[k.ID] == s
	}
	return held, s.isAlive()
}

func (s *fakeSession) Exchange(_ time.Time, tries, releases []dialect.Key) (granted, released []bool, err error) {
	defer s.alone()()
	time.Sleep(s.server.delay)
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := s.isAlive(); err != nil {
		return nil, nil, err
	}
	f.exchanges++
	for _, k := range tries {
		free := f.holders[k.ID] == nil || f.holders[k.ID] == s // as the servers do
		if free {
			f.holders[k.ID] = s
			f.tokens[k.ID]++
		}
		granted = append(granted, free)
	}
	for _, k := range releases {
		held := f.holders[k.ID] == s
		if held {
			delete(f.holders, k.ID)
		}
		released = append(released, held)
	}
	f.changed.Broadcast()
	if f.exchange != nil {
		if err := f.exchange(); err != nil {
			return nil, nil, err
		}
	}
	if f.acquired != nil && len(tries) > 0 {
		if err := f.acquired(s); err != nil {
			return nil, nil, err
		}
	}
	return granted, released, nil
}

func (s *fakeSession) Alive(time.Time) error { return s.isAlive() }

func (s *fakeSession) Renew(ctx context.Context, key dialect.Key) error {
	keys := []dialect.Key{key}
	if err := s.Release(ctx, keys); err != nil {
		return err
	}
	_, err := s.Acquire(ctx, dialect.Request{Keys: keys})
	return err
}

func (s *fakeSession) Room(context.Context) (int, error) {
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.full:
		return 0, &dialect.Error{Class: dialect.Capacity}
	case f.room == 0:
		return 500, nil
	}
	return f.room, nil
}

func (s *fakeSession) Idle(ctx context.Context) error {
	defer s.alone()()
	if !s.server.hears {
		<-ctx.Done()
		return nil
	}
	select {
	case <-s.dead:
		return errGone
	case <-ctx.Done():
		return nil
	}
}

func (s *fakeSession) Ping(ctx context.Context) error {
	defer s.alone()()
	if s.server.cutOff.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(time.Duration(s.server.slowPing.Load()))
	return s.isAlive()
}

func (s *fakeSession) Close() error {
	defer s.alone()()
	time.Sleep(s.server.slowEnd)
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.server.drop(s)
	return nil
}
