package advisory

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

// DoTx runs fn in a transaction that holds the keys, and commits: [Locker.Do] with
// the locks of [Locker.LockTx]. It begins the transaction itself, on a connection of
// the application's pool, so that on PostgreSQL through pgx the locks travel with
// the BEGIN: they cost no round trip and no connection. They end with the commit
// or the rollback, never without the work, so that it needs no fencing number; and
// unlike rowlock.InTx it writes nothing of its own to disk.
//
// [InTx], in contrast, runs its transaction on a session of the locker's, which holds
// the keys before the BEGIN and until after the COMMIT. That costs a connection for
// each call, and is for work that takes long or pauses: that session is set up to
// outlive the server's limits and to end when it hears nothing for
// [Options.StatementGap]. Transactions of the pool have the application's settings:
// its timeouts, and the server's keep-alive for a client that vanished without a word.
//
// PostgreSQL and SQL Server have such locks. On MySQL and MariaDB the error is
// [dblock.ErrUnsupported]: use rowlock.InTx there.
//
// If the server chooses the transaction as the victim of a deadlock or cannot
// serialize it, at any point up to the commit, all of it starts again (see
// deadlock.Retry and [Options.Retry]): fn must be prepared to run several times. It
// takes the transaction as the type it likes: *sql.Tx where the database was opened
// with a *sql.DB, pgx.Tx where with a pgx pool, or dblock.Tx everywhere. It returns
// every error that a statement gives it, does not end the transaction, and does not
// lock in another transaction what this one holds. [Locker.Close] refuses later calls,
// and leaves those that are under way alone: they use nothing of the locker's.
//
// [Options.WaitLimit] bounds each wait for the keys, not that for a connection of the
// pool. The isolation level is [Options.Isolation]; for what that means see
// [Locker.LockTx].
//
// An error of fn rolls the transaction back and comes back as it is, joined by the
// rollback's if that failed too. A panic of fn rolls back and goes on panicking.
// If the connection is lost during the commit, nobody knows whether it happened:
// DoTx says so and does not try again. Other errors are those of [Locker.Lock].
func DoTx[T any](ctx context.Context, l *Locker, fn func(ctx context.Context, tx T) error, keys ...dblock.Key) error {
	const op = "transaction"
	if l == nil || fn == nil {
		return fmt.Errorf("dblock: %s: %w", op, errNil)
	}
	locked, err := deadlock.Order(l.db, keys...)
	if err != nil {
		return dblock.NewError(op, l.db, keys, err)
	}
	locker, err := l.ofTransactions()
	if err != nil {
		return dblock.NewError(op, l.db, keys, err)
	}
	_, native := l.db.Natives()
	if err := transaction.Offers[T](native); err != nil {
		return dblock.NewError(op, l.db, keys, err)
	}
	if l.closing.Err() != nil {
		return dblock.NewError(op, l.db, keys, errLockerClosed)
	}
	return deadlock.Retry(ctx, l.db, func(ctx context.Context) error {
		began := time.Now()
		hold := l.beginHold(ctx, false, nil, keys, locked)
		tx, err := l.beginLocked(ctx, locker, keys, locked)
		if err != nil {
			return err
		}
		acquired := time.Now()
		hold.In(tx)
		hold.Acquired()
		defer func() {
			hold.Release()
			l.observe(ctx, dblock.Event{Kind: dblock.EventReleased, Keys: keys, Duration: time.Since(acquired)})
		}()
		return transaction.Run(ctx, l.db, tx, keys, func() error {
			l.observe(ctx, dblock.Event{Kind: dblock.EventAcquired, Keys: keys, Duration: acquired.Sub(began)})
			return fn(hold.Context(ctx), transaction.As[T](tx))
		})
	}, transaction.Retries(l.options.Retry, keys, l.options.Observer))
}

// beginLocked begins a transaction that holds the keys.
func (l *Locker) beginLocked(ctx context.Context, locker dialect.TxLocker, keys []dblock.Key, locked []dialect.Key) (dialect.OwnedTx, error) {
	l.names.note(keys)
	c := &call{locker: l, ctx: ctx, op: "lock", keys: keys, locked: locked, began: time.Now()}
	defer l.announceWait(ctx, keys, locked)()
	isolation := l.options.Isolation
	if isolation == sql.LevelDefault {
		isolation = sql.LevelReadCommitted
	}
	tx, err := l.beginWith(ctx, locker, &sql.TxOptions{Isolation: isolation}, dialect.TxRequest{Keys: locked, Wait: l.options.WaitLimit})
	if err != nil {
		return nil, l.failure(c, l.db.Classify(err))
	}
	return tx, nil
}

func (l *Locker) beginWith(ctx context.Context, locker dialect.TxLocker, o *sql.TxOptions, r dialect.TxRequest) (dialect.OwnedTx, error) {
	if l.options.Deadlock == (deadlock.Settings{}) {
		return locker.BeginLocked(ctx, o, r)
	}
	tx, err := transaction.Begin(ctx, l.db, o, l.options.Deadlock)
	if err != nil {
		return nil, err
	}
	return dialect.Begun(ctx, tx, locker.AcquireTx(ctx, tx, r))
}

// ofTransactions is the database, if it has locks of transactions.
func (l *Locker) ofTransactions() (dialect.TxLocker, error) {
	if locker, ok := l.db.(dialect.TxLocker); ok {
		return locker, nil
	}
	return nil, &dialect.Error{Class: dblock.ErrUnsupported,
		Hint: "its advisory locks belong to sessions; use package rowlock, whose locks end with the transaction"}
}

// LockTx takes the keys for the rest of the caller's transaction: the server
// gives them back when it commits or rolls back, there is nothing to release.
// It waits until ctx or [Options.WaitLimit] ends. Prefer the limit: when it
// ends the wait, the transaction goes on, while the end of ctx costs the
// transaction's connection as it does in every statement.
//
// PostgreSQL and SQL Server have such locks. On MySQL and MariaDB the error is
// [dblock.ErrUnsupported]: use package rowlock there, whose locks belong to the
// transaction on every database. Other errors are those of [Locker.Lock].
//
// On PostgreSQL, a program that sends statements in a batch can queue the lock as the
// first of them by itself, SELECT pg_advisory_xact_lock($1) with the [dblock.Key.ID],
// and one for each of several keys in the order of deadlock.Order. What follows in
// the batch runs when all of them are granted.
//
// Under REPEATABLE READ and SERIALIZABLE the transaction's snapshot is older
// than the lock if there was a wait: take the lock in a READ COMMITTED
// transaction, or read what it guards with FOR UPDATE.
func (l *Locker) LockTx(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
	return l.acquireTx(ctx, "lock in transaction", tx, false, keys)
}

// TryLockTx is [Locker.LockTx] without waiting: all of the keys, or
// [dblock.ErrNotAcquired] and none of them. The transaction goes on either way.
func (l *Locker) TryLockTx(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
	return l.acquireTx(ctx, "try in transaction", tx, true, keys)
}

func (l *Locker) acquireTx(ctx context.Context, op string, tx dblock.Tx, try bool, keys []dblock.Key) error {
	locked, err := deadlock.Order(l.db, keys...)
	if err != nil {
		return dblock.NewError(op, l.db, keys, err)
	}
	locker, err := l.ofTransactions()
	switch {
	case err != nil:
		return dblock.NewError(op, l.db, keys, err)
	case dialect.IsNil(tx):
		return dblock.NewError(op, l.db, keys, dialect.Invalidf("the transaction is nil"))
	case !l.begin():
		return dblock.NewError(op, l.db, keys, errLockerClosed)
	}
	defer l.calls.Done()
	l.names.note(keys)
	if !try {
		defer l.announceWait(ctx, keys, locked)()
	}
	hold := l.beginHold(ctx, try, tx, keys, locked)
	err = locker.AcquireTx(ctx, tx, dialect.TxRequest{Keys: locked, Try: try, Wait: l.options.WaitLimit})
	if err == nil {
		hold.Acquired()
		return nil
	}
	switch dialect.ClassOf(err) {
	case dblock.ErrNotAcquired, dblock.ErrTimeout:
		return l.withBlocker(ctx, op, keys, locked, err, sessionOf(ctx, locker, tx))
	}
	return dblock.NewError(op, l.db, keys, err)
}

// sessionOf is the transaction's session, which holds what it had locked before; 0
// if the transaction cannot be asked any more.
func sessionOf(ctx context.Context, locker dialect.TxLocker, tx dblock.Tx) int64 {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), inspectWithin)
	defer cancel()
	session, err := locker.SessionOf(ctx, tx)
	if err != nil {
		return 0
	}
	return session
}
