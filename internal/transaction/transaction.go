// Package transaction runs functions of users in transactions that dblock began.
package transaction

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// rollbackTimeout bounds the clean-up of a transaction, which must not depend on
// the context that may have ended it.
const rollbackTimeout = 5 * time.Second

// Run commits tx if fn succeeds. Otherwise, and if fn panics, it rolls back. An
// error of fn comes back as it is, joined by the rollback's if that failed too.
func Run(ctx context.Context, db dblock.DB, tx dialect.OwnedTx, keys []dblock.Key, fn func() error) (err error) {
	committed := false
	// A panic of fn passes through here and goes on.
	defer func() {
		if committed {
			return
		}
		if failure := rollback(ctx, db, tx); failure != nil {
			err = errors.Join(db.Classify(err), dblock.NewError("rollback", db, keys, failure))
		}
	}()
	if err := fn(); err != nil {
		return err
	}
	if err := commit(ctx, db, tx); err != nil {
		return dblock.NewError("commit", db, keys, err)
	}
	committed = true
	return nil
}

func commit(ctx context.Context, db dblock.DB, tx dialect.OwnedTx) error {
	// Once the commit is under way, the end of ctx makes its outcome unknown.
	if ctx.Err() != nil {
		return db.Classify(fmt.Errorf("before the commit: %w", ctx.Err()))
	}
	err := db.Classify(tx.Commit(ctx))
	switch dialect.ClassOf(err) {
	case dblock.ErrClosed:
		if ctx.Err() != nil { // so database/sql has rolled back
			return db.Classify(fmt.Errorf("before the commit: %w", ctx.Err()))
		}
		return fmt.Errorf("%w; the function ended the transaction itself: it must return nil to commit, an error to roll back", err)
	case dblock.ErrLost, dblock.ErrUnavailable, dblock.ErrCanceled, dblock.ErrTimeout:
		return fmt.Errorf("%w; it is unknown whether the transaction was committed: look before trying again", err)
	}
	return err
}

func rollback(ctx context.Context, db dblock.DB, tx dialect.OwnedTx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	return db.Classify(tx.Rollback(ctx))
}

// As is what runs the statements, in the type that the user's function takes: the
// driver's own, or dblock.Tx.
func As[T any](statements dialect.Statements) (T, error) {
	if t, ok := statements.Native().(T); ok {
		return t, nil
	}
	if t, ok := dialect.Tx(statements).(T); ok {
		return t, nil
	}
	var none T
	return none, &dialect.Error{Class: dblock.ErrUnsupported, Hint: fmt.Sprintf(
		"the function takes a %v, but this database was opened so that it gets a %T: take that, or dblock.Tx",
		reflect.TypeFor[T](), statements.Native())}
}
