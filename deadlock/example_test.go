package deadlock_test

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

var (
	ctx  context.Context
	db   dblock.DB
	pool *sql.DB
)

// The whole transaction is one function, from the begin to the commit.
func ExampleRetry() {
	transfer := func(ctx context.Context) error {
		tx, err := pool.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = balance - 10 WHERE id = 1`); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = balance + 10 WHERE id = 2`); err != nil {
			return err
		}
		return tx.Commit()
	}
	if err := deadlock.Retry(ctx, db, transfer, &deadlock.RetryOptions{MaxBackoff: 200 * time.Millisecond}); err != nil {
		fmt.Println(err)
	}
}

// A statement that failed may or may not have taken the transaction with it.
func ExampleRemains() {
	update := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = 0 WHERE id = 1`)
		switch deadlock.Remains(db, err) {
		case dialect.RemainsUsable:
			return nil // go on with something else in tx
		case dialect.RemainsAborted:
			_, err = tx.ExecContext(ctx, `ROLLBACK TO SAVEPOINT before`)
		}
		return err
	}
	_ = update
}
