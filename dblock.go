// Package dblock locks with the database that you already run: PostgreSQL,
// MySQL, MariaDB or SQL Server.
//
// This package holds the vocabulary that the others share: [Key], [Mode], [DB],
// the sentinel errors and the [Observer]. The work is done in
//
//   - advisory: locks tied to a session (pg_advisory_lock, GET_LOCK,
//     sp_getapplock) or to a transaction,
//   - rowlock: rows of a lock table or of the application's own, SELECT … FOR
//     UPDATE, tied to the caller's transaction,
//   - deadlock: the order in which several keys are locked, a checker that finds
//     contradicting ones, the retry of transactions that the server chose as
//     victims, and who waits for whom,
//   - migrations: goose, guarded so that of N replicas one migrates.
//
// A [DB] comes from dialect/postgres, dialect/mysql or dialect/sqlserver; a
// program links only the drivers of those that it imports.
package dblock

import (
	"slices"
	"strconv"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// DB is a database to lock with. postgres.New, mysql.New and sqlserver.New make
// one of what an application already has, their Open of a DSN.
type DB = dialect.DB

// Tx is a transaction: *sql.Tx and those of sqlx and ent, what postgres.Tx makes
// of a pgx.Tx, and of a *gorm.DB in a transaction its
// Statement.ConnPool.(dblock.Tx).
type Tx = dialect.Tx

// Conn is a connection of database/sql as [advisory.OnSession] lends it: all of
// *sql.Conn that runs statements.
//
// [advisory.OnSession]: https://pkg.go.dev/github.com/dblock-go/dblock/advisory#OnSession
type Conn = dialect.Conn

// Mode is how a key is held.
type Mode = dialect.Mode

const (
	// Exclusive excludes every other holder. It is the default.
	Exclusive = dialect.Exclusive
	// Shared excludes exclusive holders only. See [Key.Shared].
	Shared = dialect.Shared
)

// MaxKeys is how many keys one call may name.
const MaxKeys = 1000

// Key names what is locked. Keys are equal if their parts are; the hash that
// turns them into what a database locks is stable and published in the README.
// The zero Key is invalid.
type Key struct {
	encoded string
	id      int64
	raw     bool
	mode    Mode
}

// NewKey makes a key of one or several parts, such as NewKey("account", "42").
// Parts are never merged: ("a", "bc") and ("ab", "c") are different keys. Any
// bytes and any length are fine. A key without a single byte in any part is
// invalid; the call that uses it returns [ErrInvalidKey].
func NewKey(parts ...string) Key {
	if !slices.ContainsFunc(parts, func(p string) bool { return p != "" }) {
		return Key{}
	}
	encoded := encode(parts)
	return Key{encoded: encoded, id: hash(encoded)}
}

// RawKey meets a key that other software uses: the integer itself on
// PostgreSQL, its decimal digits as a name, without the database's name, on
// MySQL, MariaDB and SQL Server.
func RawKey(id int64) Key { return Key{id: id, raw: true} }

// Shared is the same key, to be held in shared mode: any number of shared holds
// exist side by side, but none beside an exclusive one. Databases without
// shared advisory locks return [ErrUnsupported].
func (k Key) Shared() Key {
	k.mode = Shared
	return k
}

// Mode is Exclusive unless the key came from [Key.Shared].
func (k Key) Mode() Mode { return k.mode }

// ID is the integer that PostgreSQL and the lock table lock.
func (k Key) ID() int64 { return k.id }

// Name is the name that MySQL, MariaDB and SQL Server lock. The scope is the
// name of the database on MySQL and MariaDB, whose lock names are shared by the
// whole server, and empty on SQL Server.
func (k Key) Name(scope string) string { return k.Resolve(scope).Name }

// String is the key for people to read: its parts with slashes between them, a
// part that could be misread in quotes; a raw key as its number.
func (k Key) String() string {
	if k.raw {
		return strconv.FormatInt(k.id, 10)
	}
	text := make([]byte, 0, len(k.encoded))
	for part := range parts(k.encoded) {
		if len(text) > 0 {
			text = append(text, '/')
		}
		if readable(part) {
			text = append(text, part...)
		} else {
			text = strconv.AppendQuote(text, part)
		}
	}
	return string(text)
}

// readable is false for a part that could be misread without quotes.
func readable(part string) bool {
	plain := part != ""
	for i := 0; i < len(part) && plain; i++ {
		c := part[i]
		plain = '!' <= c && c <= '~' && c != '/' && c != '"' && c != '\\'
	}
	return plain || part != "" && !strings.ContainsAny(part, "/\"\\ ") && strconv.Quote(part) == `"`+part+`"`
}

// Parts are those that NewKey was given; none for a raw key.
func (k Key) Parts() []string {
	if k.raw {
		return nil
	}
	return slices.Collect(parts(k.encoded))
}

// label is String, shortened so that texts stay readable.
func (k Key) label() string {
	const longest = 100
	text := k.String()
	if len(text) <= longest {
		return text
	}
	return strings.ToValidUTF8(text[:longest], "") + "…"
}

// Valid is false for a key without a single byte.
func (k Key) Valid() bool { return k.raw || k.encoded != "" }
