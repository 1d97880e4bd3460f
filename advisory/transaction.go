package advisory

import (
	"context"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

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
	locker, ok := l.db.(dialect.TxLocker)
	switch {
	case !ok:
		return dblock.NewError(op, l.db, keys, &dialect.Error{Class: dblock.ErrUnsupported,
			Hint: "its advisory locks belong to sessions; use package rowlock, whose locks end with the transaction"})
	case dialect.IsNil(tx):
		return dblock.NewError(op, l.db, keys, dialect.Invalidf("the transaction is nil"))
	case !l.begin():
		return dblock.NewError(op, l.db, keys, errLockerClosed)
	}
	defer l.calls.Done()
	if !try {
		defer l.announceWait(ctx, keys, locked)()
	}
	err = locker.AcquireTx(ctx, tx, dialect.TxRequest{Keys: locked, Try: try, Wait: l.options.WaitLimit})
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
