package postgres

import (
	"context"
	"fmt"

	"github.com/dblock-go/dblock/dialect"
)

// SetDeadlock sets deadlock_timeout until the transaction ends.
func (d *DB) SetDeadlock(ctx context.Context, tx dialect.Tx, s dialect.DeadlockSettings) error {
	if s.Timeout == 0 {
		return nil
	}
	_, err := tx.ExecContext(ctx, fmt.Sprintf("SET LOCAL deadlock_timeout = %s", milliseconds(s.Timeout)))
	if sqlState(err) == "42501" {
		return &dialect.Error{Class: dialect.Denied, Code: "42501", Err: err, Remains: dialect.RemainsAborted,
			Hint: "a superuser may set it, or who was given it: GRANT SET ON PARAMETER deadlock_timeout TO the user (from PostgreSQL 15 on)"}
	}
	return classify(ctx, err)
}
