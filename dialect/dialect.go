// Package dialect is the contract between dblock's features and a database.
//
// It is written for the author of a database's package (dialect/postgres,
// dialect/mysql, dialect/sqlserver); users of dblock need only the constructors
// of those packages. Everything peculiar to a database (its SQL, its error
// codes, its tables) lives in that database's folder. The contract itself
// imports the standard library only.
//
// Two things are kept apart: a [Session] is one connection to the server, which
// can hold many keys; a lock, as the features show it to users, is a lease on
// some keys of a session.
package dialect

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"slices"
	"time"
)

// Mode is how a key is held.
type Mode uint8

const (
	// Exclusive excludes every other holder. It is the default.
	Exclusive Mode = iota
	// Shared excludes exclusive holders only.
	Shared
)

func (m Mode) String() string {
	if m == Shared {
		return "shared"
	}
	return "exclusive"
}

// Key is a key as a database locks it. The features hand keys over sorted and
// without duplicates (see Features.ByName); a dialect keeps their order.
type Key struct {
	ID    int64  // what PostgreSQL and the lock table lock
	Name  string // what MySQL, MariaDB and SQL Server lock: at most 64 characters out of a-z 0-9 . _ - / #
	Label string // the key as its user wrote it, for people to read; never sent as SQL text
	Mode  Mode
}

// Features says what a database can do and how it identifies an advisory lock.
type Features struct {
	// ByName is true where an advisory lock is identified by Key.Name, false
	// where by Key.ID. Calls for several keys are sorted by that value.
	ByName bool
	// Scope must become part of every name, because the server's advisory locks
	// are not confined to one database; empty where they are.
	Scope string
	// Shared: advisory locks have a shared mode.
	Shared bool
	// Transaction: the database implements [TxLocker].
	Transaction bool
	// HearsLoss: Session.Idle notices at once that the server ended the session.
	// Elsewhere only a heartbeat does.
	HearsLoss bool
	// DeadlockPriority and DeadlockTimeout: of the [DeadlockSettings]; the database then
	// implements [DeadlockSetter].
	DeadlockPriority, DeadlockTimeout bool
}

// FenceRows are the keys whose rows of a lock table fencing numbers come from, for
// advisory locks and row locks alike, in the same order: rows apart from those that
// package rowlock locks for the same keys, so that a try never waits for a transaction.
func FenceRows(keys []Key) []Key {
	const apart = 0x5ca1ab1e0ddba11 // any number does, as long as it never changes
	rows := slices.Clone(keys)
	for i := range rows {
		rows[i].ID ^= apart
	}
	return rows
}

// IsNil reports whether an interface holds nothing, or a nil pointer, as after a
// constructor whose error was not looked at.
func IsNil(v any) bool {
	value := reflect.ValueOf(v)
	return !value.IsValid() || (value.Kind() == reflect.Pointer && value.IsNil())
}

// DB is a database that dblock locks with. The dialects' constructors return
// one after they have looked at what is behind the connection. A DB is safe for
// concurrent use.
type DB interface {
	// Name is postgres, mysql, mariadb or sqlserver.
	Name() string
	Features() Features

	// OpenSession opens a connection that no query of the application can get.
	OpenSession(ctx context.Context, o SessionOptions) (Session, error)
	// OnConn makes a session of a connection that its caller has checked out.
	// Closing the session destroys the connection instead of giving it back.
	OnConn(ctx context.Context, conn *sql.Conn) (Session, error)
	// Inspect lists who holds and who waits for advisory locks of this database,
	// only those for the given keys if there are any. It uses a connection of
	// the pool.
	Inspect(ctx context.Context, keys ...Key) ([]Holding, error)
	// Diagnose looks at what the constructors look at, going on where they refuse,
	// and at the server's settings and the user's privileges. It changes nothing.
	// The levels of its findings are Danger exactly where a constructor without
	// AllowUnsafe would refuse. An error says that the server could not be asked.
	Diagnose(ctx context.Context) ([]Finding, error)
	// Snapshot shows who holds and who waits for locks, of whatever kind. Where a
	// privilege or a plugin is missing it tells the gap instead of failing. It asks
	// each source that the server has once, on a connection of the pool.
	Snapshot(ctx context.Context, r SnapshotRequest) (*Snapshot, error)

	// Natives are the types of the driver's own connections and transactions, as a
	// Session's Statements and Begin and the DB's Begin have them.
	Natives() (conn, tx reflect.Type)
	// Begin starts a transaction on a connection of the pool.
	Begin(ctx context.Context, o *sql.TxOptions) (OwnedTx, error)
	// LockRows locks rows of a lock table in the transaction, in the order of the
	// keys, creating those that are missing. It returns a fencing number for each
	// key if the request asks for them. An error of class NotAcquired, Timeout or
	// Deadlock leaves the transaction as [Error.Remains] says.
	LockRows(ctx context.Context, tx Tx, r RowRequest) ([]int64, error)
	// BeginRows is Begin followed by LockRows, in one round trip where the driver can.
	// After an error nothing is left of the transaction. The request asks for no
	// fencing numbers.
	BeginRows(ctx context.Context, o *sql.TxOptions, r RowRequest) (OwnedTx, error)
	// LockUserRows locks rows of an application's table in the transaction, in one
	// order for all callers. A class NotFound names the keys that have no row.
	LockUserRows(ctx context.Context, tx Tx, r UserRows) error
	// ClaimUserRows locks rows that nobody has locked and returns their keys, in the
	// order of the claim: integers as an int64 (or a uint64 that needs to be one),
	// bytes as a []byte, all else as the server's text. It does not wait.
	ClaimUserRows(ctx context.Context, tx Tx, c UserClaim) ([][]any, error)
	// Guard refuses a token that a later grant of the key has overtaken, with an
	// error of class NotHeld ([Overtaken]). Otherwise it keeps every other guarded
	// transaction of the key out until this one ends.
	Guard(ctx context.Context, tx Tx, r GuardRequest) error
	// CleanRows removes the rows of a page that hold no recent fencing number and
	// that nobody has locked, or makes them ready for a later call to remove.
	CleanRows(ctx context.Context, r CleanRequest) (Cleaned, error)
	// MarkRows writes the time into the fences of rows that have none, in the
	// transaction, creating the rows that are missing, and reports for each key whether
	// it did. Who has marked a row keeps the others waiting until its transaction
	// ends; what was committed by then counts, whatever the isolation level, or the
	// error has class Serialization.
	MarkRows(ctx context.Context, tx Tx, r MarkRequest) (first []bool, err error)

	// Migrations are the steps that create a lock table, oldest first.
	Migrations(t Table) []Migration
	// CheckTable returns nil if the lock table is there and has the shape that
	// this version needs, an error of class Setup otherwise; exists tells a
	// missing table from one of another shape.
	CheckTable(ctx context.Context, t Table) (exists bool, err error)
	// SQL is a handle on the pool for tools that need one, such as goose. It
	// belongs to the DB.
	SQL() *sql.DB

	// Classify wraps an error of the driver into an [*Error] that says what it
	// means. An error that already is one, and nil, come back as they are.
	Classify(err error) error
	// Close closes what the constructor opened, never what it was given.
	Close() error
}

// SessionOptions shape a session of dblock's own.
type SessionOptions struct {
	// Application is shown by the server's views. Default: "dblock".
	Application string
	// KeepAlive is the longest time between two signs of life that the session's
	// owner promises. Zero: no such promise.
	KeepAlive time.Duration
	// AnswerWithin is how long the owner waits for the answer to one before it
	// takes the session for lost.
	AnswerWithin time.Duration
	// StatementGap is for a session that will serve its holder's own statements
	// (Session.Statements, Session.Begin): the longest time between two of them,
	// during which there are no signs of life. Zero: it will serve none.
	StatementGap time.Duration
}

// LostWithin is how long after the server's last answer an owner who is cut off
// takes the session for lost. The server must not free its locks before.
func (o SessionOptions) LostWithin() time.Duration {
	return max(o.KeepAlive+o.AnswerWithin, o.KeepAlive, o.AnswerWithin) // the sum may overflow
}

// Silence is how long the server may hear nothing before it ends the session, 0
// for ever. It is longer than LostWithin by one sign of life that may be late.
func (o SessionOptions) Silence() time.Duration {
	if o.StatementGap > 0 {
		return o.StatementGap
	}
	if o.KeepAlive <= 0 {
		return 0
	}
	const margin = time.Second
	within := o.LostWithin()
	return max(within+o.KeepAlive+margin, within)
}

// Session is one connection to the server. It is not safe for concurrent use:
// its owner makes one call at a time.
//
// Session locks are re-entrant on every database: a session that asks twice for
// a key gets it twice. It is for the owner to prevent that.
type Session interface {
	// ID is the session as the server's own views name it: backend pid,
	// connection id, session id.
	ID() int64
	// Acquire takes all keys of the request in their order, or none. It returns a
	// fencing number for each key if the request asks for them, the first of
	// FenceStride.
	//
	// After an error of class NotAcquired nothing of the request is held and the
	// session is good. After any other error it is unknown what is held: the
	// owner must close the session.
	Acquire(ctx context.Context, r Request) ([]int64, error)
	// Renew gives back a key that the session holds and takes it again, behind those who
	// wait for it, in one round trip where the database can. Its errors are those of
	// Acquire, and class NotHeld if it was not held; after any the owner must close the
	// session.
	Renew(ctx context.Context, key Key) error
	// Release gives the keys back once each. Class NotHeld if one was not held.
	// After any error the owner must close the session.
	Release(ctx context.Context, keys []Key) error
	// Exchange tries for some keys and gives others back, once each, in one round
	// trip and without waiting for any holder. No key appears twice. It returns
	// which of the tries were granted and which of those given back had been held, in
	// lists that are good until the next call. It belongs to many callers, so no context
	// ends it, but a deadline.
	// After an error it is unknown what was done, for each key by itself; where the
	// session lives, Held tells.
	Exchange(deadline time.Time, tries, releases []Key) (granted, released []bool, err error)
	// Held asks the server which of the keys this session holds.
	Held(ctx context.Context, keys []Key) ([]bool, error)
	// Alive returns the reason if the server has ended the session and word of it
	// has arrived here. It asks the server only where the driver cannot look, until the
	// deadline.
	Alive(deadline time.Time) error
	// Room asks the server how many locks this session may hold, of all that it still
	// has room for. Zero, with an error of class Capacity that says why, means that
	// other sessions have taken the room.
	Room(ctx context.Context) (int, error)
	// Idle waits until ctx ends and returns nil, or until the server ends the
	// session and returns the reason. Where HearsLoss is false it only waits.
	// The session stays usable when ctx ends.
	Idle(ctx context.Context) error
	// Ping asks the server for a sign of life.
	Ping(ctx context.Context) error
	// AllowSilence lifts the limits after which the server would end this session
	// because it hears nothing, as they were found on a connection of somebody
	// else's; restore puts them back.
	AllowSilence(ctx context.Context) (restore func(ctx context.Context) error, err error)
	// Statements runs statements of the holder's own on the session. Its Native is a
	// Conn or a *pgx.Conn, whichever goes with what the DB was made of. Only sessions
	// with a StatementGap have it.
	Statements() Statements
	// Begin starts a transaction of the holder's own on the session. The locks do
	// not end with it.
	Begin(ctx context.Context, o *sql.TxOptions) (OwnedTx, error)
	// EndStatements rolls back what the holder's own statements have left open. After
	// any error the owner must close the session.
	EndStatements(ctx context.Context) error
	// Close ends the session, and with it every lock that it holds. It does not
	// return before the server was told, or before it is known that it cannot be
	// told; it takes no context since it must succeed after a cancelled one, and
	// is bounded by itself. Safe to call again.
	Close() error
}

// HoldsAll asks the server whether the session holds all of the keys.
func HoldsAll(ctx context.Context, s Session, keys []Key) (bool, error) {
	held, err := s.Held(ctx, keys)
	return err == nil && !slices.Contains(held, false), err
}

// Request is one call for several keys.
type Request struct {
	Keys []Key
	// Try: do not wait; an error of class NotAcquired if a key is not free.
	Try bool
	// Fence names the lock table that fencing numbers come from, out of the
	// FenceRows of the keys; nil: none.
	Fence *Table
}

// RowRequest is one call for several rows of a lock table.
type RowRequest struct {
	Table Table
	Keys  []Key // sorted by ID
	Try   bool  // do not wait
	// Wait bounds the wait of the whole call, so that the transaction survives; zero:
	// no bound but the context's, whose end may cost the connection.
	Wait time.Duration
	// Fence draws fencing numbers out of the FenceRows of the keys once all are locked.
	// They are committed beside the transaction, so that its rollback does not give
	// them again.
	Fence bool
}

// Shared reports whether a key is to be locked in shared mode.
func (r RowRequest) Shared() bool {
	return slices.ContainsFunc(r.Keys, func(k Key) bool { return k.Mode == Shared })
}

// Tx is what every kind of transaction has in common: *sql.Tx, *sql.Conn and
// those of sqlx, gorm and ent. A dialect also needs to read rows; it accepts
// what has QueryContext as in [Querier], and what its own adapters return.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// Querier is a Tx of database/sql.
type Querier interface {
	Tx
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Conn is a connection of database/sql that its user cannot close: *sql.Conn gives
// it back to the application's pool then, with the locks of its session.
type Conn interface {
	Querier
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// Statements runs statements on a connection of dblock's own.
type Statements interface {
	Tx
	// Native is the driver's own connection or transaction.
	Native() any
}

// OwnedTx is a transaction that dblock began and therefore ends. Its Native is an
// *sql.Tx or a pgx.Tx (DB.Natives).
type OwnedTx interface {
	Statements
	// Commit returns an error of class Closed if the transaction has ended already.
	Commit(ctx context.Context) error
	// Rollback does nothing after Commit, or if the transaction has ended
	// otherwise.
	Rollback(ctx context.Context) error
}

// Begun is what remains to be done by a dialect after the first statements of a
// transaction that it has begun: to roll it back if they failed.
func Begun(ctx context.Context, tx OwnedTx, err error) (OwnedTx, error) {
	if err == nil {
		return tx, nil
	}
	if failure := tx.Rollback(ctx); failure != nil {
		err = fmt.Errorf("%w; %w", err, failure)
	}
	return nil, err
}

// TxLocker is implemented by databases whose advisory locks can belong to a
// transaction and end with it.
type TxLocker interface {
	// AcquireTx takes the keys for the rest of the transaction. After an error of
	// class NotAcquired, Timeout or Deadlock the transaction is as
	// [Error.Remains] says.
	AcquireTx(ctx context.Context, tx Tx, r TxRequest) error
	// BeginLocked is DB.Begin followed by AcquireTx, in one round trip where the
	// driver can. After an error nothing is left of the transaction.
	BeginLocked(ctx context.Context, o *sql.TxOptions, r TxRequest) (OwnedTx, error)
	// SessionOf is the [Session.ID] of the connection that a transaction runs on.
	SessionOf(ctx context.Context, tx Tx) (int64, error)
}

// TxRequest is one call for several keys that the transaction will hold.
type TxRequest struct {
	Keys []Key
	Try  bool
	// Wait bounds the wait of the whole call on the server, so that the
	// transaction survives; zero: no bound but the context's, whose end may cost
	// the connection.
	Wait time.Duration
}

// Holding is one key that a session holds or waits for, as the server shows it.
// What a server does not tell is empty.
type Holding struct {
	ID          int64     // the key's id, 0 where the server knows names
	Name        string    // the key's server-side name, empty where it knows ids
	Mode        Mode      //
	Waiting     bool      // false: held
	Session     int64     //
	Application string    //
	User        string    //
	State       string    // what the session does: active, idle, idle in transaction, …
	Since       time.Time // when the wait began; for a holder, when its transaction or else its session began
}

// Table names a lock table.
type Table struct {
	Schema string // empty: the connection's default
	Name   string // empty: "locks"
}

// String is the table for people to read.
func (t Table) String() string {
	return UserTable{Schema: t.Schema, Name: cmp.Or(t.Name, "locks")}.String()
}

// Migration is one step that creates or changes a lock table.
type Migration struct {
	Version  int64
	Up, Down []string // statements, run in one transaction where the database can
}
