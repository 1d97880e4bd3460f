package transaction

import (
	"context"
	"database/sql"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// Begin starts a transaction with settings that db has: see DeadlockSettings.Check.
func Begin(ctx context.Context, db dblock.DB, o *sql.TxOptions, s dialect.DeadlockSettings) (dialect.OwnedTx, error) {
	tx, err := db.Begin(ctx, o)
	if err != nil {
		return nil, err
	}
	return dialect.Begun(ctx, tx, Set(ctx, db, tx, s))
}

// Set makes the settings those of a transaction that has just begun.
func Set(ctx context.Context, db dblock.DB, tx dblock.Tx, s dialect.DeadlockSettings) error {
	setter, ok := db.(dialect.DeadlockSetter)
	if !ok || s == (dialect.DeadlockSettings{}) {
		return nil
	}
	return setter.SetDeadlock(ctx, tx, s)
}
