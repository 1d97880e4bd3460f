// Package sqlserver makes dblock lock with SQL Server and Azure SQL.
//
// Advisory locks are application locks: [sp_getapplock], owned by a session or
// by a transaction, in the mode Exclusive or Shared. Their names are confined to
// the current database. Row locks are UPDLOCK and HOLDLOCK on the rows of a lock
// table. SQL Server 2012 or newer is needed; listing holders needs the
// permission VIEW SERVER STATE.
//
// What an application should know:
//
//   - Session locks end when the session does: on a failover of an availability
//     group and on the idle timeout of Azure SQL's gateway (about 30 minutes),
//     which package advisory's keep-alive prevents. Ask for fencing numbers where
//     a failover must not let a stale holder write.
//   - A deadlock among application locks keeps the transaction; one that involves
//     rows rolls all of it back.
//   - The pool must use the driver name "sqlserver", not the deprecated "mssql",
//     which rewrites the text of queries.
//
// [sp_getapplock]: https://learn.microsoft.com/sql/relational-databases/system-stored-procedures/sp-getapplock-transact-sql
package sqlserver

import (
	"context"
	"database/sql"
	"errors"
	"net/url"
	"reflect"
	"strings"

	mssql "github.com/microsoft/go-mssqldb"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/kept"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
	"github.com/dblock-go/dblock/dialect/internal/tcp"
)

// Options change how a database is opened. A nil *Options means the defaults.
type Options struct {
	// AllowUnsafe opens a database on which locks may not exclude, such as a
	// read-only replica, and does without the probe that shows that they do.
	// Default: false, such a database is refused with class dialect.Unsafe.
	AllowUnsafe bool
}

// DB locks with a SQL Server database. It implements [dialect.DB] and
// [dialect.TxLocker].
type DB struct {
	db   *sql.DB
	pool *pinned.Pool
	// beside is for what is committed beside the caller's transaction.
	beside *kept.Conn[*pinned.Conn]
	own    bool // db was opened here

	userTables userTables
}

var (
	_ dialect.DB       = (*DB)(nil)
	_ dialect.TxLocker = (*DB)(nil)
)

// New locks with the database of a pool of go-mssqldb. Sessions that hold
// advisory locks take connections out of this pool, which stays the caller's to
// close; if it has a limit, they leave at least one for queries.
//
// Before anything is changed New looks at what is behind the pool. Errors:
// dialect.InvalidOption for a nil pool or more than one Options, Unavailable,
// and Unsafe or Unsupported for what cannot be promised there. A pool of a single
// connection is good for rows and transactions only: a session is refused with
// class dialect.Capacity.
func New(ctx context.Context, db *sql.DB, opts ...*Options) (*DB, error) {
	o, err := options(opts)
	if err != nil {
		return nil, err
	}
	if db == nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the *sql.DB is nil"}
	}
	d := newDB(db)
	if err := d.probe(ctx, o.AllowUnsafe); err != nil {
		return nil, err
	}
	return d, nil
}

func newDB(db *sql.DB) *DB {
	pool := pinned.NewPool(db)
	return &DB{db: db, pool: pool, beside: kept.New(pool.TakeFree, (*pinned.Conn).Destroy, connectionOver)}
}

// Open is New with a pool of its own, without a limit, which Close closes. The
// DSN is a URL as go-mssqldb takes it:
// sqlserver://user:password@host:1433?database=name, except that its keepAlive
// has no effect: the connections notice a dead network within seconds. A DSN that
// cannot be read gives an error of class dialect.InvalidOption that does not
// repeat it.
func Open(ctx context.Context, dsn string, opts ...*Options) (*DB, error) {
	connector, err := newConnector(dsn)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	d, err := New(ctx, db, opts...)
	if err != nil {
		db.Close()
		return nil, err
	}
	d.own = true
	return d, nil
}

func newConnector(dsn string) (*mssql.Connector, error) {
	if !strings.HasPrefix(dsn, "sqlserver://") || !isWholeURL(dsn) {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: dsnHint}
	}
	connector, err := mssql.NewConnector(dsn)
	if err != nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: dsnHint, Err: err}
	}
	connector.Dialer = &tcp.Dialer{}
	return connector, nil
}

const dsnHint = "write sqlserver://user:password@host:1433?database=name, special characters percent-encoded, such as @ as %40, / as %2F, ? as %3F and # as %23"

// isWholeURL reports whether the DSN can be read as what it seems to be. The
// driver takes a password with an unescaped / ? or # for a host and more, and its
// errors, and DNS, would tell parts of it.
func isWholeURL(dsn string) bool {
	u, err := url.Parse(dsn)
	if err != nil || u.Fragment != "" || strings.ContainsAny(strings.TrimPrefix(u.EscapedPath(), "/"), "/@") {
		return false
	}
	for name := range u.Query() {
		if strings.ContainsAny(name, "@/?") {
			return false
		}
	}
	return true
}

func options(opts []*Options) (Options, error) {
	switch {
	case len(opts) > 1:
		return Options{}, &dialect.Error{Class: dialect.InvalidOption, Hint: "more than one Options"}
	case len(opts) == 0 || opts[0] == nil:
		return Options{}, nil
	}
	return *opts[0], nil
}

// Name is sqlserver.
func (d *DB) Name() string { return "sqlserver" }

// Features: application locks are found by name within one database, and SQL
// Server does not tell a quiet client that its session was ended.
func (d *DB) Features() dialect.Features {
	return dialect.Features{ByName: true, Shared: true, Transaction: true, DeadlockPriority: true}
}

// Natives are what database/sql has.
func (d *DB) Natives() (conn, tx reflect.Type) {
	return reflect.TypeFor[dialect.Conn](), reflect.TypeFor[*sql.Tx]()
}

// SQL is the pool.
func (d *DB) SQL() *sql.DB { return d.db }

// Close closes the connection that the DB keeps, and the pool if Open made it.
func (d *DB) Close() error {
	err := d.beside.Close()
	if d.own {
		err = errors.Join(err, d.db.Close())
	}
	return err
}

// quote makes an identifier of a name.
func quote(name string) string { return mssql.TSQLQuoter{}.ID(name) }

// tableName is the quoted name of a lock table.
func tableName(t dialect.Table) string {
	name := t.Name
	if name == "" {
		name = "locks"
	}
	if t.Schema == "" {
		return quote(name)
	}
	return quote(t.Schema) + "." + quote(name)
}
