package mysql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// Exchange gives keys back first. One statement calls every function, in the order
// of its columns.
func (s *session) Exchange(deadline time.Time, tries, releases []dialect.Key) (granted, released []bool, err error) {
	if err := checkKeys(tries); err != nil {
		return nil, nil, err
	}
	if err := checkKeys(releases); err != nil {
		return nil, nil, err
	}
	if len(tries)+len(releases) == 0 {
		return nil, nil, nil
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	x := &s.exchanged
	x.query = append(x.query[:0], "SELECT "...)
	x.query = appendList(x.query, "RELEASE_LOCK(", releases, "), ")
	x.query = appendList(x.query, "GET_LOCK(", tries, ", 0), ")
	x.query = append(x.query, "CONNECTION_ID()"...)
	n := len(releases) + len(tries)
	x.row = slices.Grow(x.row[:0], n+1)[:n+1]
	if err := s.driverRow(ctx, string(x.query), x.row); err != nil {
		return nil, nil, s.failure(ctx, err)
	}
	if err := s.answered(x.row[n]); err != nil {
		return nil, nil, err
	}
	x.done = x.done[:0]
	for i, value := range x.row[:n] {
		n, err := integer(value)
		if err == nil && !n.Valid && i >= len(releases) { // of those that are given back it means that nobody holds it
			err = interrupted()
		}
		if err != nil {
			return nil, nil, err
		}
		x.done = append(x.done, n.Int64 == 1)
	}
	return x.done[len(releases):], x.done[:len(releases)], nil
}

// exchange is what a session uses again for the next one.
type exchange struct {
	query []byte
	row   []driver.Value
	done  []bool
}

// driverRow reads the only row of a query past database/sql, which starts a goroutine
// for each query whose context can end; that costs as much as the query.
func (s *session) driverRow(ctx context.Context, query string, row []driver.Value) error {
	return s.conn.Raw(func(c any) error {
		q, ok := c.(driver.QueryerContext)
		if !ok {
			return fmt.Errorf("the driver's %T runs no queries", c)
		}
		rows, err := q.QueryContext(ctx, query, nil)
		if err != nil {
			return err
		}
		return errors.Join(rows.Next(row), rows.Close())
	})
}

// ask selects n columns on the session's own connection, each with a comma behind it: the
// process list shows the beginning of a statement.
func (s *session) ask(ctx context.Context, columns string, n int) ([]sql.NullInt64, error) {
	row := make([]driver.Value, n+1)
	if err := s.driverRow(ctx, "SELECT "+columns+"CONNECTION_ID()", row); err != nil {
		return nil, s.failure(ctx, err)
	}
	if err := s.answered(row[n]); err != nil {
		return nil, err
	}
	results := make([]sql.NullInt64, n)
	for i, value := range row[:n] {
		n, err := integer(value)
		if err != nil {
			return nil, err
		}
		results[i] = n
	}
	return results, nil
}

// answered checks the CONNECTION_ID of an answer.
func (s *session) answered(by driver.Value) error {
	id, err := integer(by)
	if err != nil {
		return err
	}
	return s.same(id.Int64)
}

// integer is a number of the text protocol, which drivers hand over in several ways.
func integer(value driver.Value) (sql.NullInt64, error) {
	switch v := value.(type) {
	case nil:
		return sql.NullInt64{}, nil
	case int64:
		return sql.NullInt64{Int64: v, Valid: true}, nil
	case uint64:
		return sql.NullInt64{Int64: int64(v), Valid: true}, nil
	}
	var n sql.NullInt64
	err := n.Scan(value)
	return n, err
}
