package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// fakeDB is a database of one lock table in memory.
type fakeDB struct {
	dialect.DB
	mu       sync.Mutex
	holders  map[int64]*fakeSession
	found    dialect.Snapshot
	asked    dialect.SnapshotRequest
	failures int // of snapshots
	health   []dialect.Finding
	opened   dialect.SessionOptions
	lost     chan error // ends every idle session
}

func newFakeDB() *fakeDB {
	return &fakeDB{holders: map[int64]*fakeSession{}, lost: make(chan error, 1)}
}

func (*fakeDB) Name() string               { return "fake" }
func (*fakeDB) Features() dialect.Features { return dialect.Features{HearsLoss: true} }
func (*fakeDB) Classify(err error) error   { return err }
func (*fakeDB) Close() error               { return nil }
func (d *fakeDB) held(key dblock.Key) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.holders[key.ID()] != nil
}
func (d *fakeDB) hold(key dblock.Key) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.holders[key.ID()] = &fakeSession{db: d}
}

func (d *fakeDB) Inspect(context.Context, ...dialect.Key) ([]dialect.Holding, error) {
	return nil, nil
}

func (d *fakeDB) Snapshot(_ context.Context, r dialect.SnapshotRequest) (*dialect.Snapshot, error) {
	if d.failures > 0 {
		d.failures--
		return nil, &dialect.Error{Class: dialect.Lost}
	}
	d.asked = r
	found := d.found
	return &found, nil
}

func (d *fakeDB) Diagnose(context.Context) ([]dialect.Finding, error) { return d.health, nil }

func (d *fakeDB) OpenSession(_ context.Context, o dialect.SessionOptions) (dialect.Session, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opened = o
	return &fakeSession{db: d}, nil
}

type fakeSession struct {
	dialect.Session // panics on what these tests do not use

	db *fakeDB
}

func (s *fakeSession) ID() int64 { return 1 }

func (s *fakeSession) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	for {
		s.db.mu.Lock()
		busy := false
		for _, k := range r.Keys {
			busy = busy || s.db.holders[k.ID] != nil
		}
		if !busy {
			tokens := make([]int64, len(r.Keys))
			for i, k := range r.Keys {
				s.db.holders[k.ID] = s
				tokens[i] = 41 + int64(i)
			}
			s.db.mu.Unlock()
			return tokens, nil
		}
		s.db.mu.Unlock()
		if r.Try {
			return nil, &dialect.Error{Class: dialect.NotAcquired}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

func (s *fakeSession) Release(_ context.Context, keys []dialect.Key) error {
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	for _, k := range keys {
		if s.db.holders[k.ID] != s {
			return &dialect.Error{Class: dialect.NotHeld}
		}
		delete(s.db.holders, k.ID)
	}
	return nil
}

func (s *fakeSession) Renew(ctx context.Context, key dialect.Key) error {
	keys := []dialect.Key{key}
	if err := s.Release(ctx, keys); err != nil {
		return err
	}
	_, err := s.Acquire(ctx, dialect.Request{Keys: keys})
	return err
}

func (s *fakeSession) Exchange(_ time.Time, tries, releases []dialect.Key) (granted, released []bool, err error) {
	ctx := context.Background()
	for _, k := range tries {
		_, err := s.Acquire(ctx, dialect.Request{Keys: []dialect.Key{k}, Try: true})
		granted = append(granted, err == nil)
	}
	for _, k := range releases {
		released = append(released, s.Release(ctx, []dialect.Key{k}) == nil)
	}
	return granted, released, nil
}

func (s *fakeSession) Held(_ context.Context, keys []dialect.Key) ([]bool, error) {
	return slices.Repeat([]bool{true}, len(keys)), nil
}

func (s *fakeSession) Room(context.Context) (int, error) { return 100, nil }
func (s *fakeSession) Alive(time.Time) error             { return nil }
func (s *fakeSession) Ping(context.Context) error        { return nil }

func (s *fakeSession) Idle(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-s.db.lost:
		return err
	}
}

func (s *fakeSession) Close() error {
	s.db.mu.Lock()
	defer s.db.mu.Unlock()
	for id, holder := range s.db.holders {
		if holder == s {
			delete(s.db.holders, id)
		}
	}
	return nil
}

// terminal is an app with its output kept.
type terminal struct {
	app
	out, err output
}

func newTerminal(db dblock.DB, env ...string) *terminal {
	t := &terminal{}
	if db != nil {
		env = append(env, "PATH="+os.Getenv("PATH"), "DBLOCK_DSN=fake://")
	}
	t.app = app{stdin: strings.NewReader(""), stdout: &t.out, stderr: &t.err, env: env}
	t.open = func(ctx context.Context, dsn string, _ bool) (dblock.DB, error) {
		if db == nil {
			return nil, errors.New("no database may be opened")
		}
		return db, nil
	}
	return t
}

// run runs one command line on the database and expects the exit code.
func run(t *testing.T, db dblock.DB, code int, args ...string) *terminal {
	t.Helper()
	term := newTerminal(db)
	if got := term.main(t.Context(), args); got != code {
		t.Errorf("dblock %s: exit code %d, want %d; stderr: %s", strings.Join(args, " "), got, code, &term.err)
	}
	if code == 0 && strings.HasPrefix(term.err.String(), "dblock: ") {
		t.Errorf("dblock %s: on stderr: %s", strings.Join(args, " "), &term.err)
	}
	if lines := strings.Count(term.err.String(), "\n"); lines > 1 {
		t.Errorf("dblock %s: %d lines on stderr: %s", strings.Join(args, " "), lines, &term.err)
	}
	return term
}

// output is written by the command, too.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}
func (o *output) String() string { o.mu.Lock(); defer o.mu.Unlock(); return o.text.String() }
func (o *output) Len() int       { return len(o.String()) }

type writerFunc func(p []byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}
