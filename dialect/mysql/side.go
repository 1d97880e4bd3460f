package mysql

import (
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// side gives out second connections, for what must be done beside a transaction
// or session: creating rows, killing abandoned waits.
//
// The transactions that need one may themselves have all connections that the
// pool allows, and would wait for each other. So of a pool with a limit, side
// keeps one connection for all of them to take turns with.
type side struct {
	pool   *sql.DB
	pinned *pinned.Pool
	turn   chan struct{} // holds one element while somebody uses kept
	kept   *pinned.Conn
	keeps  atomic.Bool
}

func newSide(pool *sql.DB, p *pinned.Pool) *side {
	return &side{pool: pool, pinned: p, turn: make(chan struct{}, 1)}
}

// sideWithin bounds the wait for a second connection.
const sideWithin = 5 * time.Second

// take is followed by done, which keeps a good connection.
func (s *side) take(ctx context.Context) (conn *sql.Conn, done func(), err error) {
	limit := s.pool.Stats().MaxOpenConnections
	if limit == 0 {
		return s.ofPool(ctx)
	}
	bounded, cancel := context.WithTimeout(ctx, sideWithin)
	defer cancel()
	select {
	case s.turn <- struct{}{}:
	case <-bounded.Done():
		return nil, nil, busy(ctx, bounded.Err(), limit)
	}
	if err := s.keep(bounded); err != nil {
		<-s.turn
		return nil, nil, busy(ctx, err, limit)
	}
	return s.kept.Conn, func() { <-s.turn }, nil
}

// keep has the turn.
func (s *side) keep(ctx context.Context) error {
	if s.kept != nil && look(ctx, s.kept.Conn) == nil {
		return nil
	}
	if err := s.drop(); err != nil {
		return err
	}
	conn, err := s.pinned.Take(ctx)
	if err != nil {
		return err
	}
	s.kept = conn
	s.keeps.Store(true)
	return nil
}

// drop has the turn.
func (s *side) drop() error {
	s.keeps.Store(false)
	if s.kept == nil {
		return nil
	}
	err := s.kept.Destroy()
	s.kept = nil
	return err
}

// prepare takes the connection in time, before transactions have all that the pool
// allows, unless it allows fewer than least. If that fails, so will the call that
// needs it, with the error that tells why.
func (s *side) prepare(ctx context.Context, least int) {
	if s.keeps.Load() || s.pool.Stats().MaxOpenConnections < least {
		return
	}
	if _, done, err := s.take(ctx); err == nil {
		done()
	}
}

// borrow is take without keeping one more connection.
func (s *side) borrow(ctx context.Context) (conn *sql.Conn, done func(), err error) {
	if s.keeps.Load() {
		return s.take(ctx)
	}
	return s.ofPool(ctx)
}

func (s *side) ofPool(ctx context.Context) (*sql.Conn, func(), error) {
	conn, err := s.pool.Conn(ctx)
	if err != nil {
		return nil, nil, err
	}
	return conn, func() { conn.Close() }, nil
}

func (s *side) close() error {
	bound := time.NewTimer(cleanUpWithin)
	defer bound.Stop()
	select {
	case s.turn <- struct{}{}:
	case <-bound.C:
		return &dialect.Error{Class: dialect.Capacity, Hint: "a call is still creating rows of the lock table: close the DB after all calls have returned"}
	}
	defer func() { <-s.turn }()
	return s.drop()
}

// look asks the driver whether the server has closed the connection, which costs
// no round trip. If it has, database/sql closes it too.
func look(ctx context.Context, conn *sql.Conn) error {
	return conn.Raw(func(c any) error {
		if resetter, ok := c.(sqldriver.SessionResetter); ok {
			return resetter.ResetSession(ctx)
		}
		return nil
	})
}

// busy tells the end of the caller's context from that of sideWithin.
func busy(ctx context.Context, err error, limit int) error {
	if ctx.Err() != nil || !isContextEnd(err) {
		return err
	}
	return &dialect.Error{Class: dialect.Capacity, Err: err, Hint: fmt.Sprintf(
		"this needs a second connection, and none of the pool's %d became free within %v: %s", limit, sideWithin, moreConnections)}
}

const moreConnections = "raise SetMaxOpenConns, or open the database by DSN"

// kill ends a connection whose client has gone, at once. By itself the server
// notices that after about a second during a wait for an advisory lock, and not
// before the wait's end during one for a row lock. Every user may kill their own
// connections. It is no error if that fails: nothing but time is lost.
// https://dev.mysql.com/doc/refman/en/kill.html
func (db *DB) kill(t thread) {
	db.beside(t, func(ctx context.Context, side *sql.Conn) {
		side.ExecContext(ctx, fmt.Sprintf("KILL %d", t.id))
	})
}

// killIn is kill for a connection that is somebody else's, whose client may have
// gone or may not even have sent the statement: only while the server runs a
// statement that no client waits for is it certain that no other can follow on
// that connection.
func (db *DB) killIn(t thread, statement string) { db.endIn(t, statement, "KILL %d") }

func (db *DB) endIn(t thread, statement, kill string) {
	db.beside(t, func(ctx context.Context, side *sql.Conn) {
		if running, err := processList(ctx, side); err == nil && running[t.id].text == statement {
			side.ExecContext(ctx, fmt.Sprintf(kill, t.id))
		}
	})
}

// beside calls with a second connection to the thread's server, if there is one to
// be had.
func (db *DB) beside(t thread, call func(ctx context.Context, side *sql.Conn)) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpWithin)
	defer cancel()
	conn, done, err := db.side.borrow(ctx)
	if err != nil {
		return
	}
	defer done()
	if here, err := threadOf(ctx, conn); err == nil && here.server == t.server {
		call(ctx, conn)
	}
}
