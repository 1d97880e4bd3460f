// Package postgres locks with PostgreSQL: session and transaction advisory
// locks, and rows of a lock table. Applications use its constructors, [New] and
// [Open], and [Tx]; everything else is called by dblock's features.
//
// An advisory lock of one key is pg_advisory_lock(bigint) on [dblock.Key.ID],
// visible in pg_locks with objsubid 1. Its scope is one database of the server.
// See https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
//
// PostgreSQL 12 and later are supported. Session locks need a server session
// that belongs to one client: connect to the server itself or through a pooler
// in session mode, never through one in transaction mode.
//
// [dblock.Key.ID]: https://pkg.go.dev/github.com/dblock-go/dblock#Key.ID
package postgres

import (
	"context"
	"database/sql"
	"errors"
	"net/url"
	"reflect"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/kept"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// Options change how a database is opened. Nil means the defaults.
type Options struct {
	// AllowUnsafe opens a database although session locks would not be safe
	// there: behind a pooler in transaction mode, on a standby, or on a server
	// that only speaks PostgreSQL's protocol. Row locks and transaction locks
	// work behind a pooler; nothing checks any more what else does.
	// Default: false.
	AllowUnsafe bool
}

// DB is a PostgreSQL database. It implements [dialect.DB] and
// [dialect.TxLocker], and is safe for concurrent use.
type DB struct {
	pool    *pgxpool.Pool // nil over database/sql
	sql     *sql.DB
	config  func(context.Context) (*pgx.ConnConfig, error) // for connections of dblock's own; nil where the driver is not pgx
	pinned  *pinned.Pool                                   // where config is nil
	pooler  bool                                           // a pooler in session mode is in between
	unsafe  bool                                           // Options.AllowUnsafe
	beside  *kept.Conn[conn]                               // for what is committed beside the caller's transaction
	closers []func() error                                 // Close

	needsBeside atomic.Bool // some call has needed beside, which is of the pool where the driver is not pgx
	userTables  userTables
}

var (
	_ dialect.DB       = (*DB)(nil)
	_ dialect.TxLocker = (*DB)(nil)
	_ dialect.Namer    = (*DB)(nil)
)

// New makes a database of the pgx pool that the application already has. It
// connects, once through the pool, and looks at what is behind the connection
// before anything is changed there. The pool stays the caller's to close, after
// [DB.Close].
//
// Sessions are connections beside the pool, made with its configuration. Of a
// pgxpool.Config's hooks, BeforeConnect is applied to them, and AfterConnect to those
// that run statements of their holder (advisory.InTx and OnSession).
//
// Errors: [dialect.Unsafe] where session locks would not be safe, unless
// Options.AllowUnsafe is set; [dialect.Unavailable], [dialect.Capacity],
// [dialect.Timeout], [dialect.Canceled], [dialect.InvalidOption].
func New(ctx context.Context, pool *pgxpool.Pool, opts ...*Options) (*DB, error) {
	if pool == nil {
		return nil, errNilPool
	}
	d := &DB{pool: pool, sql: stdlib.OpenDBFromPool(pool)}
	d.closers = []func() error{d.sql.Close}
	d.config = func(ctx context.Context) (*pgx.ConnConfig, error) {
		c := pool.Config()
		if c.BeforeConnect == nil {
			return c.ConnConfig, nil
		}
		return c.ConnConfig, c.BeforeConnect(ctx, c.ConnConfig)
	}
	return d.open(ctx, opts)
}

// NewSQL is [New] for a database/sql pool, over pgx's stdlib or lib/pq.
//
// Over pgx, sessions are connections beside the pool, made with the
// configuration that one of its connections had during this call; where
// passwords expire, use New. Over another driver, sessions are taken out of the
// pool for good and count against its limit, of which they leave one
// connection; and a lost session is noticed by keep-alives only.
func NewSQL(ctx context.Context, pool *sql.DB, opts ...*Options) (*DB, error) {
	if pool == nil {
		return nil, errNilPool
	}
	d := &DB{sql: pool}
	conn, err := obtain(ctx, pool.Conn, (*sql.Conn).Close)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	if c := underPgx(conn); c != nil {
		config := c.Config()
		d.config = func(context.Context) (*pgx.ConnConfig, error) { return config.Copy(), nil }
	} else {
		d.pinned = pinned.NewPool(pool)
	}
	if err := conn.Close(); err != nil {
		return nil, connectError(ctx, err)
	}
	return d.open(ctx, opts)
}

// Open is [New] with a pool of its own, which [DB.Close] closes. The DSN is a
// URL, postgres://user:password@host:port/database?sslmode=verify-full, or
// libpq's keywords and values; see [pgconn.ParseConfig].
//
// [pgconn.ParseConfig]: https://pkg.go.dev/github.com/jackc/pgx/v5/pgconn#ParseConfig
func Open(ctx context.Context, dsn string, opts ...*Options) (*DB, error) {
	if hidesPassword(dsn) {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: dsnHint}
	}
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, badDSN(dsn, err)
	}
	return openPool(ctx, config, opts)
}

// NewConfig is [Open] for an application that has a single connection, or only
// knows how to make one: the pool's connections are made with the configuration,
// such as conn.Config() of a *pgx.Conn.
func NewConfig(ctx context.Context, config *pgx.ConnConfig, opts ...*Options) (*DB, error) {
	if config == nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the configuration is nil"}
	}
	pool, err := pgxpool.ParseConfig("")
	if err != nil {
		return nil, connectError(ctx, err)
	}
	pool.ConnConfig = config.Copy()
	return openPool(ctx, pool, opts)
}

func openPool(ctx context.Context, config *pgxpool.Config, opts []*Options) (*DB, error) {
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	d, err := New(ctx, pool, opts...)
	if err != nil {
		pool.Close()
		return nil, err
	}
	d.closers = append(d.closers, func() error { pool.Close(); return nil })
	return d, nil
}

// open is the end of every constructor.
func (d *DB) open(ctx context.Context, opts []*Options) (*DB, error) {
	d.beside = kept.New(d.connectBeside, conn.close, connectionOver)
	d.closers = append([]func() error{d.beside.Close}, d.closers...)
	var err error
	switch {
	case len(opts) > 1:
		err = &dialect.Error{Class: dialect.InvalidOption, Hint: "more than one Options: pass one or none"}
	case len(opts) == 1 && opts[0] != nil && opts[0].AllowUnsafe:
		d.unsafe = true
	}
	if err == nil {
		err = d.ping(ctx) // of the pool, which the probe need not use
	}
	if err == nil && !d.unsafe {
		err = d.probe(ctx)
	}
	if err != nil {
		return nil, join(err, d.Close())
	}
	return d, nil
}

const dsnHint = "the DSN is not understood: write postgres://user:password@host:port/database, with special characters of the password percent-encoded"

// hidesPassword reports a URL with an @ after the user's part and before the
// query. It can be of a password with an unescaped @ or /, of which pgx takes
// one piece for the host and another for the database.
func hidesPassword(dsn string) bool {
	scheme, rest, _ := strings.Cut(dsn, "://")
	if i := strings.IndexAny(rest, "@/"); i >= 0 && rest[i] == '@' {
		rest = rest[i+1:]
	}
	rest, _, _ = strings.Cut(rest, "?")
	return (scheme == "postgres" || scheme == "postgresql") && strings.Contains(rest, "@")
}

// badDSN tells what is wrong without the password. pgx's text masks it exactly
// only in a well-formed URL, and its error value keeps the whole DSN.
func badDSN(dsn string, err error) error {
	e := &dialect.Error{Class: dialect.InvalidOption, Hint: dsnHint}
	if u, parseErr := url.Parse(dsn); parseErr == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql") {
		e.Err = errors.New(err.Error())
	}
	return e
}

var errNilPool = &dialect.Error{Class: dialect.InvalidOption, Hint: "the pool is nil"}

// underPgx is the pgx connection under one of database/sql, nil for other drivers.
func underPgx(conn *sql.Conn) (c *pgx.Conn) {
	// The error is the closure's, or that the connection is gone, which its next
	// use reports.
	_ = conn.Raw(func(driverConn any) error {
		if s, ok := driverConn.(*stdlib.Conn); ok {
			c = s.Conn()
		}
		return nil
	})
	return c
}

// Name is "postgres".
func (d *DB) Name() string { return "postgres" }

// Features: PostgreSQL has shared and transaction locks, identified by id and
// confined to one database. Loss is heard of over pgx.
func (d *DB) Features() dialect.Features {
	return dialect.Features{Shared: true, Transaction: true, HearsLoss: d.config != nil, DeadlockTimeout: true}
}

// Natives are pgx's where the database was made of a pgx pool or configuration.
func (d *DB) Natives() (conn, tx reflect.Type) {
	if d.pool == nil {
		return reflect.TypeFor[dialect.Conn](), reflect.TypeFor[*sql.Tx]()
	}
	return reflect.TypeFor[*pgx.Conn](), reflect.TypeFor[pgx.Tx]()
}

// SQL is the database/sql pool that New was given, or one that draws its
// connections from the pgx pool.
func (d *DB) SQL() *sql.DB { return d.sql }

// Close closes what the constructor opened: after [Open] the pool too. It does
// not end sessions.
func (d *DB) Close() error {
	var errs []error
	for _, closer := range d.closers {
		errs = append(errs, closer())
	}
	return join(errs...)
}
