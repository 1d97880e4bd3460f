package mysql

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// waitForRow runs a statement that may wait for a row: at most for the limit if there
// is one, after which the error has class Timeout and the transaction goes on, and
// never longer than ctx, whose end costs the connection. With a limit the statement is a
// locking SELECT.
//
// innodb_lock_wait_timeout counts in seconds, so the limit is that of the statement,
// which counts in milliseconds on both servers and ends a wait for a row as it does
// all else, perhaps after the row was granted: the server tells by granting it once
// more. It waits only after it knows whom to kill when the wait is abandoned.
func (db *DB) waitForRow(ctx context.Context, q dialect.Querier, query string, limit time.Duration, run func(query string) error) error {
	waiter, err := threadOf(ctx, q)
	if err != nil {
		return err
	}
	waiting := query
	if limit > 0 {
		waiting = db.flavor.limited(query, max(limit, time.Millisecond))
	}
	waiting = unique(q, waiting)
	err = run(waiting)
	switch {
	case err == nil:
	case limit > 0 && (isNumber(err, errQueryTimeout) || isNumber(err, errStatementTimeout)):
		late := asLimit(db.Classify(err))
		if db.rollbackOnTimeout {
			return doubtful(late)
		}
		if err := run(query + " NOWAIT"); !isBusy(err) {
			return err
		}
		return late
	case interruptedWait(err):
		return doubtful(db.Classify(err))
	case ctx.Err() != nil && !answered(err):
		db.killIn(waiter, waiting)
	}
	return err
}

// waitForPlace is waitForRow for an INSERT, for which MySQL has no limit of a statement's
// own. A second connection ends it, as the server does where there is one.
func (db *DB) waitForPlace(ctx context.Context, q dialect.Querier, insert string, limit time.Duration) error {
	return db.waitForRow(ctx, q, insert, 0, func(query string) error {
		if limit == 0 {
			_, err := q.ExecContext(ctx, query)
			return err
		}
		waiter, err := threadOf(ctx, q)
		if err != nil {
			return err
		}
		ended := make(chan struct{})
		timer := time.AfterFunc(limit, func() {
			defer close(ended)
			db.endIn(waiter, query, "KILL QUERY %d")
		})
		_, err = q.ExecContext(ctx, query)
		if timer.Stop() {
			return err
		}
		<-ended
		if isNumber(err, errQueryInterrupted) {
			return asLimit(db.Classify(err))
		}
		// What came too late to end it would end the next statement.
		if _, late := q.ExecContext(ctx, "DO 0"); err == nil && !isNumber(late, errQueryInterrupted) {
			err = late
		}
		return err
	})
}

// interruptedWait is true of what ends a wait that may just have been granted.
func interruptedWait(err error) bool {
	return isNumber(err, errQueryInterrupted) || isNumber(err, errQueryTimeout) || isNumber(err, errStatementTimeout)
}

func asLimit(err error) error {
	var e *dialect.Error
	if !errors.As(err, &e) {
		return err
	}
	return &dialect.Error{Class: dialect.Timeout, Code: e.Code, Remains: e.Remains, Err: fmt.Errorf("wait limit: %w", e.Err)}
}

// limitedByHint is a SELECT with MySQL's limit:
// https://dev.mysql.com/doc/refman/en/optimizer-hints.html#optimizer-hints-execution-time
func limitedByHint(query string, limit time.Duration) string {
	return hinted(query, fmt.Sprintf("MAX_EXECUTION_TIME(%d)", limit.Milliseconds()))
}

func hinted(query, hint string) string {
	return "SELECT /*+ " + hint + " */" + strings.TrimPrefix(query, "SELECT")
}

// limitedBySet is a statement with MariaDB's limit:
// https://mariadb.com/docs/server/reference/sql-statements/administrative-sql-statements/set-commands/set-statement
func limitedBySet(query string, limit time.Duration) string {
	return fmt.Sprintf("SET STATEMENT max_statement_time = %.3f FOR %s", limit.Seconds(), query)
}
