package rowlock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

var key = dblock.NewKey("account", "1")

func TestInTxCommits(t *testing.T) {
	db := &fakeDB{}
	rows := rowlock.New(db, &rowlock.Options{Isolation: sql.LevelSerializable})
	err := rowlock.InTx(t.Context(), rows, func(_ context.Context, tx dblock.Tx) error {
		if len(db.requests) != 1 || db.requests[0].Keys[0].ID != key.ID() {
			t.Errorf("ran before the lock: %+v", db.requests)
		}
		return nil
	}, key)
	if err := errors.Join(err, db.check(1, 0)); err != nil {
		t.Error(err)
	}
	if db.isolation != sql.LevelSerializable {
		t.Errorf("isolation %v", db.isolation)
	}
}

func TestInTxGivesTheTypeThatTheFunctionTakes(t *testing.T) {
	native := func(context.Context, *fakeNative) error { return nil }
	contract := func(_ context.Context, tx dblock.Tx) error {
		if tx == nil {
			t.Error("no transaction")
		}
		return nil
	}
	pool := func(_ context.Context, tx *sql.Tx) error { return nil }

	db := &fakeDB{}
	rows := rowlock.New(db)
	if err := errors.Join(
		rowlock.InTx(t.Context(), rows, native, key),
		rowlock.InTx(t.Context(), rows, contract, key),
		db.check(2, 0)); err != nil {
		t.Error(err)
	}
	err := rowlock.InTx(t.Context(), rows, pool, key)
	if !errors.Is(err, dblock.ErrUnsupported) {
		t.Fatalf("%v, want %v", err, dblock.ErrUnsupported)
	}
	for _, name := range []string{"*sql.Tx", "*rowlock_test.fakeNative", "dblock.Tx"} {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%q does not name %s", err, name)
		}
	}
	if err := db.check(2, 0); err != nil { // refused before anything began
		t.Error(err)
	}

	db = &fakeDB{native: new(sql.Tx)}
	rows = rowlock.New(db)
	if err := errors.Join(
		rowlock.InTx(t.Context(), rows, pool, key),
		rowlock.InTx(t.Context(), rows, contract, key),
		db.check(2, 0)); err != nil {
		t.Error(err)
	}
}

// Wherever the server gives up a transaction, all of it starts again.
func TestInTxStartsAgain(t *testing.T) {
	for _, class := range []dialect.Class{dialect.Deadlock, dialect.Serialization} {
		for _, step := range []string{"begin", "lock", "function", "commit"} {
			t.Run(fmt.Sprintf("%s at %s", class, step), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					failures := map[string]int{step: 2}
					fail := func(at string) error {
						if failures[at]--; failures[at] >= 0 {
							return driverError{class}
						}
						return nil
					}
					db := &fakeDB{
						begin:  func(context.Context) error { return fail("begin") },
						commit: func(context.Context) error { return fail("commit") },
						lockRows: func(context.Context, dialect.Tx, dialect.RowRequest) ([]int64, error) {
							if err := fail("lock"); err != nil {
								return nil, &dialect.Error{Class: class, Err: err}
							}
							return nil, nil
						},
					}
					var retries int
					rows := rowlock.New(db, &rowlock.Options{Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
						if e.Kind == dblock.EventRetried {
							retries++
							if !errors.Is(e.Err, class) || len(e.Keys) != 1 {
								t.Errorf("event %+v", e)
							}
						}
					})})
					err := rowlock.InTx(t.Context(), rows, func(context.Context, dblock.Tx) error { return fail("function") }, key)
					rolledBack := 2
					if step == "begin" {
						rolledBack = 0
					}
					if err := errors.Join(err, db.check(1, rolledBack)); err != nil {
						t.Error(err)
					}
					if retries != 2 {
						t.Errorf("%d retries were observed, want 2", retries)
					}
				})
			})
		}
	}
}

func TestInTxGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &fakeDB{}
		rows := rowlock.New(db, &rowlock.Options{Retry: &deadlock.RetryOptions{Attempts: 3}})
		err := rowlock.InTx(t.Context(), rows, func(context.Context, dblock.Tx) error { return driverError{dialect.Deadlock} }, key)
		var e *dblock.Error
		if !errors.As(err, &e) || !slices.Equal(e.Keys, []string{"account/1"}) || !errors.Is(err, dblock.ErrDeadlock) {
			t.Errorf("%#v is not a dblock.Error that names the key", err)
		}
		if !errors.Is(err, driverError{dialect.Deadlock}) || !strings.Contains(err.Error(), "attempt 3 of 3") {
			t.Errorf("%v", err)
		}
		if err := db.check(0, 3); err != nil {
			t.Error(err)
		}
	})
}

func TestInTxInsideRetryStartsTheOutermostAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &fakeDB{}
		rows := rowlock.New(db)
		var outer, inner int
		err := rowlock.InTx(t.Context(), rows, func(ctx context.Context, _ dblock.Tx) error {
			outer++
			return rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error {
				if inner++; inner < 3 {
					return driverError{dialect.Deadlock}
				}
				return nil
			}, dblock.NewKey("account", "2"))
		}, key)
		if err := errors.Join(err, db.check(2, 4)); err != nil {
			t.Error(err)
		}
		if outer != 3 || inner != 3 {
			t.Errorf("the outer function ran %d times, the inner %d: want 3 of each", outer, inner)
		}
	})
}

func TestInTxReturnsTheFunctionsErrorAsItIs(t *testing.T) {
	db := &fakeDB{}
	poor := errors.New("not enough money")
	err := rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error { return poor }, key)
	if err != poor {
		t.Errorf("%v, want %v itself", err, poor)
	}
	if err := db.check(0, 1); err != nil {
		t.Error(err)
	}
}

func TestInTxJoinsTheErrorOfTheRollback(t *testing.T) {
	poor := errors.New("not enough money")
	db := &fakeDB{rollback: func(context.Context) error { return driverError{dialect.Lost} }}
	err := rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error { return poor }, key)
	if !errors.Is(err, poor) || !errors.Is(err, dblock.ErrLost) || !errors.Is(err, driverError{dialect.Lost}) {
		t.Errorf("%v does not match both errors", err)
	}
}

func TestInTxRollsBackWithAContextOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &fakeDB{rollback: func(ctx context.Context) error {
			if ctx.Err() != nil {
				t.Error("rollback with a context that has ended")
			}
			<-ctx.Done() // a server that does not answer
			return ctx.Err()
		}}
		ctx, cancel := context.WithCancel(t.Context())
		start := time.Now()
		err := rowlock.InTx(ctx, rowlock.New(db), func(ctx context.Context, _ dblock.Tx) error {
			cancel()
			return ctx.Err()
		}, key)
		if !errors.Is(err, context.Canceled) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if waited := time.Since(start); waited > time.Minute {
			t.Errorf("the rollback took %v", waited)
		}
	})
}

func TestInTxDoesNotCommitAfterACancel(t *testing.T) {
	db := &fakeDB{}
	ctx, cancel := context.WithCancel(t.Context())
	err := rowlock.InTx(ctx, rowlock.New(db), func(context.Context, dblock.Tx) error {
		cancel()
		return nil
	}, key)
	if !errors.Is(err, dblock.ErrCanceled) || strings.Contains(err.Error(), "unknown") {
		t.Errorf("%v", err)
	}
	if err := db.check(0, 1); err != nil {
		t.Error(err)
	}
}

// database/sql rolls back by itself when ctx ends, and may do so first.
func TestInTxCancelledJustBeforeTheCommit(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	db := &fakeDB{commit: func(context.Context) error {
		cancel()
		return driverError{dialect.Closed}
	}}
	err := rowlock.InTx(ctx, rowlock.New(db), func(context.Context, dblock.Tx) error { return nil }, key)
	if !errors.Is(err, dblock.ErrCanceled) || strings.Contains(err.Error(), "itself") {
		t.Errorf("%v", err)
	}
}

func TestInTxSaysThatTheOutcomeOfACommitIsUnknown(t *testing.T) {
	for _, class := range []dialect.Class{dialect.Lost, dialect.Unavailable, dialect.Canceled, dialect.Timeout} {
		db := &fakeDB{commit: func(context.Context) error { return driverError{class} }}
		err := rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error { return nil }, key)
		if !errors.Is(err, class) || !errors.Is(err, driverError{class}) || !strings.Contains(err.Error(), "unknown whether") {
			t.Errorf("%v", err)
		}
		if db.begun != 1 {
			t.Errorf("%s: %d transactions, want 1", class, db.begun)
		}
	}
}

func TestInTxRefusedCommit(t *testing.T) {
	refused := errors.New("violates a deferred constraint")
	db := &fakeDB{commit: func(context.Context) error { return refused }}
	err := rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error { return nil }, key)
	if !errors.Is(err, refused) || strings.Contains(err.Error(), "unknown") {
		t.Errorf("%v", err)
	}
}

func TestInTxNoticesThatTheFunctionEndedTheTransaction(t *testing.T) {
	db := &fakeDB{commit: func(context.Context) error { return driverError{dialect.Closed} }}
	err := rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error { return nil }, key)
	if !errors.Is(err, dblock.ErrClosed) || !strings.Contains(err.Error(), "ended the transaction itself") {
		t.Errorf("%v", err)
	}
	if db.begun != 1 {
		t.Errorf("%d transactions, want 1", db.begun)
	}
}

func TestInTxPanicRollsBackAndGoesOn(t *testing.T) {
	db := &fakeDB{}
	var got any
	func() {
		defer func() { got = recover() }()
		_ = rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error { panic("boom") }, key)
	}()
	if got != "boom" {
		t.Errorf("recovered %v", got)
	}
	if err := db.check(0, 1); err != nil {
		t.Error(err)
	}
}

func TestInTxGoexitRollsBack(t *testing.T) {
	db := &fakeDB{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error {
			runtime.Goexit()
			return nil
		}, key)
	}()
	<-done
	if err := db.check(0, 1); err != nil {
		t.Error(err)
	}
}

func TestInTxRefusesBeforeItBegins(t *testing.T) {
	db := &fakeDB{}
	rows := rowlock.New(db)
	nothing := func(context.Context, dblock.Tx) error { return nil }
	if err := rowlock.InTx(t.Context(), rows, nothing); !errors.Is(err, dblock.ErrInvalidKey) {
		t.Errorf("no keys: %v", err)
	}
	if err := rowlock.InTx[dblock.Tx](t.Context(), rows, nil, key); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("no function: %v", err)
	}
	if db.begun != 0 {
		t.Error("a transaction was begun all the same")
	}
}

func TestInTxCannotBegin(t *testing.T) {
	db := &fakeDB{begin: func(context.Context) error { return driverError{dialect.Unavailable} }}
	err := rowlock.InTx(t.Context(), rowlock.New(db), func(context.Context, dblock.Tx) error { return nil }, key)
	if !errors.Is(err, dblock.ErrUnavailable) || !errors.Is(err, driverError{dialect.Unavailable}) {
		t.Errorf("%v does not match both the class and the driver's error", err)
	}
}
