package rowlock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/rowlock"
)

var (
	ctx  context.Context
	db   dblock.DB
	pool *sql.DB
)

// Two accounts are locked for the rest of the transaction, in an order that
// cannot deadlock, whichever is named first.
func ExampleLocker_Lock() {
	rows := rowlock.New(db)
	transfer := func(from, to string, amount int) error {
		tx, err := pool.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := rows.Lock(ctx, tx, dblock.NewKey("account", from), dblock.NewKey("account", to)); err != nil {
			return err
		}
		// … read both balances, write both …
		return tx.Commit()
	}
	if err := transfer("alice", "bob", 10); err != nil {
		fmt.Println(err)
	}
}

// A refused try leaves the transaction as it was.
func ExampleLocker_TryLock() {
	rows := rowlock.New(db)
	closeOrder := func(tx *sql.Tx, id string) error {
		err := rows.TryLock(ctx, tx, dblock.NewKey("order", id))
		if errors.Is(err, dblock.ErrNotAcquired) {
			_, err = tx.ExecContext(ctx, `INSERT INTO later (id) VALUES ($1)`, id)
			return err
		}
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE orders SET closed = true WHERE id = $1`, id)
		return err
	}
	_ = closeOrder
}

// The number lets a resource outside of the database refuse a writer that has
// been overtaken.
func ExampleLocker_Fence() {
	rows := rowlock.New(db)
	upload := func(ctx context.Context, report string, fence int64) error { return nil }
	var fence int64
	err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx *sql.Tx) error {
		fences, err := rows.Fence(ctx, tx, dblock.NewKey("report", "2026-11"))
		if err != nil {
			return err
		}
		fence = fences[0]
		return nil
	}, dblock.NewKey("reports"))
	if err == nil {
		err = upload(ctx, "2026-11", fence)
	}
	if err != nil {
		fmt.Println(err)
	}
}

// A projector writes only as long as nobody has taken over: the check and the write
// are one transaction.
func ExampleLocker_Guard() {
	rows, key := rowlock.New(db), dblock.NewKey("projector", "orders")
	locks, err := advisory.New(db, &advisory.Options{Fencing: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locks.Close()
	advance := func(ctx context.Context, token, position int64) error {
		tx, err := pool.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := rows.Guard(ctx, tx, key, token); err != nil {
			return err
		}
		// … project the events up to position …
		if _, err := tx.ExecContext(ctx, `UPDATE checkpoints SET position = $1 WHERE projector = 'orders'`, position); err != nil {
			return err
		}
		return tx.Commit()
	}
	err = locks.Do(ctx, func(ctx context.Context) error {
		lock, _ := advisory.FromContext(ctx)
		return advance(ctx, lock.Token(), 42)
	}, key)
	if errors.Is(err, dblock.ErrNotHeld) {
		fmt.Println("somebody else has taken over")
	}
}

// Somebody else's row is refused to who was overtaken, without a table of dblock's.
func ExampleFenced() {
	set, where := rowlock.Fenced("fence", 1764500000000000)
	fmt.Println(`UPDATE checkpoints SET position = $1, ` + set + ` WHERE projector = $2 AND ` + where)
	// Output: UPDATE checkpoints SET position = $1, fence = 1764500000000000 WHERE projector = $2 AND fence <= 1764500000000000
}

// Readers exclude a writer and not each other; nobody waits for longer than a second.
func ExampleLocker_LockWithin() {
	rows := rowlock.New(db)
	read := func(tx *sql.Tx) error {
		return rows.LockWithin(ctx, tx, time.Second, dblock.NewKey("catalogue").Shared())
	}
	_ = read
}

// A broker delivers a message at least once; its effect is committed exactly once.
func ExampleDoOnce() {
	once := rowlock.NewOnce(db)
	receive := func(ctx context.Context, id string, amount int) error {
		_, err := rowlock.DoOnce(ctx, once, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = balance + $1 WHERE id = 42`, amount)
			return err
		}, dblock.NewKey("payment", id))
		return err // nil: acknowledge the message, whether it was the first delivery or not
	}
	_ = receive
}

// A batch of messages is processed in one transaction, without those that were before.
func ExampleOnce_MarkEach() {
	once := rowlock.NewOnce(db)
	process := func(tx *sql.Tx, ids []string, work func(id string) error) error {
		messages := make([]dblock.Key, len(ids))
		for i, id := range ids {
			messages[i] = dblock.NewKey("payment", id)
		}
		first, err := once.MarkEach(ctx, tx, messages...)
		if err != nil {
			return err
		}
		for i, id := range ids {
			if first[i] {
				if err := work(id); err != nil {
					return err
				}
			}
		}
		return tx.Commit()
	}
	_ = process
}

// The broker gives up after a week.
func ExampleOnce_Clean() {
	_, err := rowlock.NewOnce(db).Clean(ctx, &rowlock.CleanOptions{Age: 14 * 24 * time.Hour, Batch: 500, Pause: 100 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
	}
}

// Once a day is plenty.
func ExampleLocker_Clean() {
	deleted, err := rowlock.New(db).Clean(ctx)
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println(deleted, "rows of keys that nobody uses")
}

// The function may run several times; what it did is committed once or not at all.
func ExampleInTx() {
	rows := rowlock.New(db, &rowlock.Options{Isolation: sql.LevelReadCommitted})
	err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE accounts SET balance = balance - 10 WHERE id = 42`)
		return err
	}, dblock.NewKey("account", "42"))
	if err != nil {
		fmt.Println(err)
	}
}

// Two rows of the application's own table are locked in one order for all, and a
// missing one is told by its key.
func ExampleRows_Lock() {
	accounts := rowlock.NewRows(db, rowlock.RowsOptions{Table: "account", Key: []string{"id"}})
	transfer := func(tx *sql.Tx, from, to int64) error {
		err := accounts.Lock(ctx, tx, rowlock.PK(from), rowlock.PK(to))
		if errors.Is(err, dblock.ErrNotFound) {
			return fmt.Errorf("one of you has no account: %w", err)
		}
		if err != nil {
			return err
		}
		// … read both balances, write both …
		return nil
	}
	_ = transfer
}

// Each of many workers gets jobs of its own; those of a worker that dies are free
// again.
func ExampleRows_Claim() {
	jobs := rowlock.NewRows(db, rowlock.RowsOptions{Table: "job", Key: []string{"id"}})
	work := func(do func(id int64) error) error {
		tx, err := pool.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil {
			return err
		}
		defer tx.Rollback()
		claimed, err := jobs.Claim(ctx, tx, rowlock.ClaimOptions{
			Limit:   100,
			Where:   "state = 'new' AND due <= $1", // on MySQL and MariaDB ?
			Args:    []any{time.Now()},
			OrderBy: []rowlock.Order{{Column: "due"}},
		})
		if err != nil {
			return err
		}
		for _, key := range claimed {
			var id int64
			if err := key.Scan(&id); err != nil {
				return err
			}
			if err := do(id); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `UPDATE job SET state = 'done' WHERE id = $1`, id); err != nil {
				return err
			}
		}
		return tx.Commit()
	}
	_ = work
}
