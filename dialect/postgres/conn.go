package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
	"github.com/dblock-go/dblock/dialect/internal/tcp"
)

const (
	// closeTimeout bounds how long a session's end may take.
	closeTimeout = 5 * time.Second
	// abandonedTimeout is the same where the driver has not returned from a call
	// whose context ended. On a network that works it returns at once.
	abandonedTimeout = time.Second
)

// conn is what a session needs of a connection, whatever the driver.
type conn interface {
	queryRow(ctx context.Context, query string, args []any, dest ...any) error
	exec(ctx context.Context, query string) error
	exchange(ctx context.Context, deadline time.Time, x *exchange) error
	// idle is Session.Idle before its error is classified.
	idle(ctx context.Context) error
	// quiet: the connection is open and nothing has arrived that was not read.
	quiet() bool
	statements() dialect.Statements
	begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error)
	close() error
}

// connect opens a connection of dblock's own. With it comes the process that the
// protocol's BackendKeyData announced, 0 where the driver does not tell.
func (d *DB) connect(ctx context.Context, o dialect.SessionOptions) (conn, int64, error) {
	switch {
	case d.config == nil:
		c, err := d.take(ctx)
		if err != nil {
			return nil, 0, connectError(ctx, err)
		}
		return &sqlConn{Conn: c.Conn, destroy: c.Destroy}, 0, nil
	case d.pool == nil && o.StatementGap > 0:
		c, err := d.dialSQL(ctx)
		if err != nil {
			return nil, 0, connectError(ctx, err)
		}
		return c, int64(c.pgx.PgConn().PID()), nil
	}
	c, err := d.dial(ctx, nil)
	if err == nil && o.StatementGap > 0 {
		err = d.setUp(ctx, c)
	}
	if err != nil {
		return nil, 0, connectError(ctx, err)
	}
	return newPgxConn(c), int64(c.PgConn().PID()), nil
}

// take takes a connection out of the pool.
func (d *DB) take(ctx context.Context) (*pinned.Conn, error) {
	return obtain(ctx, d.pinned.Take, (*pinned.Conn).Destroy)
}

// obtain is get bounded by its context also where the driver is not, as lib/pq
// when it waits for an answer to its greeting. What comes after ctx has ended is
// discarded.
func obtain[T any](ctx context.Context, get func(context.Context) (T, error), discard func(T) error) (T, error) {
	got, failed := make(chan T), make(chan error, 1)
	go func() {
		c, err := get(ctx)
		if err != nil {
			failed <- err
			return
		}
		select {
		case got <- c:
		case <-ctx.Done():
			failed <- join(ctx.Err(), discard(c))
		}
	}()
	var none T
	select {
	case c := <-got:
		return c, nil
	case err := <-failed:
		return none, err
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// setUp makes a connection for a holder's statements what those of the pool are.
func (d *DB) setUp(ctx context.Context, c *pgx.Conn) error {
	hook := d.pool.Config().AfterConnect
	if hook == nil {
		return nil
	}
	if err := hook(ctx, c); err != nil {
		return join(err, hangUp(c))
	}
	return nil
}

// dialSQL is dial for a holder whose statements go through database/sql.
func (d *DB) dialSQL(ctx context.Context) (*sqlConn, error) {
	config, err := d.sessionConfig(ctx, nil)
	if err != nil {
		return nil, err
	}
	pool := stdlib.OpenDB(*config)
	c, err := pool.Conn(ctx)
	if err != nil {
		return nil, join(err, pool.Close())
	}
	return &sqlConn{Conn: c, pgx: underPgx(c), destroy: func() error { return join(pinned.Destroy(c), pool.Close()) }}, nil
}

func (d *DB) dial(ctx context.Context, change func(*pgx.ConnConfig)) (*pgx.Conn, error) {
	config, err := d.sessionConfig(ctx, change)
	if err != nil {
		return nil, err
	}
	return pgx.ConnectConfig(ctx, config)
}

// sessionConfig is the configuration of the pool, except for what a session needs
// otherwise and for what change, which may be nil, does to it.
func (d *DB) sessionConfig(ctx context.Context, change func(*pgx.ConnConfig)) (*pgx.ConnConfig, error) {
	config, err := d.config(ctx)
	if err != nil {
		return nil, err
	}
	if change != nil {
		change(config)
	}
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err == nil {
			tcp.Watch(c)
		}
		return c, err
	}
	// A cancelled context must close the connection: one that survived could
	// hold a lock that its caller does not know of.
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
	}
	// Makes idle return the server's own reason when it ends the session.
	config.OnPgError = func(_ *pgconn.PgConn, err *pgconn.PgError) bool {
		return err.SeverityUnlocalized != "FATAL" && err.Severity != "FATAL"
	}
	// In a configuration taken from a live connection this is that connection's.
	config.OnNotification = nil
	return config, nil
}

// pgxConn is a connection beside every pool.
type pgxConn struct {
	*pgx.Conn
	prepares  bool             // statements may be prepared
	exchanges map[shape]string // names of those that are
	bind      pgproto3.Bind    // the latest
	deadline  time.Time        // see boundBy
}

func newPgxConn(c *pgx.Conn) *pgxConn {
	binary := []int16{pgx.BinaryFormatCode}
	return &pgxConn{Conn: c, prepares: c.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement,
		exchanges: map[shape]string{},
		bind:      pgproto3.Bind{ParameterFormatCodes: binary, ResultFormatCodes: binary}}
}

func (c *pgxConn) queryRow(ctx context.Context, query string, args []any, dest ...any) error {
	if err := c.unbound(); err != nil {
		return err
	}
	return c.QueryRow(ctx, query, args...).Scan(dest...)
}

func (c *pgxConn) exec(ctx context.Context, query string) error {
	if err := c.unbound(); err != nil {
		return err
	}
	_, err := c.Exec(ctx, query)
	return err
}

func (c *pgxConn) idle(ctx context.Context) error {
	if err := c.unbound(); err != nil {
		return err
	}
	return listen(ctx, c.Conn)
}

func (c *pgxConn) quiet() bool                    { return tcp.Quiet(c.PgConn().Conn()) }
func (c *pgxConn) statements() dialect.Statements { return pgxStatements{c.Conn} }
func (c *pgxConn) close() error                   { return hangUp(c.Conn) }

func (c *pgxConn) begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	return beginPgx(ctx, c.BeginTx, o)
}

// sqlConn is a connection of a database/sql pool. Where the driver is not pgx it
// may be one that goes on reading after a context has ended, as lib/pq does until
// the operating system gives up on a dead network: its caller does not wait.
type sqlConn struct {
	*sql.Conn
	pgx       *pgx.Conn // nil for other drivers
	destroy   func() error
	abandoned bool // a context ended, and the driver had not returned
}

func (c *sqlConn) queryRow(ctx context.Context, query string, args []any, dest ...any) error {
	row := make([]any, len(dest)) // not dest, since an abandoned call may still write
	for i, d := range dest {
		row[i] = reflect.New(reflect.TypeOf(d).Elem()).Interface()
	}
	err := c.call(ctx, func() error { return c.QueryRowContext(ctx, query, args...).Scan(row...) })
	if err != nil {
		return err
	}
	for i, d := range dest {
		reflect.ValueOf(d).Elem().Set(reflect.ValueOf(row[i]).Elem())
	}
	return nil
}

func (c *sqlConn) exec(ctx context.Context, query string) error {
	return c.call(ctx, func() error {
		_, err := c.ExecContext(ctx, query)
		return err
	})
}

// call is one call of the driver, or of database/sql, which waits for rows and
// transactions that a holder left open. What ends with its context before that has
// returned is the connection's last.
func (c *sqlConn) call(ctx context.Context, call func() error) error {
	switch {
	case c.abandoned:
		return errAbandoned
	case ctx.Err() != nil:
		return ctx.Err()
	}
	bound := ctx
	if c.pgx != nil { // which returns when its context ends, unless somebody's rows are in the way
		grace, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(ctx, func() { time.AfterFunc(abandonedTimeout, cancel) })()
		bound = grace
	}
	returned, err := pinned.Within(bound, call)
	if !returned {
		c.abandoned = true
		return ctx.Err()
	}
	return err
}

var errAbandoned = &dialect.Error{Class: dialect.Lost, Remains: dialect.RemainsNothing,
	Err: errors.New("the driver had not returned from a call when its context ended")}

func (c *sqlConn) idle(ctx context.Context) error {
	switch {
	case c.pgx != nil:
		return c.Raw(func(any) error { return listen(ctx, c.pgx) })
	case c.abandoned:
		return errAbandoned
	}
	<-ctx.Done()
	return nil
}

func (c *sqlConn) quiet() bool {
	return c.pgx != nil && !c.abandoned && tcp.Quiet(c.pgx.PgConn().Conn())
}

func (c *sqlConn) statements() dialect.Statements { return pinned.Statements(c.Conn) }

func (c *sqlConn) begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	return beginSQL(ctx, c.BeginTx, o)
}

// close hangs up itself where it can: a database/sql pool that draws from a pgx
// pool would only give the connection back. Elsewhere the connection is destroyed
// as soon as the driver has returned, which may be after close.
func (c *sqlConn) close() error {
	timeout := closeTimeout
	if c.abandoned {
		timeout = abandonedTimeout
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	returned, err := pinned.Within(ctx, func() error {
		switch {
		case c.pgx == nil:
			return c.destroy()
		case c.abandoned: // somebody may still be in the driver; the server sees the end of the connection
			return join(c.pgx.PgConn().Conn().Close(), c.destroy())
		}
		err := c.Raw(func(any) error { return hangUp(c.pgx) })
		if errors.Is(err, sql.ErrConnDone) {
			err = hangUp(c.pgx)
		}
		return join(err, c.destroy())
	})
	if !returned {
		return untold(timeout)
	}
	return err
}

// listen returns nil when ctx ends and leaves the connection usable; otherwise
// why it is not.
func listen(ctx context.Context, c *pgx.Conn) error {
	for {
		_, err := c.WaitForNotification(ctx)
		if err == nil {
			continue
		}
		if !c.IsClosed() && ctx.Err() != nil {
			return nil
		}
		return err
	}
}

// hangUp ends the server's session and waits until the server was told. What
// pgx reports of a connection that is already broken is no news.
func hangUp(c *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = c.Close(ctx)
	select {
	case <-c.PgConn().CleanupDone():
		return nil
	case <-ctx.Done():
		return untold(closeTimeout)
	}
}

func untold(timeout time.Duration) error {
	return &dialect.Error{Class: dialect.Lost,
		Err:  fmt.Errorf("the server could not be told within %v that the session ends", timeout),
		Hint: "its TCP keep-alive frees the locks"}
}
