package postgres

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dblock-go/dblock/dialect"
)

// Tx makes a transaction for dblock of a pgx.Tx, and nil of nil. Those of
// database/sql need no adapter.
func Tx(tx pgx.Tx) dialect.Tx {
	if dialect.IsNil(tx) {
		return nil
	}
	return pgxTx{tx}
}

// statement is one with parameters that are numbers and strings.
type statement struct {
	query string
	args  []any
}

// text has the parameters written out.
func (s statement) text() string {
	if len(s.args) == 0 {
		return s.query
	}
	return parameter.ReplaceAllStringFunc(s.query, func(token string) string {
		n, err := strconv.Atoi(strings.TrimPrefix(token, "$"))
		if err != nil {
			return token
		}
		if text, ok := s.args[n-1].(string); ok {
			return literal(text)
		}
		return fmt.Sprintf("(%v)", s.args[n-1])
	})
}

// parameter finds parameters, and quoted names as a whole: "a$1" has none.
var parameter = regexp.MustCompile(`"[^"]*"|\$\d+`)

// transaction is what the locks need of the caller's transaction.
type transaction interface {
	// free runs a statement that does not wait, and returns how many rows it had.
	// It has no savepoint, so that its errors abort the transaction; asked is false
	// if the driver could not tell whether there is a transaction.
	free(ctx context.Context, s statement) (rows int64, asked bool, err error)
	// exec sends statements without parameters in one message, which all drivers
	// do by the simple protocol, and returns how many rows the last one had.
	// See https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-MULTI-STATEMENT.
	exec(ctx context.Context, statements string) (int64, error)
	// inSavepoint runs a statement in a savepoint, which it releases, in one message.
	inSavepoint(ctx context.Context, s statement) error
	ints(ctx context.Context, query string, args ...any) ([]int64, error)
	// read calls a function for each row.
	read(ctx context.Context, row func(scan func(...any) error) error, query string, args ...any) error
	// open returns an error where there is no transaction, which it asks the server
	// only if it must.
	open(ctx context.Context) error
}

// transactionOf prepares a call with the caller's transaction. Where ctx has
// ended it sends nothing: no savepoint would guard what follows.
func transactionOf(ctx context.Context, tx dialect.Tx) (transaction, error) {
	if dialect.IsNil(tx) {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the transaction is nil"}
	}
	if err := ctx.Err(); err != nil {
		return nil, withRemains(classify(ctx, err), dialect.RemainsUsable)
	}
	switch t := tx.(type) {
	case transaction:
		return t, nil
	case dialect.Querier:
		return sqlTx{t}, nil
	}
	return nil, &dialect.Error{Class: dialect.Unsupported,
		Err:  fmt.Errorf("transaction of type %T", tx),
		Hint: "pass postgres.Tx(tx) for a pgx.Tx, or what has ExecContext and QueryContext such as *sql.Tx"}
}

// SessionOf asks for the transaction's server process.
func (d *DB) SessionOf(ctx context.Context, tx dialect.Tx) (int64, error) {
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return 0, err
	}
	pids, err := t.ints(ctx, pidQuery)
	if err != nil {
		return 0, classify(ctx, err)
	}
	return pids[0], nil
}

// noTransaction is the code of a savepoint outside of one.
const noTransaction = "25P01"

const (
	savepoint = "SAVEPOINT dblock"
	release   = "RELEASE SAVEPOINT dblock"
	rollback  = "ROLLBACK TO SAVEPOINT dblock"
)

// inTurn makes one message of statements.
func inTurn(statements ...string) string { return strings.Join(statements, "; ") }

// guarded runs a statement so that the transaction survives its failure.
func guarded(ctx context.Context, t transaction, s statement) error {
	if err := t.inSavepoint(ctx, s); err != nil {
		return rollBack(ctx, t, err)
	}
	return nil
}

// limitedTo is guarded with a bound on how long the server waits for anything.
func limitedTo(ctx context.Context, t transaction, setting string, limit time.Duration, s statement) error {
	if _, err := t.exec(ctx, inTurn(savepoint, limited(setting, limit, s.text()), release)); err != nil {
		return rollBack(ctx, t, err)
	}
	return nil
}

// within is guarded with a bound on the wait of one statement, however many locks it
// waits for: lock_timeout would begin anew with each.
func within(ctx context.Context, t transaction, limit time.Duration, s statement) error {
	began := time.Now()
	return pastLimit(ctx, began, limit, limitedTo(ctx, t, "statement_timeout", limit, s))
}

// pastLimit tells the end of a limit from other reasons to cancel a statement.
func pastLimit(ctx context.Context, began time.Time, limit time.Duration, err error) error {
	if sqlState(err) == "57014" && ctx.Err() == nil && time.Since(began) >= limit {
		return changed(err, func(e *dialect.Error) {
			e.Class, e.Err = dialect.Timeout, fmt.Errorf("wait limit of %v: %w", limit, e.Err)
		})
	}
	return err
}

// unguarded is the error of a call that never made its savepoint, nil if it may
// have made it.
func unguarded(ctx context.Context, err error) error {
	switch sqlState(err) {
	case noTransaction, "25P02":
		return classify(ctx, err)
	case "42601": // of several statements in a prepared one: https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-EXT-QUERY
		return &dialect.Error{Class: dialect.Unsupported, Code: "42601", Err: err, Hint: callerHint, Remains: dialect.RemainsAborted}
	}
	if ended := ctx.Err(); ended != nil && errors.Is(err, ended) && pgconn.SafeToRetry(err) { // pgx sent nothing
		return withRemains(classify(ctx, err), dialect.RemainsUsable)
	}
	return nil
}

// rollBack undoes what a call did since its savepoint, locks and settings
// included, and returns the call's error with what remains of the transaction.
func rollBack(ctx context.Context, t transaction, cause error) error {
	if err := unguarded(ctx, cause); err != nil {
		return err
	}
	cause = classify(ctx, cause)
	if sqlState(cause) == "40001" { // no statement of this transaction can succeed any more
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	_, err := t.exec(ctx, inTurn(rollback, release))
	err = explain(err)
	switch {
	case err == nil:
		return withRemains(cause, dialect.RemainsUsable)
	case dialect.ClassOf(err) == dialect.Lost, dialect.ClassOf(err) == dialect.Closed:
		return withRemains(cause, dialect.RemainsNothing)
	case sqlState(err) == "3B001": // no savepoint was sent: database/sql found that ctx ended, or pgx that the statement cannot be prepared
		return withRemains(cause, dialect.RemainsAborted)
	}
	return join(withRemains(cause, dialect.RemainsUnknown), err)
}

// limited runs a statement, or several, under a setting of its own. A setting made
// after a savepoint outlives its release, so the caller's value is kept in a setting
// of dblock's until then.
func limited(setting string, limit time.Duration, statement string) string {
	return fmt.Sprintf("SELECT set_config('dblock.saved', current_setting('%[1]s'), true); SET LOCAL %[1]s = %[2]s; "+
		"%[3]s; SELECT set_config('%[1]s', current_setting('dblock.saved'), true)", setting, milliseconds(limit), statement)
}

// literal quotes a string whatever standard_conforming_strings says.
func literal(s string) string {
	s = strings.ReplaceAll(s, "'", "''")
	if strings.Contains(s, `\`) {
		return ` E'` + strings.ReplaceAll(s, `\`, `\\`) + `'`
	}
	return `'` + s + `'`
}

type pgxTx struct{ tx pgx.Tx }

func (t pgxTx) Native() any { return t.tx }

func (t pgxTx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	tag, err := t.tx.Exec(ctx, query, args...)
	return driver.RowsAffected(tag.RowsAffected()), err
}

// free knows from the server's last answer in which state the connection is:
// https://www.postgresql.org/docs/current/protocol-message-formats.html#PROTOCOL-MESSAGE-FORMATS-READYFORQUERY.
func (t pgxTx) free(ctx context.Context, s statement) (rows int64, asked bool, err error) {
	c := t.tx.Conn()
	if c == nil { // of a pgx.Tx that is not pgx's own
		return 0, false, nil
	}
	tag, err := t.tx.Exec(ctx, s.query, s.args...)
	if err != nil {
		err = cmp.Or(unguarded(ctx, err), classify(ctx, err))
		if c.IsClosed() {
			err = withRemains(err, dialect.RemainsNothing)
		}
		return 0, true, err
	}
	if idle(c) {
		return 0, true, notBegun()
	}
	return tag.RowsAffected(), true, nil
}

func idle(c *pgx.Conn) bool { return c.PgConn().TxStatus() == 'I' }

func notBegun() error {
	m, _ := meaningOf(noTransaction)
	return &dialect.Error{Class: m.class, Code: noTransaction, Hint: m.hint}
}

func (t pgxTx) open(ctx context.Context) error {
	if c := t.tx.Conn(); c == nil || idle(c) { // pgx knows one that has ended
		return asked(ctx, t)
	}
	return nil
}

// asked has the server say whether there is a transaction.
func asked(ctx context.Context, t transaction) error {
	_, err := t.exec(ctx, inTurn(savepoint, release))
	return cmp.Or(unguarded(ctx, err), classify(ctx, err))
}

func (t pgxTx) exec(ctx context.Context, statements string) (int64, error) {
	return rowsOf(t.ExecContext(ctx, statements))
}

// inSavepoint is a batch, whose statements pgx need not prepare each time.
func (t pgxTx) inSavepoint(ctx context.Context, s statement) error {
	var batch pgx.Batch
	batch.Queue(savepoint)
	batch.Queue(s.query, s.args...)
	batch.Queue(release)
	return t.tx.SendBatch(ctx, &batch).Close()
}

func (t pgxTx) ints(ctx context.Context, query string, args ...any) ([]int64, error) {
	rows, err := t.tx.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[int64])
}

func (t pgxTx) read(ctx context.Context, row func(scan func(...any) error) error, query string, args ...any) error {
	rows, err := t.tx.Query(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

type sqlTx struct{ dialect.Querier }

func (sqlTx) free(context.Context, statement) (rows int64, asked bool, err error) {
	return 0, false, nil
}

func (t sqlTx) exec(ctx context.Context, statements string) (int64, error) {
	return rowsOf(t.ExecContext(ctx, statements))
}

func (t sqlTx) inSavepoint(ctx context.Context, s statement) error {
	_, err := t.exec(ctx, inTurn(savepoint, s.text(), release))
	return err
}

func (t sqlTx) ints(ctx context.Context, query string, args ...any) (ints []int64, err error) {
	rows, err := t.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = join(err, rows.Close()) }()
	for rows.Next() {
		var n int64
		if err := rows.Scan(&n); err != nil {
			return nil, err
		}
		ints = append(ints, n)
	}
	return ints, rows.Err()
}

func (t sqlTx) open(ctx context.Context) error {
	switch t.Querier.(type) {
	case *sql.Tx, ownedSQLTx:
		return nil
	}
	return asked(ctx, t)
}

func (t sqlTx) read(ctx context.Context, row func(scan func(...any) error) error, query string, args ...any) (err error) {
	rows, err := t.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer func() { err = join(err, rows.Close()) }()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// Begin starts a transaction; its Native is a pgx.Tx over a pgx pool, else an
// *sql.Tx.
func (d *DB) Begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	if d.pool == nil {
		d.prepareBeside(ctx)
		return beginSQL(ctx, d.sql.BeginTx, o)
	}
	return beginPgx(ctx, d.pool.BeginTx, o)
}

// beginWith begins a transaction with a statement, and returns how many rows that
// had. Through a pgx pool it is one round trip; database/sql begins by itself.
func (d *DB) beginWith(ctx context.Context, o *sql.TxOptions, s statement) (dialect.OwnedTx, int64, error) {
	if d.pool == nil {
		tx, err := d.Begin(ctx, o)
		if err != nil {
			return nil, 0, err
		}
		rows, err := rowsOf(tx.ExecContext(ctx, s.query, s.args...))
		tx, err = dialect.Begun(ctx, tx, classify(ctx, err))
		return tx, rows, err
	}
	options, err := pgxOptions(o)
	if err != nil {
		return nil, 0, err
	}
	var rows int64
	var batch pgx.Batch
	batch.BeginTx(options)
	batch.Queue(s.query, s.args...).Exec(func(tag pgconn.CommandTag) error {
		rows = tag.RowsAffected()
		return nil
	})
	results := d.pool.SendBatch(ctx, &batch)
	tx, err := dialect.Begun(ctx, ownedPgxTx{pgxTx{results.Tx()}}, classify(ctx, results.Close()))
	return tx, rows, err
}

func rowsOf(r sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

func beginSQL(ctx context.Context, begin func(context.Context, *sql.TxOptions) (*sql.Tx, error), o *sql.TxOptions) (dialect.OwnedTx, error) {
	if _, err := pgxOptions(o); err != nil { // which drivers would refuse in words of their own
		return nil, err
	}
	tx, err := begin(ctx, o)
	if err != nil {
		return nil, classify(ctx, err)
	}
	return ownedSQLTx{tx}, nil
}

func beginPgx(ctx context.Context, begin func(context.Context, pgx.TxOptions) (pgx.Tx, error), o *sql.TxOptions) (dialect.OwnedTx, error) {
	options, err := pgxOptions(o)
	if err != nil {
		return nil, err
	}
	tx, err := begin(ctx, options)
	if err != nil {
		return nil, classify(ctx, err)
	}
	return ownedPgxTx{pgxTx{tx}}, nil
}

func pgxOptions(o *sql.TxOptions) (options pgx.TxOptions, err error) {
	if o == nil {
		return options, nil
	}
	if o.ReadOnly {
		options.AccessMode = pgx.ReadOnly
	}
	switch o.Isolation {
	case sql.LevelDefault:
	case sql.LevelReadUncommitted:
		options.IsoLevel = pgx.ReadUncommitted
	case sql.LevelReadCommitted:
		options.IsoLevel = pgx.ReadCommitted
	case sql.LevelRepeatableRead, sql.LevelSnapshot:
		options.IsoLevel = pgx.RepeatableRead
	case sql.LevelSerializable:
		options.IsoLevel = pgx.Serializable
	default:
		return options, &dialect.Error{Class: dialect.Unsupported, Err: fmt.Errorf("isolation level %v", o.Isolation),
			Hint: "use Read Committed, Repeatable Read or Serializable"}
	}
	return options, nil
}

// pgxStatements is a session's connection for its holder.
type pgxStatements struct{ *pgx.Conn }

func (c pgxStatements) Native() any { return c.Conn }

func (c pgxStatements) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	tag, err := c.Exec(ctx, query, args...)
	return driver.RowsAffected(tag.RowsAffected()), err
}

type ownedPgxTx struct{ pgxTx }

func (t ownedPgxTx) Commit(ctx context.Context) error { return classify(ctx, t.tx.Commit(ctx)) }

func (t ownedPgxTx) Rollback(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	return rolledBack(t.tx.Rollback(ctx))
}

type ownedSQLTx struct{ *sql.Tx }

func (t ownedSQLTx) Native() any { return t.Tx }

func (t ownedSQLTx) Commit(ctx context.Context) error { return classify(ctx, t.Tx.Commit()) }

func (t ownedSQLTx) Rollback(context.Context) error { return rolledBack(t.Tx.Rollback()) }

// rolledBack is nil where the transaction is over in any case: it had ended, or
// its connection is gone or was closed when a context ended, and the server
// rolls back.
func rolledBack(err error) error {
	err = explain(err)
	switch dialect.ClassOf(err) {
	case dialect.Closed, dialect.Lost, dialect.Canceled, dialect.Timeout:
		return nil
	}
	return err
}
