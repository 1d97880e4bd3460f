package pinned

import (
	"context"
	"database/sql"

	"github.com/dblock-go/dblock/dialect"
)

// Statements makes a connection fit for the hands of others, who cannot close it.
func Statements(conn *sql.Conn) dialect.Statements { return statements{conn} }

type statements struct{ conn *sql.Conn }

func (s statements) Native() any { return s }

func (s statements) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return s.conn.ExecContext(ctx, query, args...)
}

func (s statements) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return s.conn.QueryContext(ctx, query, args...)
}

func (s statements) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	return s.conn.QueryRowContext(ctx, query, args...)
}

func (s statements) PrepareContext(ctx context.Context, query string) (*sql.Stmt, error) {
	return s.conn.PrepareContext(ctx, query)
}

var _ dialect.Conn = statements{}

// Within returns when the call does or ctx ends, whatever comes first: database/sql
// waits for rows and transactions that somebody left open on a connection.
func Within(ctx context.Context, call func() error) (returned bool, err error) {
	result := make(chan error, 1)
	go func() { result <- call() }()
	select {
	case err := <-result:
		return true, err
	case <-ctx.Done():
		return false, ctx.Err()
	}
}
