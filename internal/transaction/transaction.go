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

// Offers returns an error unless a user's function may take a T, which is what the
// native type is, or else dblock.Tx.
func Offers[T any](native reflect.Type) error {
	t := reflect.TypeFor[T]()
	if native.AssignableTo(t) || reflect.TypeFor[dblock.Tx]().AssignableTo(t) {
		return nil
	}
	return &dialect.Error{Class: dblock.ErrUnsupported, Hint: fmt.Sprintf(
		"the function takes a %v, but as this database was opened it can have a %v: take that, or dblock.Tx", t, native)}
}

// As is what runs the statements in a type that was offered.
func As[T any](statements dialect.Statements) T {
	if t, ok := statements.Native().(T); ok {
		return t
	}
	t, _ := dialect.Tx(statements).(T)
	return t
}
