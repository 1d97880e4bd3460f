package rowlock

import (
	"context"
	"database/sql/driver"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// Strength is what the lock of a row excludes. Any of them excludes writers.
type Strength = dialect.Strength

const (
	// ForNoKeyUpdate excludes every other lock of the row, but on PostgreSQL lets the
	// checks of foreign keys that refer to it pass (FOR NO KEY UPDATE). It is the
	// default. Elsewhere it is ForUpdate.
	ForNoKeyUpdate = dialect.NoKeyUpdate
	// ForUpdate excludes those checks too. It is for who is going to delete the row or
	// to change its key.
	ForUpdate = dialect.Update
	// ForShare excludes all but others with ForShare. To write a row that two hold so
	// is a deadlock.
	ForShare = dialect.Share
)

// RowsOptions shape [Rows].
type RowsOptions struct {
	// Schema is where the table is; on MySQL and MariaDB that is a database.
	// Default: the connection's own.
	Schema string
	// Table is the name of the table, which may be any. It must be given.
	Table string
	// Key are the columns of its primary key, or of another unique key without NULL.
	// All callers should use the same one. It must be given.
	Key []string
	// Strength is what the locks exclude. Default: ForNoKeyUpdate.
	Strength Strength
	// Checker learns in which order rows are locked inside other locks, for development and
	// tests. The key that it sees of a row has the table's name as its first part, as it is
	// above, so that this is the row's class, and then the values. Default: none, which
	// costs nothing.
	Checker *deadlock.Checker
	// Observer hears when rows were acquired.
	Observer dblock.Observer
}

// Rows locks rows of a table of the application's own, by their key. It needs no
// lock table, holds no connection and need not be closed; it is safe for concurrent
// use.
//
// The rows of one call are locked in the order of their keys as the database sorts
// them, whatever the values look like here: where 'a' and 'A' are one row to the
// column's collation, they are one row to all callers. So calls for several rows of
// one table cannot deadlock each other. Rows of several tables are for several
// calls, in an order for the application to keep.
//
// Identifiers are quoted, values never become SQL. Before the first lock the
// table is looked at, once for each DB: whether it exists, with those columns and a
// unique key of them.
type Rows struct {
	db       dblock.DB
	options  RowsOptions
	table    dialect.UserTable
	mistaken error // what was wrong with the arguments of NewRows
}

// NewRows returns Rows. A mistake in its arguments is returned by every call, as
// [dblock.ErrInvalidOption].
func NewRows(db dblock.DB, o RowsOptions) *Rows {
	r := &Rows{db: db, options: o, table: dialect.UserTable{Schema: o.Schema, Name: o.Table, Key: slices.Clone(o.Key)}}
	switch {
	case dialect.IsNil(db):
		r.mistaken = dialect.Invalidf("db is nil")
	case o.Table == "":
		r.mistaken = dialect.Invalidf("RowsOptions.Table is empty")
	case len(o.Key) == 0 || slices.Contains(o.Key, ""):
		r.mistaken = dialect.Invalidf("RowsOptions.Key is %q: name the columns of the primary key", o.Key)
	case o.Strength > ForShare:
		r.mistaken = dialect.Invalidf("RowsOptions.Strength is %d", o.Strength)
	}
	return r
}

// PrimaryKey is the key of a row: a value for each column of [RowsOptions].Key.
// Values may be what drivers take: strings, []byte, numbers, bool, time.Time, and
// types with a Value method (driver.Valuer), such as a uuid.UUID. The column's type
// decides what a value means: 1 and "1" are the same in a column of numbers.
type PrimaryKey []any

// PK is the key of a row.
func PK(values ...any) PrimaryKey { return values }

// Lock locks the rows for the rest of the transaction. It waits for other holders
// until ctx ends or the server's own limit is reached (innodb_lock_wait_timeout,
// lock_timeout), and locks all of the rows or returns an error.
//
// Errors: [dblock.ErrNotFound] with the keys that have no row,
// [dblock.ErrInvalidKey] for none, for more than [dblock.MaxKeys], for a key of
// another length than RowsOptions.Key, for a value that the column cannot have;
// [dblock.ErrInvalidOption] for a table or a key that does not exist,
// [dblock.ErrTimeout], [dblock.ErrCanceled], [dblock.ErrDeadlock],
// [dblock.ErrSerialization], [dblock.ErrUnsupported] for a tx that is no transaction,
// a read-only or an aborted one. The text ends with what is left of the transaction.
func (r *Rows) Lock(ctx context.Context, tx dblock.Tx, keys ...PrimaryKey) error {
	return r.lock(ctx, "lock", tx, keys, dialect.UserRows{})
}

// TryLock is [Rows.Lock] without waiting: if somebody else has locked one of the rows
// the error is [dblock.ErrNotAcquired].
func (r *Rows) TryLock(ctx context.Context, tx dblock.Tx, keys ...PrimaryKey) error {
	return r.lock(ctx, "try", tx, keys, dialect.UserRows{Try: true})
}

// LockWithin is [Rows.Lock] that waits at most so long, for all of the rows together,
// and then returns [dblock.ErrTimeout]. Unlike the end of ctx that leaves the
// transaction usable. Fractions of a second count on every database.
func (r *Rows) LockWithin(ctx context.Context, tx dblock.Tx, wait time.Duration, keys ...PrimaryKey) error {
	if wait <= 0 {
		return r.failed("lock", keys, dialect.Invalidf("the wait is %v: use TryLock not to wait", wait))
	}
	return r.lock(ctx, "lock", tx, keys, dialect.UserRows{Wait: wait})
}

func (r *Rows) lock(ctx context.Context, op string, tx dblock.Tx, keys []PrimaryKey, request dialect.UserRows) error {
	if err := r.check(tx); err != nil {
		return r.failed(op, keys, err)
	}
	request.Table, request.Strength = r.table, r.options.Strength
	var err error
	if request.Keys, err = r.values(keys); err != nil {
		return r.failed(op, keys, err)
	}
	start := time.Now()
	hold := r.beginHold(ctx, tx, keys, request.Try)
	if err := r.db.LockUserRows(ctx, tx, request); err != nil {
		return r.failed(op, keys, withRemains(r.db, err))
	}
	hold.Acquired()
	r.observe(ctx, keys, time.Since(start))
	return nil
}

// beginHold tells the Checker of a call. In which order the rows are locked only the
// database knows.
func (r *Rows) beginHold(ctx context.Context, tx dblock.Tx, keys []PrimaryKey, try bool) *deadlock.Hold {
	if r.options.Checker == nil {
		return nil
	}
	rows := r.readable(keys)
	if r.options.Strength == ForShare {
		for i, row := range rows {
			rows[i] = row.Shared()
		}
	}
	return r.options.Checker.Begin(ctx, deadlock.Call{Kind: "table row", Keys: rows, Try: try, Tx: tx})
}

func (r *Rows) check(tx dblock.Tx) error {
	if r.mistaken != nil {
		return r.mistaken
	}
	return checkTx(tx)
}

// values are the keys in the few types that the dialects know.
func (r *Rows) values(keys []PrimaryKey) ([][]driver.Value, error) {
	switch {
	case len(keys) == 0:
		return nil, invalidKey("name at least one key")
	case len(keys) > dblock.MaxKeys:
		return nil, invalidKey("%d keys in one call, at most %d: lock something coarser", len(keys), dblock.MaxKeys)
	}
	all := make([][]driver.Value, len(keys))
	for i, key := range keys {
		if len(key) != len(r.table.Key) {
			return nil, invalidKey("key %d of %d has %d values, for the %d columns %q", i+1, len(keys), len(key), len(r.table.Key), r.table.Key)
		}
		all[i] = make([]driver.Value, len(key))
		for n, value := range key {
			if large, ok := value.(uint64); ok { // as of a claim, and more than drivers take
				value = strconv.FormatUint(large, 10)
			}
			converted, err := driver.DefaultParameterConverter.ConvertValue(value)
			switch {
			case err != nil:
				return nil, &dialect.Error{Class: dblock.ErrInvalidKey, Err: err,
					Hint: fmt.Sprintf("pass the value of %s as a number or a string", r.table.Key[n])}
			case converted == nil:
				return nil, invalidKey("key %d of %d has NULL for %s", i+1, len(keys), r.table.Key[n])
			}
			all[i][n] = converted
		}
	}
	return all, nil
}

func invalidKey(format string, args ...any) error {
	return &dialect.Error{Class: dblock.ErrInvalidKey, Hint: fmt.Sprintf(format, args...)}
}

func (r *Rows) failed(op string, keys []PrimaryKey, err error) error {
	if dialect.IsNil(r.db) {
		return fmt.Errorf("dblock: %s: %w", op, err)
	}
	return dblock.NewError(op, r.db, r.readable(keys), err)
}

func (r *Rows) observe(ctx context.Context, keys []PrimaryKey, d time.Duration) {
	if r.options.Observer != nil {
		r.options.Observer.Observe(ctx, dblock.Event{Kind: dblock.EventAcquired, Dialect: r.db.Name(), Keys: r.readable(keys), Duration: d})
	}
}

// readable names rows in errors and events by the table and the values.
func (r *Rows) readable(keys []PrimaryKey) []dblock.Key {
	if len(keys) == 0 {
		return []dblock.Key{dblock.NewKey(r.table.String())}
	}
	readable := make([]dblock.Key, len(keys))
	for i, key := range keys {
		parts := []string{r.table.String()}
		for _, value := range key {
			parts = append(parts, text(value))
		}
		readable[i] = dblock.NewKey(parts...)
	}
	return readable
}

func text(value any) string {
	if v, err := driver.DefaultParameterConverter.ConvertValue(value); err == nil {
		value = v
	}
	if b, ok := value.([]byte); ok {
		return string(b)
	}
	return fmt.Sprint(value)
}
