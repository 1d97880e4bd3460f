package mysql_test

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// around is a transaction that does something around the statement that waits for
// a row.
type around struct {
	*sql.Tx
	wait func(send func(ctx context.Context) (*sql.Rows, error)) (*sql.Rows, error)
}

func (a around) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if !strings.HasSuffix(query, "FOR UPDATE") {
		return a.Tx.QueryContext(ctx, query, args...)
	}
	return a.wait(func(ctx context.Context) (*sql.Rows, error) { return a.Tx.QueryContext(ctx, query, args...) })
}

// A context that ends before the wait was sent, or when the server had ended the
// wait itself, leaves a connection that other statements can follow on: it is not
// killed.
func TestConnectionThatWasNotAbandonedIsNotKilled(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		holder := e.begin(t, db, nil)
		if err := lock(e.ctx, db, holder, 1); err != nil {
			t.Fatal(err)
		}
		for what, c := range map[string]struct {
			wait  func(ctx context.Context, cancel func(), send func(context.Context) (*sql.Rows, error)) (*sql.Rows, error)
			class dialect.Class
		}{
			"not sent": {func(ctx context.Context, cancel func(), send func(context.Context) (*sql.Rows, error)) (*sql.Rows, error) {
				cancel()
				return send(ctx)
			}, dialect.Canceled},
			"answered": {func(ctx context.Context, cancel func(), send func(context.Context) (*sql.Rows, error)) (*sql.Rows, error) {
				rows, err := send(context.WithoutCancel(ctx)) // ends by innodb_lock_wait_timeout
				cancel()
				return rows, err
			}, dialect.Timeout},
		} {
			tx := e.begin(t, db, nil)
			e.exec(t, tx, "SET SESSION innodb_lock_wait_timeout = 1")
			ctx, cancel := context.WithCancel(e.ctx)
			defer cancel()
			waiter := around{tx.Native().(*sql.Tx), func(send func(context.Context) (*sql.Rows, error)) (*sql.Rows, error) {
				return c.wait(ctx, cancel, send)
			}}
			err := lock(ctx, db, waiter, 1)
			if failure := wantClass(t, err, c.class); failure.Remains != dialect.RemainsUnknown {
				t.Errorf("%s: %v leaves %d of the transaction", what, err, failure.Remains)
			}
			if _, err := tx.ExecContext(e.ctx, "DO SLEEP(0.1)"); err != nil {
				t.Errorf("%s: the connection's next statement: %v", what, err)
			}
		}
	})
}

// Waits are cancelled at any moment, on a pool of few connections that others use
// at once: nobody's statement is killed.
func TestCancelledWaitsKillNobodyElse(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.wrap(t, e.dsn, 6)
		locks := rowlock.New(db)
		key := dblock.NewKey("account")
		holder := e.begin(t, db, nil)
		if err := locks.Lock(e.ctx, holder, key); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				for range 100 {
					ctx, cancel := context.WithCancel(e.ctx)
					time.AfterFunc(rand.N(4*time.Millisecond), cancel)
					err := rowlock.InTx(ctx, locks, func(context.Context, *sql.Tx) error { return nil }, key)
					cancel()
					if !errors.Is(err, dblock.ErrCanceled) && !errors.Is(err, dblock.ErrLost) {
						t.Errorf("cancelled: %v", err)
					}
					if _, err := db.SQL().ExecContext(e.ctx, "DO SLEEP(0.003)"); err != nil {
						t.Errorf("the next statement: %v", err)
					}
				}
			})
		}
		all.Wait()
	})
}
