package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

func remains(err error) dialect.Remains {
	var e *dialect.Error
	errors.As(err, &e)
	return e.Remains
}

// pidOf is the server process of a transaction.
func pidOf(t testing.TB, tx dialect.OwnedTx) (pid int64) {
	t.Helper()
	var err error
	switch tx := tx.Native().(type) {
	case pgx.Tx:
		err = tx.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid)
	case *sql.Tx:
		err = tx.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid)
	}
	must(t, err)
	return pid
}

func TestFailedTransactionLockLeavesTheTransactionUsable(t *testing.T) {
	tests := []struct {
		name  string
		class dialect.Class
		keys  []dialect.Key
		try   bool
		wait  time.Duration
	}{
		{name: "try", class: dialect.NotAcquired, keys: keys(20), try: true},
		{name: "try shared", class: dialect.NotAcquired, keys: shared(20), try: true},
		{name: "try of several", class: dialect.NotAcquired, keys: keys(10, 20, 30), try: true},
		{name: "try of several, the last of them held", class: dialect.NotAcquired, keys: keys(10, 20), try: true},
		{name: "bounded wait", class: dialect.Timeout, keys: keys(20), wait: 20 * time.Millisecond},
		{name: "bounded wait for several", class: dialect.Timeout, keys: keys(10, 20, 30), wait: 20 * time.Millisecond},
		{name: "wait rounded up", class: dialect.Timeout, keys: keys(20), wait: 1},
	}
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		lock(t, session(t, db), keys(20))
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				tx := begin(t, db, nil)
				exec(t, tx, "SET LOCAL statement_timeout = '77s'")
				must(t, db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: keys(5), Try: true}))
				err := db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: test.keys, Try: test.try, Wait: test.wait})
				wantClass(t, err, test.class)
				if remains(err) != dialect.RemainsUsable {
					t.Errorf("%v says that %d remains", err, remains(err))
				}
				if got := held(t, db, pidOf(t, tx), false); !reflect.DeepEqual(got, []int64{5}) {
					t.Errorf("the transaction holds %v, want only what it held before", got)
				}
				// Fails unless the setting is as before the call.
				exec(t, tx, "SELECT 1 / (current_setting('statement_timeout') = '77s')::int")
				must(t, tx.Commit(t.Context()))
			})
		}
	})
}

func TestTransactionLockIsHeldInItsModeUntilTheEnd(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		other := session(t, db)
		for _, request := range []dialect.TxRequest{
			{Try: true}, {}, {Wait: time.Minute}, {Wait: math.MaxInt64},
		} {
			for _, mixed := range [][]dialect.Key{keys(-1), shared(-1), append(shared(-1), keys(2, 3)...)} {
				request.Keys = mixed
				tx := begin(t, db, nil)
				exec(t, tx, "SET LOCAL statement_timeout = '77s'")
				must(t, db.AcquireTx(t.Context(), tx, request))
				exec(t, tx, "SELECT 1 / (current_setting('statement_timeout') = '77s')::int")
				if got := held(t, db, pidOf(t, tx), false); len(got) != len(mixed) {
					t.Fatalf("%+v: the transaction holds %v", request, got)
				}
				_, err := other.Acquire(t.Context(), try(keys(-1)))
				wantClass(t, err, dialect.NotAcquired)
				if mixed[0].Mode == dialect.Shared {
					lock(t, other, shared(-1))
					must(t, other.Release(t.Context(), shared(-1)))
				}
				must(t, tx.Commit(t.Context()))
				lock(t, other, keys(-1, 2, 3))
				must(t, other.Release(t.Context(), keys(-1, 2, 3)))
			}
		}
	})
}

// lock_timeout would begin anew with each key, and none of these takes as long.
func TestWaitBoundsTheWholeCallForSeveralKeys(t *testing.T) {
	db := throughPgx(t)
	all := keys(1, 2, 3, 4, 5, 6, 7, 8)
	var holders []dialect.OwnedTx
	for _, k := range all {
		tx := begin(t, db, nil)
		must(t, db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: []dialect.Key{k}}))
		holders = append(holders, tx)
	}
	var released sync.WaitGroup
	for i, holder := range holders {
		released.Go(func() {
			_, err := holder.ExecContext(t.Context(), fmt.Sprintf("SELECT pg_sleep(%f)", 0.2*float64(i+1)))
			if err := errors.Join(err, holder.Rollback(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
	const wait = 500 * time.Millisecond
	began := time.Now()
	err := db.AcquireTx(t.Context(), begin(t, db, nil), dialect.TxRequest{Keys: all, Wait: wait})
	wantClass(t, err, dialect.Timeout)
	if waited := time.Since(began); waited < wait {
		t.Errorf("gave up after %v, before %v", waited, wait)
	}
	released.Wait()
}

func TestVictimOfADeadlockGoesOnWithTheLocksThatItHad(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		a, b := begin(t, db, nil), begin(t, db, nil)
		for _, tx := range []dialect.Tx{a, b} {
			exec(t, tx, "SET LOCAL deadlock_timeout = '20ms'")
		}
		acquire := func(tx dialect.Tx, id int64) error {
			return db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: keys(id)})
		}
		must(t, acquire(a, 1))
		must(t, acquire(b, 2))
		type result struct {
			tx  dialect.OwnedTx
			err error
		}
		results := make(chan result, 2)
		go func() { results <- result{a, acquire(a, 2)} }()
		go func() { results <- result{b, acquire(b, 1)} }()
		victim := <-results
		wantClass(t, victim.err, dialect.Deadlock)
		if remains(victim.err) != dialect.RemainsUsable {
			t.Errorf("%v says that %d remains", victim.err, remains(victim.err))
		}
		exec(t, victim.tx, "SELECT 1")
		must(t, victim.tx.Rollback(t.Context()))
		must(t, (<-results).err)
	})
}

func TestLocksOfATransactionNeedOne(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		conn, err := db.SQL().Conn(t.Context())
		must(t, err)
		defer conn.Close()
		for _, tx := range []dialect.Tx{db.SQL(), conn} {
			for _, r := range []dialect.TxRequest{{Keys: keys(1)}, {Keys: keys(1), Try: true}, {Keys: keys(1, 2), Try: true}} {
				err := db.AcquireTx(t.Context(), tx, r)
				wantClass(t, err, dialect.Unsupported)
				wantText(t, err, "begin one")
			}
			_, err = db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(1)})
			wantClass(t, err, dialect.Unsupported)
		}
		if n := value[int](t, db.SQL(), "SELECT count(*) FROM locks"); n != 0 {
			t.Errorf("%d rows were created outside a transaction", n)
		}
		exec(t, conn, "BEGIN")
		must(t, db.AcquireTx(t.Context(), conn, dialect.TxRequest{Keys: keys(1), Try: true}))
		exec(t, conn, "COMMIT")
	})
}

type execOnly struct{ dialect.Tx }

// embedding is a transaction as sqlx has it.
type embedding struct{ *sql.Tx }

func TestWhatIsNoTransactionIsRefusedByName(t *testing.T) {
	db := throughPgx(t)
	refused := func(tx dialect.Tx, class dialect.Class) {
		t.Helper()
		err := db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: keys(1)})
		wantClass(t, err, class)
		_, err = db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(1)})
		wantClass(t, err, class)
	}
	refused(execOnly{}, dialect.Unsupported)
	for _, tx := range []dialect.Tx{nil, (*sql.Tx)(nil), (*sql.Conn)(nil), (*embedding)(nil),
		postgres.Tx(nil), postgres.Tx((*pgxpool.Tx)(nil))} {
		refused(tx, dialect.InvalidOption)
	}
	_, err := db.Begin(t.Context(), &sql.TxOptions{Isolation: sql.LevelLinearizable})
	wantClass(t, err, dialect.Unsupported)
}

func TestAbortedTransactionStaysAborted(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		tx := begin(t, db, nil)
		if _, err := tx.ExecContext(t.Context(), "SELECT 1/0"); err == nil {
			t.Fatal("1/0 did not fail")
		}
		err := db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: keys(1)})
		wantClass(t, err, dialect.Unsupported)
		wantText(t, err, "roll it back")
		if remains(err) != dialect.RemainsAborted {
			t.Errorf("%v says that %d remains", err, remains(err))
		}
	})
}

func TestCancelledWaitInATransactionSaysWhatRemains(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		lock(t, session(t, db), keys(1))
		tx := begin(t, db, nil)
		pid := pidOf(t, tx)
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() { result <- db.AcquireTx(ctx, tx, dialect.TxRequest{Keys: keys(1)}) }()
		eventuallyWaiting(t, db, 1)
		cancel()
		err := <-result
		wantClass(t, err, dialect.Canceled)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v does not wrap the context's error", err)
		}
		_, execErr := tx.ExecContext(t.Context(), "SELECT 1")
		if usable := remains(err) == dialect.RemainsUsable; usable != (execErr == nil) {
			t.Errorf("%v says that %d remains, but the next statement: %v", err, remains(err), execErr)
		}
		eventually(t, "the waiter is gone", func() bool { return len(held(t, db, pid, true)) == 0 })
	})
}

// calls are all kinds of locks in a transaction.
func calls(db *postgres.DB) map[string]func(context.Context, dialect.Tx) error {
	acquire := func(r dialect.TxRequest) func(context.Context, dialect.Tx) error {
		return func(ctx context.Context, tx dialect.Tx) error { return db.AcquireTx(ctx, tx, r) }
	}
	return map[string]func(context.Context, dialect.Tx) error{
		"wait":            acquire(dialect.TxRequest{Keys: keys(1)}),
		"bounded wait":    acquire(dialect.TxRequest{Keys: keys(1), Wait: time.Minute}),
		"wait of several": acquire(dialect.TxRequest{Keys: keys(1, 2)}),
		"try":             acquire(dialect.TxRequest{Keys: keys(1), Try: true}),
		"try of several":  acquire(dialect.TxRequest{Keys: keys(1, 2), Try: true}),
		"rows": func(ctx context.Context, tx dialect.Tx) error {
			_, err := db.LockRows(ctx, tx, dialect.RowRequest{Keys: keys(1)})
			return err
		},
		"several rows": func(ctx context.Context, tx dialect.Tx) error {
			_, err := db.LockRows(ctx, tx, dialect.RowRequest{Keys: keys(1, 2)})
			return err
		},
	}
}

func TestContextThatHasEndedLeavesTheTransactionUsable(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		for name, call := range calls(db) {
			t.Run(name, func(t *testing.T) {
				tx := begin(t, db, nil)
				for ctx, class := range map[context.Context]dialect.Class{canceled: dialect.Canceled, expired: dialect.Timeout} {
					err := call(ctx, tx)
					wantClass(t, err, class)
					wantOneLine(t, err)
					if remains(err) != dialect.RemainsUsable {
						t.Errorf("%v says that %d remains", err, remains(err))
					}
					exec(t, tx, "SELECT 1")
				}
				must(t, call(t.Context(), tx))
				must(t, tx.Commit(t.Context()))
			})
		}
	})
}

// endsOnceAsked ends as soon as somebody has found that it has not.
type endsOnceAsked struct {
	context.Context
	asked atomic.Bool
}

func (c *endsOnceAsked) Done() <-chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}

func (c *endsOnceAsked) Err() error {
	if c.asked.Swap(true) {
		return context.Canceled
	}
	return nil
}

func TestContextThatEndsBeforeTheDriverSendsSaysWhatRemains(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		for name, call := range calls(db) {
			t.Run(name, func(t *testing.T) {
				tx := begin(t, db, nil)
				err := call(&endsOnceAsked{Context: t.Context()}, tx)
				wantClass(t, err, dialect.Canceled)
				wantOneLine(t, err)
				_, execErr := tx.ExecContext(t.Context(), "SELECT 1")
				want := dialect.RemainsAborted
				if _, throughPgx := tx.Native().(pgx.Tx); throughPgx {
					want = dialect.RemainsUsable
				} else if name == "try" { // has no savepoint whose absence would tell
					want = dialect.RemainsUnknown
				}
				if remains(err) != want || (want == dialect.RemainsAborted) != (execErr != nil) {
					t.Errorf("%v says that %d remains, want %d; the next statement: %v", err, remains(err), want, execErr)
				}
			})
		}
	})
}

// preparing prepares every statement, as gorm does with PrepareStmt.
type preparing struct{ *sql.Tx }

func (p preparing) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	s, err := p.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return s.ExecContext(ctx, args...)
}

func TestTransactionThatPreparesEveryStatementIsRefused(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		for name, call := range calls(db) {
			t.Run(name, func(t *testing.T) {
				tx, err := db.SQL().BeginTx(t.Context(), nil)
				must(t, err)
				defer tx.Rollback()
				err = call(t.Context(), preparing{tx})
				wantClass(t, err, dialect.Unsupported)
				wantText(t, err, "PrepareStmt")
				wantOneLine(t, err)
				if strings.Count(err.Error(), "multiple commands") != 1 {
					t.Errorf("%v does not name the cause once", err)
				}
				if remains(err) != dialect.RemainsAborted {
					t.Errorf("%v says that %d remains", err, remains(err))
				}
				_, err = tx.ExecContext(t.Context(), "SELECT 1")
				wantText(t, err, "25P02")
			})
		}
	})
}

func TestFailedRowLockLeavesTheTransactionUsable(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		creator := begin(t, db, nil)
		_, err := db.LockRows(t.Context(), creator, dialect.RowRequest{Keys: keys(20)})
		must(t, err)

		refused := func(t *testing.T) {
			tx := begin(t, db, nil)
			exec(t, tx, "SET LOCAL lock_timeout = '77s'")
			_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(10, 20), Try: true})
			wantClass(t, err, dialect.NotAcquired)
			if remains(err) != dialect.RemainsUsable {
				t.Errorf("%v says that %d remains", err, remains(err))
			}
			exec(t, tx, "SELECT 1 / (current_setting('lock_timeout') = '77s')::int")
			other := begin(t, db, nil)
			_, err = db.LockRows(t.Context(), other, dialect.RowRequest{Keys: keys(10), Try: true})
			must(t, err) // kept by the refused call
			must(t, other.Rollback(t.Context()))
			exec(t, tx, "SET LOCAL lock_timeout = '10ms'")
			_, err = db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(10, 20)})
			wantClass(t, err, dialect.Timeout)
			must(t, tx.Commit(t.Context()))
		}
		t.Run("by an uncommitted creator", refused)
		must(t, creator.Commit(t.Context()))
		holder := begin(t, db, nil)
		_, err = db.LockRows(t.Context(), holder, dialect.RowRequest{Keys: keys(20)})
		must(t, err)
		t.Run("by a holder", refused)
	})
}

// wantUsableIfSo fails unless the transaction goes on if the error says that, and
// otherwise says that it does not.
func wantUsableIfSo(t *testing.T, tx dialect.Tx, err error) {
	t.Helper()
	_, execErr := tx.ExecContext(t.Context(), "SELECT 1")
	want := dialect.RemainsUsable
	if execErr != nil {
		want = dialect.RemainsAborted
	}
	if remains(err) != want {
		t.Errorf("%v says that %d remains, want %d; the next statement: %v", err, remains(err), want, execErr)
	}
}

func TestRowLockWithoutATableNamesTheSetup(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		tx := begin(t, db, nil)
		_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Table: dialect.Table{Name: "missing"}, Keys: keys(1)})
		wantClass(t, err, dialect.Setup)
		wantText(t, err, "dblock setup")
		wantUsableIfSo(t, tx, err)

		readOnly := begin(t, db, &sql.TxOptions{ReadOnly: true})
		_, err = db.LockRows(t.Context(), readOnly, dialect.RowRequest{Keys: keys(1)})
		wantClass(t, err, dialect.Unsupported)
		wantText(t, err, "read-write transaction")
		wantUsableIfSo(t, readOnly, err)
	})
}

func TestRowThatChangedAfterTheSnapshotIsASerializationFailure(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
			tx := begin(t, db, &sql.TxOptions{Isolation: level})
			exec(t, tx, "SELECT count(*) FROM locks")
			other := begin(t, db, nil)
			_, err := db.LockRows(t.Context(), other, dialect.RowRequest{Keys: keys(1)})
			must(t, err)
			exec(t, other, "UPDATE locks SET fence = fence + 1 WHERE id = 1")
			must(t, other.Commit(t.Context()))
			_, err = db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(1)})
			wantClass(t, err, dialect.Serialization)
			must(t, tx.Rollback(t.Context()))
		}
	})
}

func TestFencingNumbersOfRowsGrowInTheOrderOfTheKeys(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		odd := dialect.Table{Schema: `odd "schema"`, Name: "Locks"}
		exec(t, db.SQL(), `CREATE SCHEMA IF NOT EXISTS "odd ""schema"""`)
		table(t, db, odd)
		lockRows := func(all []dialect.Key, fence bool) []int64 {
			tx := begin(t, db, nil)
			numbers, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Table: odd, Keys: all, Fence: fence})
			must(t, err)
			must(t, tx.Commit(t.Context()))
			return numbers
		}
		if got := lockRows(keys(-7, 9), false); got != nil {
			t.Errorf("numbers %v, though none were asked for", got)
		}
		first := lockRows(keys(9), true)
		quoted := keys(-7, 9)
		quoted[0].Name = `it's a \ name`
		if got := lockRows(quoted, true); len(got) != 2 || got[1] < first[0]+dialect.FenceStride {
			t.Errorf("numbers %v after %v of the second", got, first)
		}
	})
}

// It locks no more strongly than exclusion needs, and writes nothing.
func TestLockedRowIsNotWritten(t *testing.T) {
	db := throughPgx(t)
	version := func() string { return value[string](t, db.SQL(), "SELECT xmin || ctid::text FROM locks WHERE id = 1") }
	for range 2 {
		tx := begin(t, db, nil)
		_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(1)})
		must(t, err)
		must(t, tx.Commit(t.Context()))
	}
	before := version()
	tx := begin(t, db, nil)
	_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(1)})
	must(t, err)
	for _, strength := range []string{"UPDATE", "NO KEY UPDATE", "SHARE"} {
		if n := value[int](t, db.SQL(), "SELECT count(*) FROM (SELECT FROM locks FOR "+strength+" SKIP LOCKED) AS free"); n != 0 {
			t.Errorf("the row is free for %s", strength)
		}
	}
	must(t, tx.Commit(t.Context()))
	if after := version(); after != before {
		t.Errorf("row version %s became %s", before, after)
	}
}

func TestTransactionLocksWorkInEveryQueryMode(t *testing.T) {
	dsn := servers.Postgres(t).Database(t)
	table(t, opened(t)(overPgx(t, dsn)), dialect.Table{})
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			config, err := pgxpool.ParseConfig(dsn)
			must(t, err)
			config.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			must(t, err)
			defer pool.Close()
			db, err := postgres.New(t.Context(), pool)
			must(t, err)
			defer db.Close()

			tx, err := pool.Begin(t.Context())
			must(t, err)
			defer tx.Rollback(context.Background())
			must(t, db.AcquireTx(t.Context(), postgres.Tx(tx), dialect.TxRequest{Keys: keys(1, 2), Wait: time.Second}))
			must(t, db.AcquireTx(t.Context(), postgres.Tx(tx), dialect.TxRequest{Keys: keys(3, 4), Try: true}))
			numbers, err := db.LockRows(t.Context(), postgres.Tx(tx), dialect.RowRequest{Keys: keys(1, 2), Fence: true})
			must(t, err)

			s := session(t, db)
			fenced, err := s.Acquire(t.Context(), dialect.Request{Keys: append(shared(-5), keys(6)...), Fence: &dialect.Table{}})
			must(t, err)
			ok, err := dialect.HoldsAll(t.Context(), s, append(shared(-5), keys(6)...))
			must(t, err)
			if len(numbers) != 2 || len(fenced) != 2 || !ok {
				t.Errorf("numbers %v and %v, held %t", numbers, fenced, ok)
			}
			lock(t, s, keys(-9))
			must(t, s.Release(t.Context(), keys(-9)))
			must(t, s.Release(t.Context(), append(shared(-5), keys(6)...)))
		})
	}
}

// Each new row may have to wait for another session that extends the file.
func TestTryForARowThatNobodyHoldsIsNotRefused(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		db.SQL().SetMaxOpenConns(16)
		// Drivers other than pgx draw numbers on a connection that they keep of the pool.
		tx := begin(t, db, nil)
		_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(-1), Fence: true})
		must(t, errors.Join(err, tx.Commit(t.Context())))
		const goroutines, each = 16, 400
		var ended sync.WaitGroup
		for g := range int64(goroutines) {
			ended.Go(func() {
				for i := range int64(each) {
					tx, err := db.Begin(t.Context(), nil)
					if err != nil {
						t.Error(err)
						return
					}
					fresh := keys(g*each + i)
					fresh[0].Name = strings.Repeat("x", 64)
					_, err = db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: fresh, Try: true, Fence: i%50 == 0})
					if err := errors.Join(err, tx.Commit(t.Context())); err != nil {
						t.Errorf("key %d: %v", fresh[0].ID, err)
					}
				}
			})
		}
		ended.Wait()
	})
}

// counting counts the messages to the server.
type counting struct {
	*sql.Tx
	messages int
}

func (c *counting) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	c.messages++
	return c.Tx.ExecContext(ctx, query, args...)
}

func TestTryForARowTakesFewRoundTrips(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		attempt := func(what string, ids []int64, class dialect.Class, messages int) *counting {
			t.Helper()
			tx, err := db.SQL().BeginTx(t.Context(), nil)
			must(t, err)
			t.Cleanup(func() { tx.Rollback() })
			counted := &counting{Tx: tx}
			_, err = db.LockRows(t.Context(), counted, dialect.RowRequest{Keys: keys(ids...), Try: true})
			wantClass(t, err, class)
			if counted.messages != messages {
				t.Errorf("%s: %d messages, want %d", what, counted.messages, messages)
			}
			return counted
		}
		creator := attempt("missing", []int64{1}, "", 2)
		attempt("refused by a creator", []int64{1}, dialect.NotAcquired, 3)
		must(t, creator.Commit())
		holder := attempt("free", []int64{1}, "", 1)
		attempt("refused by a holder", []int64{1}, dialect.NotAcquired, 2)
		attempt("refused by a holder, another is missing", []int64{0, 1}, dialect.NotAcquired, 3)
		must(t, holder.Commit())
		attempt("free, another is missing", []int64{0, 1}, "", 2)
	})
}
