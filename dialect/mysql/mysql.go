// Package mysql locks with MySQL or MariaDB, through database/sql and
// github.com/go-sql-driver/mysql.
//
// [New] takes the pool that an application has, [Open] a DSN; which of the two
// servers it is, the server tells, whatever the DSN's scheme. Advisory locks are
// GET_LOCK (https://dev.mysql.com/doc/refman/en/locking-functions.html,
// https://mariadb.com/docs/server/reference/sql-functions/secondary-functions/miscellaneous-functions/get_lock),
// row locks are SELECT … FOR UPDATE on an InnoDB table.
//
// What is particular to these servers:
//
//   - The names of advisory locks belong to the whole server. Those of dblock
//     contain the name of the database; a database must therefore be selected.
//   - Advisory locks have neither a shared nor a transaction-scoped form.
//   - A wait that goes round through an advisory lock and a row lock is a deadlock
//     that neither server detects: it ends by timeout. Take advisory locks first.
//   - Row locks wait at most innodb_lock_wait_timeout, 50 s by default. A read
//     timeout in the DSN (readTimeout) ends any wait and costs the connection.
//   - Neither server hears of a dead network by itself: each session of dblock
//     has a wait_timeout, after which the server frees its locks. The client's
//     connections notice within seconds if [Open] made them; over [New] that is
//     for the dialer of the application's pool, and for package advisory's
//     heartbeats, which do it for idle sessions.
//   - A row that is missing in the lock table is created in a transaction of its
//     own, on a second connection of the pool; and the server ends an abandoned
//     wait at once only when told so by a second connection.
//
// Row locks need MySQL 8.0.1 or MariaDB 10.3, for NOWAIT; claims, and rows of an
// application's own with keys of text, MySQL 8.0.19 or MariaDB 10.6, for VALUES and SKIP
// LOCKED; advisory locks MySQL 5.7.8 or MariaDB 10.1.1.
package mysql

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// Options shape a DB. The zero value, and nil, mean the defaults.
type Options struct {
	// AllowUnsafe opens a server on which locks would not be safe, and skips the
	// probe that shows whether GET_LOCK excludes. Default: false, such a server is
	// refused with an error that says why.
	AllowUnsafe bool
}

// DB is a MySQL or MariaDB database to lock with.
type DB struct {
	pool     *sql.DB
	owned    bool // the pool is ours to close
	pinned   *pinned.Pool
	side     *side
	database string // as the server spells it
	flavor   *flavor
	rows     knownRows
	// rollbackOnTimeout: the server was started with innodb_rollback_on_timeout.
	rollbackOnTimeout bool

	userTables userTables
	views      innodbViews
}

var _ dialect.DB = (*DB)(nil)

// New locks with the database of an application's pool. It looks at what is
// behind the pool, on two connections at once, and changes nothing there.
//
// Sessions with locks take connections out of the pool. Of a pool with a limit of
// three or more the DB takes one at once, to create rows of the lock table with,
// for the transactions that need them may have all others; with a limit of two it
// waits until the first row lock. One always stays for queries, so a pool of one
// serves migrations only: locks get [dialect.Capacity] at once. [Open] gives locks
// connections of their own. Make one DB of a pool, since each keeps count of its own
// connections, and close it before the pool.
//
// Errors: [dialect.InvalidOption], [dialect.Unavailable], [dialect.Denied],
// [dialect.Unsupported] if there is no MySQL or MariaDB behind the pool,
// [dialect.Unsafe] if locks would not be safe here, [dialect.Setup] if no database
// is selected.
func New(ctx context.Context, db *sql.DB, opts ...*Options) (*DB, error) {
	o, err := atMostOne(opts)
	if err != nil {
		return nil, err
	}
	if db == nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the *sql.DB is nil"}
	}
	connections := pinned.NewPool(db)
	d := &DB{pool: db, pinned: connections, side: newSide(db, connections), flavor: &mysqlFlavor, views: newInnodbViews()}
	if err := d.probe(ctx, o.AllowUnsafe); err != nil {
		return nil, d.whileOpening(err)
	}
	d.side.prepare(ctx, 3)
	return d, nil
}

// Open locks with the database of a DSN, on connections of its own, whose number
// only the server limits. The DSN is a URL with the user's name and password
// percent-encoded,
//
//	mysql://user:password@host:3306/database?tls=true
//	mariadb://user:password@/database?socket=/run/mysqld/mysqld.sock
//
// or has the driver's format,
// https://github.com/go-sql-driver/mysql#dsn-data-source-name; in both, the
// parameters are the driver's. A dialer that was registered with the driver is
// used for networks of other names than tcp. Close closes the connections.
// Connecting takes 30 s at most, or the DSN's timeout if that is longer.
//
// Errors: those of [New]. None contains the password.
func Open(ctx context.Context, dsn string, opts ...*Options) (*DB, error) {
	config, err := parseDSN(dsn)
	if err != nil {
		return nil, err
	}
	connector, err := newConnector(config)
	if err != nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Err: err}
	}
	pool := sql.OpenDB(connector)
	d, err := New(ctx, pool, opts...)
	if err != nil {
		return nil, join(err, pool.Close())
	}
	d.owned = true
	return d, nil
}

func atMostOne(opts []*Options) (Options, error) {
	switch {
	case len(opts) > 1:
		return Options{}, &dialect.Error{Class: dialect.InvalidOption, Hint: fmt.Sprintf("%d Options: at most one", len(opts))}
	case len(opts) == 0 || opts[0] == nil:
		return Options{}, nil
	}
	return *opts[0], nil
}

// Name is mysql or mariadb, as the server tells.
func (db *DB) Name() string { return db.flavor.name }

// Features: advisory locks have names, which the whole server shares.
func (db *DB) Features() dialect.Features {
	return dialect.Features{ByName: true, Scope: db.database}
}

// Natives are what database/sql has.
func (db *DB) Natives() (conn, tx reflect.Type) {
	return reflect.TypeFor[dialect.Conn](), reflect.TypeFor[*sql.Tx]()
}

// SQL is the pool.
func (db *DB) SQL() *sql.DB { return db.pool }

// Close closes the connections that the DB keeps, and all of a DB that [Open]
// made. Sessions are for their owners to close.
func (db *DB) Close() error {
	err := db.side.close()
	if db.owned {
		// All connections are closed whatever the driver says, which is that a
		// server could not be told because it had ended one already.
		_ = db.pool.Close()
	}
	return db.Classify(err)
}
