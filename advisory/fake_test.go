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

	"github.com/dblock-go/dblock/dialect"
)

// fakeServer is a database in memory whose faults a test can choose, for what a
// real server does too rarely or too slowly. It locks keys first come, first
// served.
type fakeServer struct {
	dialect.DB // panics on what these tests do not use

	hears    bool
	openErr  error
	slowPing atomic.Int64             // nanoseconds that the answer takes
	cutOff   atomic.Bool              // no answer at all
	acquired func(*fakeSession) error // runs after a grant; its error is returned although the keys are held

	mu       sync.Mutex
	changed  *sync.Cond
	opened   int
	sessions map[*fakeSession]struct{}
	holders  map[int64]*fakeSession
	tokens   map[int64]int64
}

func newFakeServer() *fakeServer {
	f := &fakeServer{sessions: map[*fakeSession]struct{}{}, holders: map[int64]*fakeSession{}, tokens: map[int64]int64{}}
	f.changed = sync.NewCond(&f.mu)
	return f
}

func (f *fakeServer) Name() string { return "fake" }
func (f *fakeServer) Features() dialect.Features {
	return dialect.Features{Shared: true, HearsLoss: f.hears}
}

func (f *fakeServer) OpenSession(ctx context.Context, o dialect.SessionOptions) (dialect.Session, error) {
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
func (f *fakeServer) open() int { f.mu.Lock(); defer f.mu.Unlock(); return len(f.sessions) }
func (f *fakeServer) held() int { f.mu.Lock(); defer f.mu.Unlock(); return len(f.holders) }

// kill ends all sessions, as an administrator or a restart would.
func (f *fakeServer) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := range f.sessions {
		f.drop(s)
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

func (s *fakeSession) alive() error {
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
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { f.mu.Lock(); defer f.mu.Unlock(); f.changed.Broadcast() })
	defer stop()
	var tokens []int64
	for _, k := range r.Keys {
		for f.holders[k.ID] != nil && s.alive() == nil && ctx.Err() == nil {
			if r.Try {
				for id, holder := range f.holders {
					if holder == s && slices.ContainsFunc(r.Keys, func(k dialect.Key) bool { return k.ID == id }) {
						delete(f.holders, id)
					}
				}
				return nil, &dialect.Error{Class: dialect.NotAcquired}
			}
			f.changed.Wait()
		}
		if err := s.alive(); err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		f.holders[k.ID] = s
		f.tokens[k.ID]++
		tokens = append(tokens, f.tokens[k.ID])
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
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := s.alive(); err != nil {
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

func (s *fakeSession) Held(_ context.Context, keys []dialect.Key) (bool, error) {
	defer s.alone()()
	f := s.server
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range keys {
		if f.holders[k.ID] != s {
			return false, s.alive()
		}
	}
	return true, s.alive()
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
	return s.alive()
}

func (s *fakeSession) Close() error {
	defer s.alone()()
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	s.server.drop(s)
	return nil
}
