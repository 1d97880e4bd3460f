package rowlock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// driverError is an error as a driver returns it.
type driverError struct{ class dialect.Class }

func (e driverError) Error() string { return "server says " + string(e.class) }

// fakeDB counts what is done with its transactions. A function that is set
// replaces what the database would answer.
type fakeDB struct {
	dblock.DB
	lockRows func(ctx context.Context, tx dialect.Tx, r dialect.RowRequest) ([]int64, error)
	begin    func(ctx context.Context) error
	commit   func(ctx context.Context) error
	rollback func(ctx context.Context) error
	native   any // of its transactions; default *fakeNative

	begun, committed, rolledBack int
	isolation                    sql.IsolationLevel
	requests                     []dialect.RowRequest
}

func (db *fakeDB) Natives() (conn, tx reflect.Type) {
	return nil, reflect.TypeOf((&fakeTx{db: db}).Native())
}

func (*fakeDB) Name() string               { return "fake" }
func (*fakeDB) Features() dialect.Features { return dialect.Features{ByName: true, Scope: "db"} }

func (*fakeDB) Classify(err error) error {
	var e driverError
	switch {
	case dialect.ClassOf(err) != "":
		return err
	case errors.As(err, &e):
		return &dialect.Error{Class: e.class, Code: "12345", Err: err}
	case errors.Is(err, context.Canceled):
		return &dialect.Error{Class: dialect.Canceled, Err: err}
	}
	return err
}

func (db *fakeDB) Begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	if db.begin != nil {
		if err := db.begin(ctx); err != nil {
			return nil, err
		}
	}
	db.begun++
	db.isolation = o.Isolation
	return &fakeTx{db: db}, nil
}

func (db *fakeDB) LockRows(ctx context.Context, tx dialect.Tx, r dialect.RowRequest) ([]int64, error) {
	db.requests = append(db.requests, r)
	if db.lockRows != nil {
		return db.lockRows(ctx, tx, r)
	}
	if !r.Fence {
		return nil, nil
	}
	fences := make([]int64, len(r.Keys))
	for i := range fences {
		fences[i] = int64(i + 1)
	}
	return fences, nil
}

func (db *fakeDB) BeginRows(ctx context.Context, o *sql.TxOptions, r dialect.RowRequest) (dialect.OwnedTx, error) {
	tx, err := db.Begin(ctx, o)
	if err != nil {
		return nil, err
	}
	_, err = db.LockRows(ctx, tx, r)
	return dialect.Begun(ctx, tx, err)
}

// check fails unless the transactions ended as said, each exactly once.
func (db *fakeDB) check(committed, rolledBack int) error {
	if db.committed != committed || db.rolledBack != rolledBack || db.begun != committed+rolledBack {
		return fmt.Errorf("%d transactions: %d committed, %d rolled back; want %d committed, %d rolled back",
			db.begun, db.committed, db.rolledBack, committed, rolledBack)
	}
	return nil
}

type fakeNative struct{}

// fakeTx is, like that of pgx, no Tx itself in its native form.
type fakeTx struct {
	db    *fakeDB
	ended bool
}

func (*fakeTx) ExecContext(context.Context, string, ...any) (sql.Result, error) { return nil, nil }

func (tx *fakeTx) Native() any {
	if tx.db.native != nil {
		return tx.db.native
	}
	return &fakeNative{}
}

func (tx *fakeTx) Commit(ctx context.Context) error {
	if tx.db.commit != nil {
		if err := tx.db.commit(ctx); err != nil {
			return err
		}
	}
	tx.db.committed++
	tx.ended = true
	return nil
}

func (tx *fakeTx) Rollback(ctx context.Context) error {
	if tx.ended {
		return nil
	}
	tx.ended = true
	tx.db.rolledBack++
	if tx.db.rollback != nil {
		return tx.db.rollback(ctx)
	}
	return nil
}
