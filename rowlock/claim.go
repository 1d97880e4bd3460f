package rowlock

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// Order is a column to sort by.
type Order = dialect.Order

// ClaimOptions say which rows [Rows.Claim] takes.
type ClaimOptions struct {
	// Limit is how many rows at most. Default: 1.
	Limit int
	// Where is a condition on the table's columns, which alone decides whether a row
	// may be taken. It is SQL of the database at hand and must not contain what users
	// type in: that goes into Args, for which it has the placeholders of the driver,
	// $1 on PostgreSQL, ? on MySQL and MariaDB, @p1 on SQL Server. Default: any row.
	Where string
	// Args are the values of the placeholders.
	Args []any
	// OrderBy says which rows come first. Default: by the key. An index that has the
	// columns of Where and OrderBy spares the database to sort all that are left.
	OrderBy []Order
}

// Claim locks up to Limit rows that nobody has locked, for the rest of the
// transaction, and returns their keys in the order of OrderBy. It never waits, and
// skips the rows that others have: of many workers each gets rows of its own. It
// returns none, and no error, if none is free. Who claims rows changes or deletes them
// so that Where is not true of them any more, and commits; if the worker dies
// instead, the rows are free again.
//
// It locks no more rows than it returns, save those that somebody changed while it
// looked. On MySQL and MariaDB the candidates are read on a second connection, so
// that rows which this transaction itself has written and not yet committed are
// not seen as it left them, and each is then locked by its key if Where is still
// true; use READ COMMITTED there, since under REPEATABLE READ InnoDB also locks the
// gap behind a row that it skips, and inserts into that gap wait.
//
// Rows that this transaction has locked itself count as free: a second claim returns
// them again as long as Where is true of them.
//
// To a deadlock.Checker a claim is a try, of the rows that it was granted.
//
// The values of the keys are an int64 for an integer (a uint64 if it needs one), a
// []byte for bytes, and else the text that the database has for them; see
// [PrimaryKey.Scan].
//
// Errors: those of [Rows.Lock], and [dblock.ErrInvalidOption] for options that the server
// does not take, which on PostgreSQL abort the transaction.
func (r *Rows) Claim(ctx context.Context, tx dblock.Tx, o ClaimOptions) ([]PrimaryKey, error) {
	err := r.check(tx)
	switch {
	case err != nil:
	case o.Limit < 0:
		err = dialect.Invalidf("ClaimOptions.Limit is %d", o.Limit)
	case o.Where == "" && len(o.Args) > 0:
		err = dialect.Invalidf("ClaimOptions.Args without a Where")
	case slices.ContainsFunc(o.OrderBy, func(by Order) bool { return by.Column == "" }):
		err = dialect.Invalidf("a column of ClaimOptions.OrderBy is empty")
	case r.options.Strength == ForShare:
		err = dialect.Invalidf("a claim is exclusive: RowsOptions.Strength must not be ForShare")
	}
	if err != nil {
		return nil, r.failed("claim", nil, err)
	}
	start := time.Now()
	rows, err := r.db.ClaimUserRows(ctx, tx, dialect.UserClaim{Table: r.table, Strength: r.options.Strength,
		Limit: max(o.Limit, 1), Where: o.Where, Args: o.Args, OrderBy: o.OrderBy})
	if err != nil {
		return nil, r.failed("claim", nil, withRemains(r.db, err))
	}
	keys := make([]PrimaryKey, len(rows))
	for i, row := range rows {
		keys[i] = row
	}
	if len(keys) > 0 {
		r.beginHold(ctx, tx, keys, true).Acquired()
		r.observe(ctx, keys, time.Since(start))
	}
	return keys, nil
}

// Scan copies the values of the key: into a *int64, *int, *string, *[]byte, *any, or
// an sql.Scanner, such as *sql.Null[T] or *uuid.UUID.
func (k PrimaryKey) Scan(dest ...any) error {
	if len(dest) != len(k) {
		return dialect.Invalidf("the key has %d values, to be scanned into %d", len(k), len(dest))
	}
	for i, value := range k {
		if err := assign(dest[i], value); err != nil {
			return &dialect.Error{Class: dblock.ErrInvalidOption, Err: fmt.Errorf("value %d of the key: %w", i+1, err)}
		}
	}
	return nil
}

func assign(dest, value any) (err error) {
	switch d := dest.(type) {
	case *any:
		*d = value
	case *string:
		*d = text(value)
	case *[]byte:
		*d = []byte(text(value))
	case *int64:
		*d, err = strconv.ParseInt(text(value), 10, 64)
	case *int:
		*d, err = strconv.Atoi(text(value))
	case sql.Scanner:
		err = d.Scan(value)
	default:
		err = fmt.Errorf("cannot scan into a %T", dest)
	}
	return err
}
