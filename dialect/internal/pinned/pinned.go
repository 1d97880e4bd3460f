// Package pinned takes connections out of a database/sql pool for good, so that
// a session that holds locks can never serve anybody else's queries.
package pinned

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// Pool is where pinned connections come from.
type Pool struct {
	db   *sql.DB
	mu   sync.Mutex
	used int
}

// NewPool draws connections from db.
func NewPool(db *sql.DB) *Pool { return &Pool{db: db} }

// Conn is a connection that its session alone uses. It is destroyed in the end,
// never given back.
type Conn struct {
	*sql.Conn
	pool *Pool
	once sync.Once
}

// Take checks a connection out. A pool with a limit keeps at least one for the
// application's queries: locks that used up the pool would wait for ever for
// the very code that they guard. The error is then of class Capacity, as it is if
// no connection becomes free in time.
func (p *Pool) Take(ctx context.Context) (*Conn, error) {
	if err := p.reserve(); err != nil {
		return nil, err
	}
	limit, bounded := p.db.Stats().MaxOpenConnections, ctx
	if limit > 0 {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, takeWithin)
		defer cancel()
	}
	conn, err := p.db.Conn(bounded)
	if err != nil {
		p.unreserve()
		if bounded.Err() != nil && ctx.Err() == nil {
			err = &dialect.Error{Class: dialect.Capacity, Err: err, Hint: fmt.Sprintf(
				"none of the pool's %d connections became free within %v: %s", limit, takeWithin, wayOut)}
		}
		return nil, err
	}
	return &Conn{Conn: conn, pool: p}, nil
}

// TakeFree is Take for who has a connection of the pool in use, perhaps like all others
// who do: where none is free it does not wait for theirs.
func (p *Pool) TakeFree(ctx context.Context) (*Conn, error) {
	if s := p.db.Stats(); s.MaxOpenConnections > 0 && s.InUse >= s.MaxOpenConnections {
		return nil, &dialect.Error{Class: dialect.Capacity, Hint: fmt.Sprintf(
			"this needs one connection more, to keep, and all of the pool's %d are in use: %s", s.MaxOpenConnections, wayOut)}
	}
	return p.Take(ctx)
}

const (
	// takeWithin bounds the wait for a connection that the application may be using
	// to wait for the very lock.
	takeWithin = 10 * time.Second
	wayOut     = "raise SetMaxOpenConns, or open the database by DSN so that locks have connections of their own"
)

func (p *Pool) reserve() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if limit := p.db.Stats().MaxOpenConnections; limit > 0 && p.used >= limit-1 {
		return &dialect.Error{Class: dialect.Capacity, Hint: fmt.Sprintf(
			"locks use %d of the pool's %d connections and must leave one for queries: %s", p.used, limit, wayOut)}
	}
	p.used++
	return nil
}

func (p *Pool) unreserve() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used--
}

// Destroy closes the connection to the server. Safe to call again, and after
// database/sql found out by itself that the connection is dead.
func (c *Conn) Destroy() (err error) {
	c.once.Do(func() {
		c.pool.unreserve()
		err = Destroy(c.Conn)
	})
	return err
}

const (
	// destroyWithin bounds the wait for a statement that is under way.
	destroyWithin = 5 * time.Second
	// forgetWithin bounds the wait for database/sql to forget the connection, which
	// takes it no time unless a transaction is open there.
	forgetWithin = 100 * time.Millisecond
)

// Destroy closes a checked-out connection instead of giving it back to its pool;
// database/sql does so when told that the connection is bad. But it waits for a
// transaction on it to end, and that may wait for Destroy: so the connection is
// closed under it first, and its place in the pool becomes free when the
// transaction's owner ends it.
//
// What the driver says of closing is no news: the connection may be broken, and
// database/sql will close it once more. An error of class Lost means that a
// statement was under way on the connection and did not end in time; the
// connection is closed as soon as it does.
func Destroy(conn *sql.Conn) error { return destroy(conn, destroyWithin) }

func destroy(conn *sql.Conn, within time.Duration) error {
	closed, forgotten := make(chan struct{}), make(chan error, 1)
	go func() {
		forgotten <- conn.Raw(func(c any) error {
			defer close(closed)
			if c, ok := c.(driver.Conn); ok {
				_ = c.Close()
			}
			return driver.ErrBadConn
		})
	}()
	bound := time.NewTimer(within)
	defer bound.Stop()
	select {
	case <-closed:
		bound.Reset(forgetWithin)
	case err := <-forgotten:
		return destroyed(err)
	case <-bound.C:
		return &dialect.Error{Class: dialect.Lost,
			Err: fmt.Errorf("a statement that is under way has kept the connection from being closed for %v", within)}
	}
	select {
	case err := <-forgotten:
		return destroyed(err)
	case <-bound.C:
		return nil
	}
}

func destroyed(err error) error {
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) {
		return nil
	}
	return err
}
