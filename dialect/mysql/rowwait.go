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
// never longer than ctx, whose end costs the connection.
//
// innodb_lock_wait_timeout counts in seconds, so the limit is that of the statement,
// which counts in milliseconds on both servers and ends a wait for a row as it does
// all else. It waits only after it knows whom to kill when the wait is abandoned.
func (db *DB) waitForRow(ctx context.Context, q dialect.Querier, query string, limit time.Duration, run func(query string) error) error {
	waiter, err := threadOf(ctx, q)
	if err != nil {
		return err
	}
	if limit > 0 {
		query = db.flavor.limited(query, max(limit, time.Millisecond))
	}
	query = unique(q, query)
	err = run(query)
	switch {
	case err == nil:
	case limit > 0 && (isNumber(err, errQueryTimeout) || isNumber(err, errStatementTimeout)):
		var cause *dialect.Error
		if errors.As(db.Classify(err), &cause) {
			return &dialect.Error{Class: dialect.Timeout, Code: cause.Code, Remains: cause.Remains, Err: fmt.Errorf("wait limit: %w", err)}
		}
	case ctx.Err() != nil && !answered(err):
		db.killIn(waiter, query)
	}
	return err
}

// limitedByHint is a SELECT with MySQL's limit:
// https://dev.mysql.com/doc/refman/en/optimizer-hints.html#optimizer-hints-execution-time
func limitedByHint(query string, limit time.Duration) string {
	return fmt.Sprintf("SELECT /*+ MAX_EXECUTION_TIME(%d) */%s", limit.Milliseconds(), strings.TrimPrefix(query, "SELECT"))
}

// limitedBySet is a statement with MariaDB's limit:
// https://mariadb.com/docs/server/reference/sql-statements/administrative-sql-statements/set-commands/set-statement
func limitedBySet(query string, limit time.Duration) string {
	return fmt.Sprintf("SET STATEMENT max_statement_time = %.3f FOR %s", limit.Seconds(), query)
}
