package main

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// statements is what writing to a witness row needs of a connection or a
// transaction, whatever the driver.
type statements interface {
	exec(ctx context.Context, query string, args ...any) (affected int64, err error)
	row(ctx context.Context, query string, args []any, dest ...any) error
}

type overSQL struct {
	dblock.DB
	conn interface {
		ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
		QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	}
}

func (s overSQL) exec(ctx context.Context, query string, args ...any) (int64, error) {
	result, err := s.conn.ExecContext(ctx, numbered(s.DB, query), args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (s overSQL) row(ctx context.Context, query string, args []any, dest ...any) error {
	return s.conn.QueryRowContext(ctx, numbered(s.DB, query), args...).Scan(dest...)
}

type overPgx struct {
	dblock.DB
	tx pgx.Tx
}

func (s overPgx) exec(ctx context.Context, query string, args ...any) (int64, error) {
	tag, err := s.tx.Exec(ctx, numbered(s.DB, query), args...)
	return tag.RowsAffected(), err
}

func (s overPgx) row(ctx context.Context, query string, args []any, dest ...any) error {
	return s.tx.QueryRow(ctx, numbered(s.DB, query), args...).Scan(dest...)
}

// numbered writes placeholders as the database wants them.
func numbered(db dblock.DB, query string) string {
	if db.Name() != "postgres" {
		return query
	}
	var b strings.Builder
	for i, part := range strings.Split(query, "?") {
		if i > 0 {
			fmt.Fprintf(&b, "$%d", i)
		}
		b.WriteString(part)
	}
	return b.String()
}

const (
	raiseFence = "UPDATE witness SET fence = ? WHERE name = ? AND way = ? AND fence < ?"
	readRow    = "SELECT n, fence FROM witness WHERE name = ? AND way = ?"
	writeRow   = "UPDATE witness SET n = ?, fence = ? WHERE name = ? AND way = ? AND fence <= ?"
	writeLog   = "INSERT INTO witness_log (name, way, n, token, op) VALUES (?, ?, ?, ?, ?)"
)

// writeFenced adds one to a witness row through an ordinary connection, without
// a row lock between reading and writing. The lock alone does not guard that: its
// holder may have lost it without knowing. So the holder first shows its number
// to the row: from then on the row refuses those who held the key before, whose
// late writes would come between its reading and its writing otherwise.
//
// It returns false if it is not known whether the write was committed. Then it may
// still be on its way, and the same number must not be used for another one.
func (c *client) writeFenced(ctx context.Context, a history.Record, name string, token int64) (known bool) {
	way := history.Fenced
	pool := c.db.SQL()
	plain := overSQL{c.db, pool}
	if _, err := plain.exec(ctx, raiseFence, token, name, way, token); err != nil {
		return true // a fault: nothing was written
	}
	var n, fence int64
	if err := plain.row(ctx, readRow, []any{name, way}, &n, &fence); err != nil {
		return true
	}
	if fence > token {
		c.record(history.Record{At: history.Now(), What: history.Stale, Op: a.Op, Row: name, Way: way})
		return true
	}
	pause(ctx, c.upTo(longestPause))
	tx, err := pool.BeginTx(ctx, nil)
	if err != nil {
		return true
	}
	defer tx.Rollback() // does nothing after the commit
	affected, err := add(ctx, overSQL{c.db, tx}, a, name, way, n+1, token)
	switch {
	case err != nil:
		return false
	case affected == 0:
		c.record(history.Record{At: history.Now(), What: history.Stale, Op: a.Op, Row: name, Way: way})
		return true
	case tx.Commit() != nil:
		return false
	}
	c.record(history.Record{At: history.Now(), What: history.Wrote, Op: a.Op, Row: name, Way: way, N: n + 1})
	return true
}

// add writes a witness row and, in the same transaction, its log.
func add(ctx context.Context, tx statements, a history.Record, name string, way history.Way, n, token int64) (affected int64, err error) {
	affected, err = tx.exec(ctx, writeRow, n, token, name, way, token)
	if err == nil && affected > 0 {
		_, err = tx.exec(ctx, writeLog, name, way, n, token, a.Op)
	}
	return affected, err
}
