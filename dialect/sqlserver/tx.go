package sqlserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/dblock-go/dblock/dialect"
)

// AcquireTx takes application locks that end with the outermost commit or any
// rollback. tx must be in a transaction, else the error is of class
// dialect.Unsupported, and of class dialect.InvalidOption if tx is nil. It needs
// one round trip, and one more to give back what a failed call was granted; after
// an error of class NotAcquired, Timeout or Deadlock the transaction goes on. A key that the transaction held in shared
// mode before the failed call asked for it exclusively may stay exclusive: a
// mode weakens only with its last release.
func (d *DB) AcquireTx(ctx context.Context, tx dialect.Tx, r dialect.TxRequest) error {
	if dialect.IsNil(tx) {
		return errNilTx
	}
	return classify(ctx, acquireTx(ctx, appLocks{on: tx, owner: ownedByTransaction}, r))
}

func acquireTx(ctx context.Context, locks appLocks, r dialect.TxRequest) error {
	p, err := pack(r.Keys)
	if err != nil {
		return err
	}
	g, err := locks.acquire(ctx, p, waitMillis(ctx, r.Try, r.Wait), nil)
	if err != nil {
		return err
	}
	if g.transactions == 0 {
		return notInTransaction()
	}
	failure := g.failure(r.Keys, r.Try)
	if failure == nil {
		return nil
	}
	if err := locks.undo(ctx, r.Keys[:g.granted]); err != nil {
		return err
	}
	return failure
}

// SessionOf asks for the transaction's @@SPID.
func (d *DB) SessionOf(ctx context.Context, tx dialect.Tx) (int64, error) {
	if dialect.IsNil(tx) {
		return 0, errNilTx
	}
	var id int32
	_, err := tx.ExecContext(ctx, "SELECT @session = @@SPID", out("session", &id))
	return int64(id), classify(ctx, err)
}

var errNilTx = &dialect.Error{Class: dialect.InvalidOption, Hint: "the transaction is nil"}

func notInTransaction() error {
	return &dialect.Error{Class: dialect.Unsupported,
		Hint: "the lock would end at once: pass a transaction that has begun, or use a session's advisory lock"}
}

// remains asks what is left of a transaction after an error that, by itself,
// ends its statement only: under XACT_ABORT it ends more.
// https://learn.microsoft.com/sql/t-sql/functions/xact-state-transact-sql
func remains(ctx context.Context, tx dialect.Tx) dialect.Remains {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	state := int32(0)
	if _, err := tx.ExecContext(ctx, "SET @state = XACT_STATE();", out("state", &state)); err != nil {
		return dialect.RemainsUnknown
	}
	switch state {
	case 1:
		return dialect.RemainsUsable
	case -1:
		return dialect.RemainsAborted
	default:
		return dialect.RemainsNothing
	}
}

// Begin starts a transaction on a connection of the pool. SQL Server has no
// read-only transactions; dialect.Unsupported for those and for isolation levels
// that it does not have.
func (d *DB) Begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	return beginOn(ctx, d.db.BeginTx, o)
}

func beginOn(ctx context.Context, begin func(context.Context, *sql.TxOptions) (*sql.Tx, error), o *sql.TxOptions) (dialect.OwnedTx, error) {
	if o != nil && (o.ReadOnly || o.Isolation == sql.LevelWriteCommitted || o.Isolation == sql.LevelLinearizable) {
		return nil, &dialect.Error{Class: dialect.Unsupported,
			Err: fmt.Errorf("transaction with isolation level %v, read-only %t", o.Isolation, o.ReadOnly)}
	}
	tx, err := begin(ctx, o)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	return &ownedTx{tx}, nil
}

// BeginLocked takes two round trips: the driver's protocol begins a transaction in a
// message of its own.
func (d *DB) BeginLocked(ctx context.Context, o *sql.TxOptions, r dialect.TxRequest) (dialect.OwnedTx, error) {
	tx, err := d.Begin(ctx, o)
	if err != nil {
		return nil, err
	}
	return dialect.Begun(ctx, tx, d.AcquireTx(ctx, tx, r))
}

// BeginRows is [DB.BeginLocked] with row locks.
func (d *DB) BeginRows(ctx context.Context, o *sql.TxOptions, r dialect.RowRequest) (dialect.OwnedTx, error) {
	tx, err := d.Begin(ctx, o)
	if err != nil {
		return nil, err
	}
	_, err = d.LockRows(ctx, tx, r)
	return dialect.Begun(ctx, tx, err)
}

type ownedTx struct{ *sql.Tx }

// Native is the *sql.Tx.
func (t *ownedTx) Native() any { return t.Tx }

func (t *ownedTx) Commit(context.Context) error { return Classify(t.Tx.Commit()) }

func (t *ownedTx) Rollback(context.Context) error {
	err := t.Tx.Rollback()
	if errors.Is(err, sql.ErrTxDone) {
		return nil
	}
	return Classify(err)
}
