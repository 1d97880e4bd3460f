package deadlock_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

var (
	ctx  context.Context
	db   dblock.DB
	pool *sql.DB
)

// In development and in tests a Checker reports the places that lock in orders which
// contradict each other.
func ExampleChecker() {
	checker := deadlock.NewChecker(&deadlock.CheckerOptions{
		OnInversion: func(i deadlock.Inversion) { slog.Error(i.String()) },
	})
	rows := rowlock.New(db, &rowlock.Options{Checker: checker})
	err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx *sql.Tx) error {
		// Elsewhere an order may be locked inside of an account.
		return rows.Lock(ctx, tx, dblock.NewKey("account", "7"))
	}, dblock.NewKey("order", "1"))
	if err != nil {
		fmt.Println(err)
	}
}

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

// Who is in the way of everybody else, and what for?
func ExampleInspect() {
	s, err := deadlock.Inspect(ctx, db)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(s.Text())
	for _, root := range s.Roots {
		fmt.Println("look at session", root)
	}
	for _, gap := range s.Gaps {
		fmt.Println("not seen:", gap.What, "->", gap.Remedy)
	}
}
