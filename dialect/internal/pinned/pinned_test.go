package pinned

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// server counts the connections that are open.
type server struct{ open atomic.Int32 }

func (s *server) Connect(context.Context) (driver.Conn, error) {
	s.open.Add(1)
	return &conn{server: s}, nil
}
func (s *server) Driver() driver.Driver { return nil }

type conn struct {
	server *server
	once   sync.Once
}

func (c *conn) Close() error {
	c.once.Do(func() { c.server.open.Add(-1) })
	return nil
}
func (c *conn) Begin() (driver.Tx, error)           { return transaction{}, nil }
func (c *conn) Prepare(string) (driver.Stmt, error) { return nil, driver.ErrSkip }

type transaction struct{}

func (transaction) Commit() error   { return driver.ErrBadConn }
func (transaction) Rollback() error { return driver.ErrBadConn }

func newPool(t *testing.T, limit int) (*server, *Pool) {
	s := &server{}
	db := sql.OpenDB(s)
	db.SetMaxOpenConns(limit)
	t.Cleanup(func() { db.Close() })
	return s, NewPool(db)
}

func TestOneConnectionIsLeftForQueries(t *testing.T) {
	s, pool := newPool(t, 3)
	for range 3 { // what is destroyed can be taken again
		a, err := pool.Take(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		b, err := pool.Take(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Take(t.Context()); !errors.Is(err, dialect.Capacity) {
			t.Errorf("the last connection: %v", err)
		}
		for _, c := range []*Conn{a, b, a} {
			if err := c.Destroy(); err != nil {
				t.Error(err)
			}
		}
		if n := s.open.Load(); n != 0 {
			t.Errorf("%d connections open after all were destroyed", n)
		}
	}
}

func TestABusyPoolIsNotWaitedForWithoutEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, pool := newPool(t, 2)
		for range 2 { // queries of the application
			c, err := pool.db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		if _, err := pool.Take(t.Context()); !errors.Is(err, dialect.Capacity) {
			t.Errorf("%v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := pool.Take(ctx); !errors.Is(err, context.Canceled) || errors.Is(err, dialect.Capacity) {
			t.Errorf("with a context that has ended: %v", err)
		}
		if pool.used != 0 {
			t.Errorf("%d counted as taken", pool.used)
		}
	})
}

// Mutexes of database/sql are waited for here, during which the time of synctest
// would stand still.

func TestATransactionDoesNotKeepItsConnectionOpen(t *testing.T) {
	s, pool := newPool(t, 2)
	c, err := pool.Take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	tx, err := c.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Destroy(); err != nil {
		t.Error(err)
	}
	if n := s.open.Load(); n != 0 {
		t.Errorf("%d connections open", n)
	}
	if err := tx.Rollback(); !errors.Is(err, driver.ErrBadConn) {
		t.Errorf("rollback: %v", err)
	}
	next, err := pool.db.Conn(t.Context()) // the place in the pool is free again
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if err := c.Destroy(); err != nil || s.open.Load() != 1 {
		t.Errorf("destroyed again: %v, %d connections open", err, s.open.Load())
	}
}

func TestAStatementUnderWayIsNotWaitedForWithoutEnd(t *testing.T) {
	s, pool := newPool(t, 2)
	c, err := pool.Take(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	started, end, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() { ended <- c.Raw(func(any) error { close(started); <-end; return nil }) }()
	<-started
	if err := destroy(c.Conn, time.Millisecond); !errors.Is(err, dialect.Lost) {
		t.Errorf("during a statement: %v", err)
	}
	close(end)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for s.open.Load() != 0 {
		time.Sleep(time.Millisecond)
	}
}
