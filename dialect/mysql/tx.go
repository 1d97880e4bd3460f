package mysql

import (
	"context"
	"database/sql"

	"github.com/dblock-go/dblock/dialect"
)

// Begin starts a transaction on a connection of the pool. The server rolls it
// back when ctx ends before the commit.
func (db *DB) Begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	db.side.prepare(ctx, 2)
	tx, err := db.pool.BeginTx(ctx, o)
	if err != nil {
		return nil, db.failure(ctx, err)
	}
	return &ownedTx{Tx: tx, db: db}, nil
}

// BeginRows takes a round trip for each: the driver sends one statement at a time.
func (db *DB) BeginRows(ctx context.Context, o *sql.TxOptions, r dialect.RowRequest) (dialect.OwnedTx, error) {
	tx, err := db.Begin(ctx, o)
	if err != nil {
		return nil, err
	}
	_, err = db.LockRows(ctx, tx, r)
	return dialect.Begun(ctx, tx, err)
}

type ownedTx struct {
	*sql.Tx
	db *DB
}

func (t *ownedTx) Native() any { return t.Tx }

// Commit cannot be interrupted: whether it happened would be unknown.
func (t *ownedTx) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return t.db.Classify(err)
	}
	return t.db.Classify(t.Tx.Commit())
}

// Rollback has nothing to do where the transaction is over in any case: it had
// ended, or its connection is gone or was closed when a context ended, and the
// server rolls back.
func (t *ownedTx) Rollback(context.Context) error {
	err := t.db.Classify(t.Tx.Rollback())
	switch dialect.ClassOf(err) {
	case dialect.Closed, dialect.Lost, dialect.Canceled, dialect.Timeout:
		return nil
	}
	return err
}
