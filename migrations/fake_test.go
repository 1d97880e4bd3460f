package migrations

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// fakeDB keeps session locks in memory. What the guard does not use panics on a
// nil interface.
type fakeDB struct {
	dialect.DB

	mu         sync.Mutex
	owner      *fakeSession
	silenceErr error // of AllowSilence
	restoreErr error // of its restore
	sessions   []*fakeSession
	polls      []time.Time // of tries that found the guard held
	acquireErr error
	releaseErr error
	inspectErr error
}

func (f *fakeDB) Name() string                                 { return "postgres" }
func (f *fakeDB) Features() dialect.Features                   { return dialect.Features{} }
func (f *fakeDB) SQL() *sql.DB                                 { return new(sql.DB) }
func (f *fakeDB) Classify(err error) error                     { return err }
func (f *fakeDB) Migrations(dialect.Table) []dialect.Migration { return nil }

func (f *fakeDB) OnConn(context.Context, *sql.Conn) (dialect.Session, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &fakeSession{db: f, id: int64(len(f.sessions) + 1)}
	f.sessions = append(f.sessions, s)
	return s, nil
}

func (f *fakeDB) Inspect(context.Context, ...dialect.Key) ([]dialect.Holding, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.inspectErr != nil || f.owner == nil {
		return nil, f.inspectErr
	}
	return []dialect.Holding{{Session: 99, Waiting: true}, {Session: f.owner.id}}, nil
}

type fakeSession struct {
	dialect.Session
	db     *fakeDB
	id     int64
	closed bool
}

func (s *fakeSession) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	switch {
	case !r.Try:
		return nil, errors.New("the guard must never wait in the server")
	case s.db.acquireErr != nil:
		return nil, s.db.acquireErr
	case s.db.owner != nil:
		s.db.polls = append(s.db.polls, time.Now())
		return nil, &dialect.Error{Class: dialect.NotAcquired}
	}
	s.db.owner = s
	return nil, nil
}

func (s *fakeSession) Release(ctx context.Context, _ []dialect.Key) error {
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	if err := errors.Join(ctx.Err(), s.db.releaseErr); err != nil {
		return err
	}
	s.db.owner = nil
	return nil
}

func (s *fakeSession) AllowSilence(context.Context) (func(context.Context) error, error) {
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	return func(context.Context) error { return s.db.restoreErr }, s.db.silenceErr
}

func (s *fakeSession) Close() error {
	s.closed = true
	return nil
}

// recorder is an Observer.
type recorder struct {
	mu     sync.Mutex
	events []dblock.Event
	times  []time.Time
}

func (r *recorder) Observe(_ context.Context, e dblock.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
	r.times = append(r.times, time.Now())
}

func (r *recorder) kinds() (kinds []dblock.EventKind) {
	for _, e := range r.events {
		kinds = append(kinds, e.Kind)
	}
	return kinds
}
