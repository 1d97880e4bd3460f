package pinned

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/dblock-go/dblock/dialect"
)

// server counts the connections that are open.
type server struct{ open atomic.Int32 }

func (s *server) Connect(context.Context) (driver.Conn, error) {
	s.open.Add(1)
	return conn{s}, nil
}
func (s *server) Driver() driver.Driver { return nil }

type conn struct{ server *server }

func (c conn) Close() error                        { c.server.open.Add(-1); return nil }
func (c conn) Begin() (driver.Tx, error)           { return nil, driver.ErrSkip }
func (c conn) Prepare(string) (driver.Stmt, error) { return nil, driver.ErrSkip }

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
