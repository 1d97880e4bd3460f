package rowlock

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/internal/transaction"
)

// InTx begins a transaction, locks the keys in it, runs fn and commits. If the
// server chooses the transaction as the victim of a deadlock or cannot serialize
// it, at any point up to the commit, it is rolled back and all of it starts again
// (see deadlock.Retry): fn must be prepared to run several times, and must leave
// what cannot be rolled back to the code after InTx.
//
// At least one key is needed: a transaction that only guards, by [Locker.Guard], or locks
// rows of the application's own is one of the caller's, with deadlock.Retry around it.
//
// fn takes the transaction as the type it likes: *sql.Tx where the database was
// opened with a *sql.DB, pgx.Tx where with a pgx pool, or dblock.Tx everywhere;
// another type is refused with [dblock.ErrUnsupported]. fn returns every error
// that a statement gives it, does not end the transaction, not even by DDL on
// MySQL and MariaDB, and does not lock in another transaction what this one holds.
//
// An error of fn rolls the transaction back and comes back as it is, joined by the
// rollback's if that failed too. A panic of fn rolls back and goes on panicking.
// If the connection is lost during the commit, nobody knows whether it happened:
// InTx says so and does not try again.
func InTx[T any](ctx context.Context, l *Locker, fn func(ctx context.Context, tx T) error, keys ...dblock.Key) error {
	const op = "transaction"
	if l == nil {
		return fmt.Errorf("dblock: %s: %w", op, dialect.Invalidf("the Locker is nil"))
	}
	if l.mistaken != nil {
		return l.failed(op, keys, l.mistaken)
	}
	if fn == nil {
		return l.failed(op, keys, dialect.Invalidf("fn is nil"))
	}
	locked, err := deadlock.OrderRows(l.db, keys...)
	if err != nil {
		return l.failed(op, keys, err)
	}
	_, native := l.db.Natives()
	if err := transaction.Offers[T](native); err != nil {
		return l.failed(op, keys, err)
	}
	return deadlock.Retry(ctx, l.db, func(ctx context.Context) error {
		return attempt(ctx, l, fn, keys, locked)
	}, transaction.Retries(l.options.Retry, keys, l.options.Observer))
}

// attempt is one transaction from its begin, with which it locks, to its end.
func attempt[T any](ctx context.Context, l *Locker, fn func(context.Context, T) error, keys []dblock.Key, locked []dialect.Key) error {
	began := time.Now()
	hold := l.beginHold(ctx, deadlock.Call{Kind: "row", Keys: keys, Order: locked})
	stop := l.announceWait(ctx, keys)
	tx, err := l.begin(ctx, dialect.RowRequest{Table: l.table(), Keys: locked, Wait: l.options.WaitLimit})
	stop()
	if err != nil {
		return l.failed("lock", keys, l.db.Classify(err))
	}
	acquired := time.Now()
	hold.In(tx)
	hold.Acquired()
	defer func() {
		hold.Release()
		l.observe(ctx, dblock.EventReleased, keys, time.Since(acquired))
	}()
	return transaction.Run(ctx, l.db, tx, keys, func() error {
		l.observe(ctx, dblock.EventAcquired, keys, acquired.Sub(began))
		return fn(hold.Context(ctx), transaction.As[T](tx))
	})
}

// begin begins a transaction that holds the keys.
func (l *Locker) begin(ctx context.Context, r dialect.RowRequest) (dialect.OwnedTx, error) {
	o := &sql.TxOptions{Isolation: l.options.Isolation}
	if l.options.Deadlock == (deadlock.Settings{}) {
		return l.db.BeginRows(ctx, o, r)
	}
	tx, err := transaction.Begin(ctx, l.db, o, l.options.Deadlock)
	if err != nil {
		return nil, err
	}
	_, err = l.db.LockRows(ctx, tx, r)
	return dialect.Begun(ctx, tx, err)
}
