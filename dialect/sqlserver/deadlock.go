package sqlserver

import (
	"context"
	"fmt"

	"github.com/dblock-go/dblock/dialect"
)

// SetDeadlock sets DEADLOCK_PRIORITY for the session. The driver resets that before the
// connection's next use. The statement has no parameters: with those it would run in a
// procedure, whose end takes the setting back.
// https://learn.microsoft.com/sql/t-sql/statements/set-statements-transact-sql
func (d *DB) SetDeadlock(ctx context.Context, tx dialect.Tx, s dialect.DeadlockSettings) error {
	if s.Priority == 0 {
		return nil
	}
	_, err := tx.ExecContext(ctx, fmt.Sprintf("SET DEADLOCK_PRIORITY %d", s.Priority))
	return classify(ctx, err)
}
