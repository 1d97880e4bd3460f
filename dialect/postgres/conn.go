package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"

	"github.com/dblock-go/dblock/dialect"
)

const (
	// closeTimeout bounds how long a session's end may take.
	closeTimeout = 5 * time.Second

	// A client whose idle connection leads nowhere knows it after 3 + 3·1 s:
	// before the server does (configure) and gives the locks to somebody else.
	clientKeepAliveIdle     = 3 * time.Second
	clientKeepAliveInterval = time.Second
	clientKeepAliveCount    = 3
)

// conn is what a session needs of a connection, whatever the driver.
type conn interface {
	queryRow(ctx context.Context, query string, args []any, dest ...any) error
	exec(ctx context.Context, query string) error
	// idle is Session.Idle before its error is classified.
	idle(ctx context.Context) error
	close() error
}

// connect opens a connection of dblock's own. With it comes the process that the
// protocol's BackendKeyData announced, 0 where the driver does not tell.
func (d *DB) connect(ctx context.Context) (conn, int64, error) {
	if d.config == nil {
		c, err := d.pinned.Take(ctx)
		if err != nil {
			return nil, 0, connectError(ctx, err)
		}
		return &sqlConn{Conn: c.Conn, destroy: c.Destroy}, 0, nil
	}
	c, err := d.dial(ctx, nil)
	if err != nil {
		return nil, 0, connectError(ctx, err)
	}
	return pgxConn{c}, int64(c.PgConn().PID()), nil
}

// dial connects with the configuration of the pool, except for what a session
// needs otherwise and for what change, which may be nil, does to it.
func (d *DB) dial(ctx context.Context, change func(*pgx.ConnConfig)) (*pgx.Conn, error) {
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
		if tcp, ok := c.(*net.TCPConn); ok && err == nil {
			// Where a platform refuses, keep-alives by the session's owner still
			// notice a dead connection, only later.
			_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: clientKeepAliveIdle,
				Interval: clientKeepAliveInterval, Count: clientKeepAliveCount})
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
	return pgx.ConnectConfig(ctx, config)
}

// pgxConn is a connection beside every pool.
type pgxConn struct{ *pgx.Conn }

func (c pgxConn) queryRow(ctx context.Context, query string, args []any, dest ...any) error {
	return c.QueryRow(ctx, query, args...).Scan(dest...)
}

func (c pgxConn) exec(ctx context.Context, query string) error {
	_, err := c.Exec(ctx, query)
	return err
}

func (c pgxConn) idle(ctx context.Context) error { return listen(ctx, c.Conn) }
func (c pgxConn) close() error                   { return hangUp(c.Conn) }

// sqlConn is a connection of a database/sql pool.
type sqlConn struct {
	*sql.Conn
	pgx     *pgx.Conn // nil for other drivers
	destroy func() error
}

func (c *sqlConn) queryRow(ctx context.Context, query string, args []any, dest ...any) error {
	return c.QueryRowContext(ctx, query, args...).Scan(dest...)
}

func (c *sqlConn) exec(ctx context.Context, query string) error {
	_, err := c.ExecContext(ctx, query)
	return err
}

func (c *sqlConn) idle(ctx context.Context) error {
	if c.pgx == nil {
		<-ctx.Done()
		return nil
	}
	return c.Raw(func(any) error { return listen(ctx, c.pgx) })
}

// close hangs up itself where it can: a database/sql pool that draws from a pgx
// pool would only give the connection back.
func (c *sqlConn) close() error {
	var err error
	if c.pgx != nil {
		err = c.Raw(func(any) error { return hangUp(c.pgx) })
		if errors.Is(err, sql.ErrConnDone) {
			err = hangUp(c.pgx)
		}
	}
	return join(err, c.destroy())
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
		return &dialect.Error{Class: dialect.Lost,
			Err:  fmt.Errorf("the server could not be told within %v that the session ends", closeTimeout),
			Hint: "its TCP keep-alive frees the locks"}
	}
}
