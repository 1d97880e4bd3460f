package mysql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

const (
	defaultApplication = "dblock"
	// User variables of a session, which MySQL shows to others in
	// performance_schema.user_variables_by_thread.
	applicationVariable = "dblock_application"
	sinceVariable       = "dblock_since"
	// cleanUpWithin bounds what must be done although the caller's context ended.
	cleanUpWithin = 2 * time.Second
	// readWrite undoes a read-only default of the pool, which would refuse fencing
	// numbers.
	readWrite = "SET SESSION TRANSACTION READ WRITE"
)

// session implements dialect.Session on a connection.
type session struct {
	db        *DB
	conn      *sql.Conn
	destroy   func() error
	thread    thread
	exchanged exchange // the latest
	abandoned bool     // the connection broke, and the server may not know it or still run a statement
	closed    bool
}

// OpenSession takes a connection out of the pool for good. The server ends the
// session when it hears nothing for o.Silence, by wait_timeout.
func (db *DB) OpenSession(ctx context.Context, o dialect.SessionOptions) (dialect.Session, error) {
	conn, err := db.pinned.Take(ctx)
	if err != nil {
		return nil, db.connectFailure(ctx, err)
	}
	s := &session{db: db, conn: conn.Conn, destroy: conn.Destroy}
	if err := s.start(ctx, db.flavor.settings(o), readWrite); err != nil {
		return nil, join(db.failure(ctx, err), conn.Destroy())
	}
	if o.StatementGap > 0 {
		if _, err := s.allowPauses(ctx, o.StatementGap); err != nil {
			return nil, join(err, conn.Destroy())
		}
	}
	return s, nil
}

// OnConn changes no setting of the connection.
func (db *DB) OnConn(ctx context.Context, conn *sql.Conn) (dialect.Session, error) {
	if conn == nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the *sql.Conn is nil"}
	}
	s := &session{db: db, conn: conn, destroy: func() error { return pinned.Destroy(conn) }}
	if err := s.start(ctx); err != nil {
		return nil, db.failure(ctx, err)
	}
	return s, nil
}

func (s *session) start(ctx context.Context, settings ...string) (err error) {
	for _, statement := range settings {
		if _, err := s.conn.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	s.thread, err = threadOf(ctx, s.conn)
	return err
}

func (s *session) ID() int64 { return s.thread.id }

// Idle only waits: the driver does not read while no statement is under way.
func (s *session) Idle(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (s *session) Ping(ctx context.Context) error {
	return s.failure(ctx, s.conn.PingContext(ctx))
}

// Alive does not ask the server, unless the driver cannot look
// (https://github.com/go-sql-driver/mysql/blob/v1.10.1/conncheck.go). It has the
// driver look at what has arrived, for which it must not be reading rows; with
// checkConnLiveness=false in the DSN it sees only what it has closed itself.
func (s *session) Alive(deadline time.Time) error {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	if runtime.GOOS == "windows" {
		return s.Ping(ctx)
	}
	return s.failure(ctx, look(ctx, s.conn))
}

// idleLimits end sessions that pause, the latter three of them, which are MariaDB's,
// those that pause in a transaction. A server has wait_timeout and perhaps the others.
// https://mariadb.com/docs/server/ref/mdb/system-variables/idle_transaction_timeout/
const idleLimits = "'wait_timeout', 'idle_transaction_timeout', 'idle_write_transaction_timeout', 'idle_readonly_transaction_timeout'"

// AllowSilence lifts what the server has of idleLimits.
func (s *session) AllowSilence(ctx context.Context) (restore func(ctx context.Context) error, err error) {
	return s.allowPauses(ctx, longestWait)
}

// allowPauses lets the session pause for a time, in a transaction or not.
func (s *session) allowPauses(ctx context.Context, pause time.Duration) (restore func(ctx context.Context) error, err error) {
	rows, err := s.conn.QueryContext(ctx, "SHOW SESSION VARIABLES WHERE Variable_name IN ("+idleLimits+")")
	if err != nil {
		return nil, s.failure(ctx, err)
	}
	defer rows.Close()
	var before, during []string
	for rows.Next() {
		var name string
		var limit int64
		if err := rows.Scan(&name, &limit); err != nil {
			return nil, s.failure(ctx, err)
		}
		before = append(before, fmt.Sprintf("SESSION %s = %d", name, limit))
		lifted := int64(0)
		if name == "wait_timeout" {
			lifted = seconds(pause)
		}
		during = append(during, fmt.Sprintf("SESSION %s = %d", name, lifted))
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, s.failure(ctx, err)
	}
	set := func(ctx context.Context, limits []string) error {
		_, err := s.conn.ExecContext(ctx, "SET "+strings.Join(limits, ", "))
		return s.failure(ctx, err)
	}
	return func(ctx context.Context) error { return set(ctx, before) }, set(ctx, during)
}

// Statements has a [dialect.Conn].
func (s *session) Statements() dialect.Statements { return pinned.Statements(s.conn) }

func (s *session) EndStatements(ctx context.Context) error {
	_, err := pinned.Within(ctx, func() error {
		_, err := s.conn.ExecContext(ctx, "ROLLBACK")
		return err
	})
	return s.failure(ctx, err)
}

func (s *session) Begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	tx, err := s.conn.BeginTx(ctx, o)
	if err != nil {
		return nil, s.failure(ctx, err)
	}
	return &ownedTx{Tx: tx, db: s.db}, nil
}

// Close ends the connection, and the server's end of one that broke.
func (s *session) Close() error {
	if s.closed {
		return nil
	}
	s.closed = true
	err := s.destroy()
	if s.abandoned {
		s.db.kill(s.thread)
	}
	return s.db.Classify(err)
}

// failure is DB.failure, and failed remembers what an error means for Close.
func (s *session) failure(ctx context.Context, err error) error {
	return s.failed(ctx, s.db.failure(ctx, err))
}

func (s *session) failed(ctx context.Context, err error) error {
	if err != nil && (ctx.Err() != nil || dialect.ClassOf(err) == dialect.Lost) {
		s.abandoned = true
	}
	return err
}

// thread is a connection as the server sees it.
type thread struct {
	id     int64
	server string // ids are the server's own, and a pool may reach several servers
}

// serverIdentity is SQL that tells the servers behind one pool apart.
const serverIdentity = "CONCAT_WS(':', @@hostname, @@port, @@server_id)"

// threadOf asks for the connection behind q. The query opens no read view in a
// transaction of q, since it reads no table.
func threadOf(ctx context.Context, q dialect.Querier) (thread, error) {
	var t thread
	_, err := queryRow(ctx, q, "SELECT CONNECTION_ID(), "+serverIdentity, &t.id, &t.server)
	return t, err
}

// queryRow reads the first row of the text protocol, and all errors that may
// follow it.
func queryRow(ctx context.Context, q dialect.Querier, query string, dest ...any) (found bool, err error) {
	rows, err := q.QueryContext(ctx, query)
	if err != nil {
		return false, err
	}
	defer rows.Close()
	if rows.Next() {
		found = true
		if err := rows.Scan(dest...); err != nil {
			return false, err
		}
	}
	if err := rows.Close(); err != nil {
		return false, err
	}
	return found, rows.Err()
}

// seconds rounds up what is at most longestWait.
func seconds(d time.Duration) int64 {
	return int64((d + time.Second - 1) / time.Second)
}
