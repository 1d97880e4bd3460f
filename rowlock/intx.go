package rowlock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// rollbackTimeout bounds the clean-up of a transaction, which must not depend on
// the context that may have ended it.
const rollbackTimeout = 5 * time.Second

// InTx begins a transaction, locks the keys in it, runs fn and commits. If the
// server chooses the transaction as the victim of a deadlock or cannot serialize
// it, at any point up to the commit, it is rolled back and all of it starts again
// (see deadlock.Retry): fn must be prepared to run several times, and must leave
// what cannot be rolled back to the code after InTx.
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
	if _, err := deadlock.OrderRows(l.db, keys...); err != nil {
		return l.failed(op, keys, err)
	}
	return deadlock.Retry(ctx, l.db, func(ctx context.Context) error {
		return attempt(ctx, l, fn, keys)
	}, l.retry(keys))
}

func (l *Locker) retry(keys []dblock.Key) *deadlock.RetryOptions {
	var o deadlock.RetryOptions
	if l.options.Retry != nil {
		o = *l.options.Retry
	}
	o.Keys = keys
	if o.Observer == nil {
		o.Observer = l.options.Observer
	}
	return &o
}

// attempt is one transaction from its begin to its end.
func attempt[T any](ctx context.Context, l *Locker, fn func(context.Context, T) error, keys []dblock.Key) (err error) {
	tx, err := l.db.Begin(ctx, &sql.TxOptions{Isolation: l.options.Isolation})
	if err != nil {
		return l.failed("begin", keys, l.db.Classify(err))
	}
	var acquired time.Time
	committed := false
	// A panic of fn passes through here and goes on.
	defer func() {
		if !committed {
			if failure := l.rollback(ctx, tx); failure != nil {
				err = errors.Join(l.db.Classify(err), l.failed("rollback", keys, failure))
			}
		}
		if !acquired.IsZero() {
			l.observe(ctx, dblock.EventReleased, keys, time.Since(acquired))
		}
	}()

	users, err := as[T](tx)
	if err != nil {
		return l.failed("transaction", keys, err)
	}
	if _, err := l.lock(ctx, tx, keys, dialect.RowRequest{}); err != nil {
		return l.failed("lock", keys, err)
	}
	acquired = time.Now()
	if err := fn(ctx, users); err != nil {
		return err
	}
	if err := l.commit(ctx, tx); err != nil {
		return l.failed("commit", keys, err)
	}
	committed = true
	return nil
}

// as is the transaction in the type that the user's function takes.
func as[T any](tx dialect.OwnedTx) (T, error) {
	if t, ok := tx.Native().(T); ok {
		return t, nil
	}
	if t, ok := dialect.Tx(tx).(T); ok {
		return t, nil
	}
	var none T
	return none, &dialect.Error{Class: dblock.ErrUnsupported, Hint: fmt.Sprintf(
		"the function takes a %v, but this database was opened so that its transactions are %T: take that (pgx.Tx for pgx), or dblock.Tx",
		reflect.TypeFor[T](), tx.Native())}
}

func (l *Locker) commit(ctx context.Context, tx dialect.OwnedTx) error {
	// Once the commit is under way, the end of ctx makes its outcome unknown.
	if ctx.Err() != nil {
		return l.db.Classify(fmt.Errorf("before the commit: %w", ctx.Err()))
	}
	err := l.db.Classify(tx.Commit(ctx))
	switch dialect.ClassOf(err) {
	case dblock.ErrClosed:
		if ctx.Err() != nil { // so database/sql has rolled back
			return l.db.Classify(fmt.Errorf("before the commit: %w", ctx.Err()))
		}
		return fmt.Errorf("%w; the function ended the transaction itself, and with it the lock: it must return nil to commit, an error to roll back", err)
	case dblock.ErrLost, dblock.ErrUnavailable, dblock.ErrCanceled, dblock.ErrTimeout:
		return fmt.Errorf("%w; it is unknown whether the transaction was committed: look before trying again", err)
	}
	return err
}

func (l *Locker) rollback(ctx context.Context, tx dialect.OwnedTx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	return l.db.Classify(tx.Rollback(ctx))
}
