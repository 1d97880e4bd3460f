package mysql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
)

var repeatableRead = &sql.TxOptions{Isolation: sql.LevelRepeatableRead}

func lock(ctx context.Context, db *mysql.DB, tx dialect.Tx, ids ...int64) error {
	_, err := db.LockRows(ctx, tx, rows(ids...))
	return err
}

func try(ctx context.Context, db *mysql.DB, tx dialect.Tx, ids ...int64) error {
	r := rows(ids...)
	r.Try = true
	_, err := db.LockRows(ctx, tx, r)
	return err
}

func rows(ids ...int64) dialect.RowRequest {
	var r dialect.RowRequest
	for _, id := range ids {
		r.Keys = append(r.Keys, key(fmt.Sprintf("row-%d", id), id))
	}
	return r
}

// The reason why rows are created beforehand, and why a try is NOWAIT rather than
// SKIP LOCKED: what a locking read locks under REPEATABLE READ beyond its row.
func TestLockingReadsAndGaps(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.open(t)
		holder, reader, creator := e.conn(t), e.conn(t), e.conn(t)
		e.exec(t, creator, "SET SESSION innodb_lock_wait_timeout = 1")
		for _, c := range []struct {
			query string
			busy  bool
			gap   bool
		}{
			{"SELECT id FROM locks WHERE id = 10 FOR UPDATE", false, false},
			{"SELECT id FROM locks WHERE id = 15 FOR UPDATE", false, true},
			{"SELECT id FROM locks WHERE id = 15 FOR UPDATE NOWAIT", false, true},
			{"SELECT id FROM locks WHERE id = 20 FOR UPDATE NOWAIT", true, false},
			{"SELECT id FROM locks WHERE id = 20 FOR UPDATE SKIP LOCKED", false, true},
		} {
			e.exec(t, e.admin, "TRUNCATE locks") // a deleted row would still fill its gap
			e.exec(t, e.admin, "INSERT INTO locks (id, name) VALUES (10, ''), (20, '')")
			e.exec(t, holder, "BEGIN")
			e.exec(t, holder, "SELECT id FROM locks WHERE id = 20 FOR UPDATE")
			e.exec(t, reader, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
			e.exec(t, reader, "BEGIN")
			if _, err := reader.ExecContext(e.ctx, c.query); (err != nil) != c.busy {
				t.Errorf("%s: %v", c.query, err)
			}
			gap := false
			for _, id := range []int{16, 30} {
				_, err := creator.ExecContext(e.ctx, fmt.Sprintf("INSERT INTO locks (id, name) VALUES (%d, '')", id))
				gap = gap || err != nil
			}
			if gap != c.gap {
				t.Errorf("%s locks a gap: %v, want %v", c.query, gap, c.gap)
			}
			e.exec(t, reader, "ROLLBACK")
			e.exec(t, holder, "ROLLBACK")
		}
	})
}

// The lock is the first statement and has to wait; the read after it must be
// fresh nevertheless.
func TestReadAfterTheLockIsFresh(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE account (balance INT)")
		e.exec(t, e.admin, "INSERT INTO account VALUES (100)")
		for round := range 2 { // the first time the row is missing
			holder, waiter := e.begin(t, db, repeatableRead), e.begin(t, db, repeatableRead)
			id := value[int64](t, e.ctx, waiter.(dialect.Querier), "SELECT CONNECTION_ID()")
			if err := lock(e.ctx, db, holder, 1); err != nil {
				t.Fatal(err)
			}
			result := make(chan error, 1)
			go func() { result <- lock(e.ctx, db, waiter, 1) }()
			e.awaitStatement(t, id, "%SELECT id,% FROM %", 0)
			e.exec(t, holder, "UPDATE account SET balance = balance - 1")
			if err := holder.Commit(e.ctx); err != nil {
				t.Fatal(err)
			}
			if err := <-result; err != nil {
				t.Fatal(err)
			}
			if balance := value[int](t, e.ctx, waiter.(dialect.Querier), "SELECT balance FROM account"); balance != 99-round {
				t.Errorf("round %d: read a balance of %d", round, balance)
			}
			if err := waiter.Rollback(e.ctx); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// One statement for several rows locks these rows, and neither others nor a gap: of
// small tables a server would rather read all.
func TestSeveralRowsAreLockedExactly(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE account (balance INT)")
		e.exec(t, e.admin, "INSERT INTO account VALUES (100)")
		all := []int64{10, 20, 30, 40, 50}
		creator := e.begin(t, db, nil)
		if err := errors.Join(lock(e.ctx, db, creator, all...), creator.Commit(e.ctx)); err != nil {
			t.Fatal(err)
		}
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelReadCommitted} {
			for _, asked := range [][]int64{all, {10, 20, 40, 50}, {20, 40}} {
				tx, err := db.SQL().BeginTx(e.ctx, &sql.TxOptions{Isolation: level})
				if err != nil {
					t.Fatal(err)
				}
				holder := &counting{Tx: tx}
				if err := lock(e.ctx, db, holder, asked...); err != nil {
					t.Fatal(err)
				}
				if holder.statements != 1 {
					t.Errorf("%d statements for %v, want 1", holder.statements, asked)
				}
				e.exec(t, e.admin, "UPDATE account SET balance = balance + 1")
				if balance := value[int](t, e.ctx, holder, "SELECT balance FROM account"); balance != value[int](t, e.ctx, e.admin, "SELECT balance FROM account") {
					t.Errorf("read a stale balance of %d after the lock", balance)
				}
				other := e.begin(t, db, nil)
				for _, id := range all {
					if err := try(e.ctx, db, other, id); errors.Is(err, dialect.NotAcquired) != slices.Contains(asked, id) {
						t.Errorf("%v: %v locked, then row %d: %v", level, asked, id, err)
					}
				}
				if err := other.Rollback(e.ctx); err != nil {
					t.Fatal(err)
				}
				creator := e.conn(t)
				e.exec(t, creator, "SET SESSION innodb_lock_wait_timeout = 1")
				e.exec(t, creator, "BEGIN")
				for _, id := range []int64{5, 25, 55} {
					e.exec(t, creator, fmt.Sprintf("INSERT INTO locks (id, name) VALUES (%d, '')", id))
				}
				e.exec(t, creator, "ROLLBACK")
				if err := holder.Rollback(); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// Those before the one that is refused are locked, and none after it.
func TestSeveralRowsAreLockedInOrder(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		all := make([]int64, 250) // of several statements
		for i := range all {
			all[i] = int64(i + 1)
		}
		creator := e.begin(t, db, nil)
		if err := errors.Join(lock(e.ctx, db, creator, all...), creator.Commit(e.ctx)); err != nil {
			t.Fatal(err)
		}
		for _, refused := range []int64{1, 30, 101, 250} {
			holder, waiter := e.begin(t, db, nil), e.begin(t, db, repeatableRead)
			if err := lock(e.ctx, db, holder, refused); err != nil {
				t.Fatal(err)
			}
			wantClass(t, try(e.ctx, db, waiter, all...), dialect.NotAcquired)
			other := e.begin(t, db, nil)
			for _, id := range all {
				if err := try(e.ctx, db, other, id); errors.Is(err, dialect.NotAcquired) != (id <= refused) {
					t.Errorf("refused at %d, then row %d: %v", refused, id, err)
				}
			}
			for _, tx := range []dialect.OwnedTx{other, holder} {
				if err := tx.Rollback(e.ctx); err != nil {
					t.Fatal(err)
				}
			}
			if err := lock(e.ctx, db, waiter, all...); err != nil { // once free
				t.Error(err)
			}
			if err := waiter.Rollback(e.ctx); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// counting counts statements.
type counting struct {
	*sql.Tx
	statements int
}

func (c *counting) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	c.statements++
	return c.Tx.QueryContext(ctx, query, args...)
}

// Left alone, the server would keep the waiter for innodb_lock_wait_timeout.
func TestCancelledRowLockLeavesTheServersQueue(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for _, maxConns := range []int{0, 3} {
			db := e.wrap(t, e.dsn, maxConns)
			holder, waiter := e.begin(t, db, nil), e.begin(t, db, nil)
			id := value[int64](t, e.ctx, waiter.(dialect.Querier), "SELECT CONNECTION_ID()")
			if err := lock(e.ctx, db, holder, 1); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(e.ctx)
			defer cancel()
			result := make(chan error, 1)
			go func() { result <- lock(ctx, db, waiter, 1) }()
			e.awaitStatement(t, id, "%SELECT id,% FROM % FOR UPDATE", 0)
			cancel()
			wantClass(t, <-result, dialect.Canceled)
			e.awaitGone(t, id)
			if err := holder.Rollback(e.ctx); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Handlers with transactions of their own lock new keys, alone and together, and
// roll back: no deadlock, which nobody retries here, and no wait for each other's
// connections, of which there may be fewer than handlers.
func TestFirstUseOfKeysByACrowd(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for i, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			for _, maxConns := range []int{4, 0} {
				db := e.wrap(t, e.dsn, maxConns)
				e.exec(t, e.admin, "TRUNCATE locks")
				var all sync.WaitGroup
				for goroutine := range int64(50) {
					all.Go(func() {
						for round := range int64(2) {
							tx, err := db.SQL().BeginTx(e.ctx, &sql.TxOptions{Isolation: isolation})
							if err != nil {
								t.Error(err)
								return
							}
							own, common := 1000*round+goroutine, 1000*round+500+goroutine%5
							if err := lock(e.ctx, db, tx, own, common); err != nil {
								t.Errorf("%v, %d connections: %v", isolation, maxConns, err)
							}
							if err := tx.Rollback(); err != nil {
								t.Error(err)
							}
						}
					})
				}
				all.Wait()
				if n := value[int](t, e.ctx, e.admin, "SELECT COUNT(*) FROM locks"); n != 2*(50+5) {
					t.Errorf("case %d: %d rows", i, n)
				}
			}
		}
	})
}

// poolVariables are the settings of several connections.
func (e *env) poolVariables(t *testing.T, db *mysql.DB) (variables []map[string]string) {
	t.Helper()
	for range 3 {
		conn, err := db.SQL().Conn(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close() // not before the others are checked out
		variables = append(variables, e.sessionVariables(t, conn))
	}
	return variables
}

func (e *env) checkPoolVariables(t *testing.T, db *mysql.DB, before []map[string]string) {
	t.Helper()
	for i, after := range e.poolVariables(t, db) {
		if !maps.Equal(before[i], after) {
			t.Errorf("settings changed from %v to %v", before[i], after)
		}
	}
}

func TestCreatorLeavesThePoolsSettingsAlone(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.wrap(t, with(t, e.dsn, "innodb_lock_wait_timeout", "17", "autocommit", "0"), 0)
		db.SQL().SetMaxIdleConns(10)
		before := e.poolVariables(t, db)
		tx := e.begin(t, db, nil)
		if err := lock(e.ctx, db, tx, 1, 2); err != nil {
			t.Fatal(err)
		}
		if err := tx.Rollback(e.ctx); err != nil {
			t.Fatal(err)
		}
		e.checkPoolVariables(t, db, before)
		if n := value[int](t, e.ctx, e.admin, "SELECT COUNT(*) FROM locks"); n != 2 {
			t.Errorf("%d rows were created and stayed", n)
		}
	})
}

// A wait that is over leaves the transaction as it was, unless the server was
// started with innodb_rollback_on_timeout.
func TestWhatATimeoutLeaves(t *testing.T) {
	test := func(rollsBack bool) func(t *testing.T, e *env) {
		return func(t *testing.T, e *env) {
			db := e.wrap(t, with(t, e.dsn, "innodb_lock_wait_timeout", "1"), 0)
			e.exec(t, e.admin, "CREATE TABLE written (n INT) ENGINE = InnoDB")
			holder := e.begin(t, db, nil)
			if err := lock(e.ctx, db, holder, 1); err != nil {
				t.Fatal(err)
			}
			for name, acquire := range map[string]struct {
				call      func(context.Context, *mysql.DB, dialect.Tx, ...int64) error
				class     dialect.Class
				rollsBack bool
			}{
				"lock": {lock, dialect.Timeout, rollsBack},
				"try":  {try, dialect.NotAcquired, rollsBack && e.mariadb()},
			} {
				tx := e.begin(t, db, nil)
				e.exec(t, tx, "INSERT INTO written VALUES (1)")
				refused := wantClass(t, acquire.call(e.ctx, db, tx, 1), acquire.class)
				left := value[int](t, e.ctx, tx.(dialect.Querier), "SELECT COUNT(*) FROM written")
				want := dialect.RemainsUsable
				if acquire.rollsBack {
					want = dialect.RemainsNothing
				}
				if refused.Remains != want || (left == 0) != acquire.rollsBack {
					t.Errorf("%s: the transaction has %d rows and is said to be %d, want %d", name, left, refused.Remains, want)
				}
				if err := tx.Rollback(e.ctx); err != nil {
					t.Fatal(err)
				}
			}
			// The key before the refused one stays locked.
			tx := e.begin(t, db, nil)
			refused := wantClass(t, try(e.ctx, db, tx, 0, 1), dialect.NotAcquired)
			if want := map[bool]dialect.Remains{true: dialect.RemainsNothing}[rollsBack && e.mariadb()]; refused.Remains != want {
				t.Errorf("the second of two keys: the transaction is said to be %d, want %d", refused.Remains, want)
			}
		}
	}
	t.Run("default", func(t *testing.T) { each(t, test(false)) })
	t.Run("innodb_rollback_on_timeout", func(t *testing.T) { eachPrivate(t, test(true), "innodb-rollback-on-timeout=ON") })
}

// MariaDB's NOWAIT would roll back what came before the wait.
func TestWaitUnderRollbackOnTimeoutKeepsTheTransaction(t *testing.T) {
	eachPrivate(t, func(t *testing.T, e *env) {
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE written (n INT) ENGINE = InnoDB")
		holder, waiter := e.begin(t, db, nil), e.begin(t, db, nil)
		if err := lock(e.ctx, db, holder, 1); err != nil {
			t.Fatal(err)
		}
		id := value[int64](t, e.ctx, waiter.(dialect.Querier), "SELECT CONNECTION_ID()")
		e.exec(t, waiter, "INSERT INTO written VALUES (1)")
		result := make(chan error, 1)
		go func() { result <- lock(e.ctx, db, waiter, 1) }()
		e.awaitStatement(t, id, "%SELECT id,% FROM % FOR UPDATE", 0)
		if err := holder.Commit(e.ctx); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(<-result, try(e.ctx, db, waiter, 2), waiter.Commit(e.ctx)); err != nil {
			t.Fatal(err)
		}
		if n := value[int](t, e.ctx, e.admin, "SELECT COUNT(*) FROM written"); n != 1 {
			t.Errorf("%d rows were committed, want 1", n)
		}
	}, "innodb-rollback-on-timeout=ON")
}

func TestRowLocksNeedATransaction(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		conn := e.conn(t)
		wantClass(t, lock(e.ctx, db, db.SQL(), 1), dialect.Unsupported)
		wantClass(t, lock(e.ctx, db, conn, 1), dialect.Unsupported)
		wantClass(t, lock(e.ctx, db, executor{conn}, 1), dialect.Unsupported)
		e.exec(t, conn, "START TRANSACTION")
		if err := lock(e.ctx, db, conn, 1); err != nil {
			t.Errorf("a connection in a transaction: %v", err)
		}
		wantClass(t, try(e.ctx, db, e.begin(t, db, nil), 1), dialect.NotAcquired)
		e.exec(t, conn, "ROLLBACK")
		e.exec(t, conn, "SET autocommit = 0")
		if err := lock(e.ctx, db, conn, 1); err != nil {
			t.Errorf("a connection that commits by hand: %v", err)
		}
		wantClass(t, lock(e.ctx, db, e.begin(t, db, &sql.TxOptions{ReadOnly: true}), 1), dialect.Unsupported)
	})
}

// What wraps a pool has the methods of what wraps a transaction.
func TestWrappersOfPoolsAreToldFromThoseOfTransactions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		pool := db.SQL()
		for i, wrap := range []func(full) dialect.Querier{
			func(x full) dialect.Querier { return struct{ dialect.Querier }{x} },
			func(x full) dialect.Querier { return struct{ full }{x} },
			func(x full) dialect.Querier { return preparing{full: x} },
			func(x full) dialect.Querier { return preparing{full: x, old: true} },
		} {
			refused := wantClass(t, lock(e.ctx, db, wrap(pool), 1), dialect.Unsupported)
			if !strings.Contains(refused.Hint, "in none") {
				t.Errorf("wrapper %d of a pool: %v", i, refused)
			}
			wantClass(t, lock(e.ctx, db, wrap(e.conn(t)), 1), dialect.Unsupported)
			tx, err := pool.BeginTx(e.ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := lock(e.ctx, db, wrap(tx), 1); err != nil {
				t.Errorf("wrapper %d of a transaction: %v", i, err)
			}
			wantClass(t, try(e.ctx, db, e.begin(t, db, nil), 1), dialect.NotAcquired)
			if err := tx.Commit(); err != nil {
				t.Errorf("wrapper %d: the commit: %v", i, err)
			}
		}
		wantClass(t, lock(e.ctx, db, struct{ *sql.DB }{pool}, 1), dialect.Unsupported)
	})
}

// full is what pools, connections and transactions have.
type full interface {
	dialect.Querier
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// preparing prepares every statement, as gorm does with PrepareStmt.
type preparing struct {
	full
	old bool // a server that cannot prepare savepoints, as MySQL and MariaDB before 10.6
}

func (p preparing) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if p.old && strings.Contains(query, "SAVEPOINT") {
		return nil, &driver.MySQLError{Number: 1295}
	}
	statement, err := p.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	defer statement.Close()
	return statement.ExecContext(ctx, args...)
}

func (p preparing) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	statement, err := p.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	return statement.QueryContext(ctx, args...)
}

func TestTransactionThatIsOverOrNil(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		for name, end := range map[string]func(dialect.OwnedTx) error{
			"commit": func(tx dialect.OwnedTx) error { return tx.Commit(e.ctx) }, "rollback": func(tx dialect.OwnedTx) error { return tx.Rollback(e.ctx) },
		} {
			tx := e.begin(t, db, nil)
			if err := end(tx); err != nil {
				t.Fatal(err)
			}
			for _, tx := range []dialect.Tx{tx, tx.Native().(*sql.Tx), struct{ dialect.Querier }{tx.Native().(*sql.Tx)}} {
				if refused := wantClass(t, lock(e.ctx, db, tx, 1), dialect.Closed); refused.Remains != dialect.RemainsUnknown {
					t.Errorf("%T after the %s is said to be %d", tx, name, refused.Remains)
				}
			}
		}
		for _, tx := range []dialect.Tx{nil, (*sql.Tx)(nil), (*sql.Conn)(nil), (*struct{ *sql.Tx })(nil)} {
			wantClass(t, lock(e.ctx, db, tx, 1), dialect.InvalidOption)
		}
		_, err := db.OnConn(e.ctx, nil)
		wantClass(t, err, dialect.InvalidOption)
	})
}

// executor cannot read rows.
type executor struct{ conn *sql.Conn }

func (x executor) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return x.conn.ExecContext(ctx, query, args...)
}

func TestDeletedRowIsCreatedAgain(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		for name, call := range map[string]func(context.Context, *mysql.DB, dialect.Tx, ...int64) error{"lock": lock, "try": try} {
			tx := e.begin(t, db, repeatableRead)
			if err := call(e.ctx, db, tx, 1); err != nil {
				t.Fatal(err)
			}
			if err := tx.Rollback(e.ctx); err != nil {
				t.Fatal(err)
			}
			e.exec(t, e.admin, "DELETE FROM locks")
			tx = e.begin(t, db, repeatableRead)
			// A try that has locked the gap itself cannot have the row created beside it.
			if err := call(e.ctx, db, tx, 1); err != nil && !(name == "try" && errors.Is(err, dialect.NotAcquired)) {
				t.Errorf("%s after the row was deleted: %v", name, err)
			}
			if err := tx.Rollback(e.ctx); err != nil {
				t.Fatal(err)
			}
			tx = e.begin(t, db, repeatableRead)
			if err := call(e.ctx, db, tx, 1); err != nil {
				t.Errorf("%s once more: %v", name, err)
			}
			if err := tx.Rollback(e.ctx); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// The row is deleted, and its place may be locked by others and, under REPEATABLE READ, by
// the very look that misses it.
func TestLimitHoldsForARowThatWasDeleted(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		const limit = time.Second // of innodb_lock_wait_timeout there are 50
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE account (id INT PRIMARY KEY, balance INT NOT NULL)")
		within := func(tx dialect.OwnedTx) error {
			r := rows(1)
			r.Wait = limit
			_, err := db.LockRows(e.ctx, tx, r)
			return err
		}
		readCommitted := &sql.TxOptions{Isolation: sql.LevelReadCommitted}
		for name, test := range map[string]struct {
			isolation *sql.TxOptions
			gap       bool // somebody has locked it
			want      dialect.Class
		}{
			"free": {readCommitted, false, ""}, "gap": {readCommitted, true, dialect.Timeout}, "own gap": {repeatableRead, false, ""},
			"both": {repeatableRead, true, dialect.Timeout},
		} {
			first := e.begin(t, db, nil)
			if err := lock(e.ctx, db, first, 1); err != nil { // so that the row is known
				t.Fatal(err)
			}
			if err := first.Rollback(e.ctx); err != nil {
				t.Fatal(err)
			}
			e.exec(t, e.admin, "DELETE FROM locks")
			foreign := e.begin(t, db, repeatableRead)
			if test.gap {
				e.exec(t, foreign, "SELECT id FROM locks WHERE id = 1 FOR UPDATE")
			}
			tx := e.begin(t, db, test.isolation)
			start := time.Now()
			err := within(tx)
			if class, took := dialect.ClassOf(err), time.Since(start); class != test.want || took > 20*limit {
				t.Errorf("%s: %v after %v, want %q within %v", name, err, took, test.want, limit)
			}
			e.exec(t, tx, "INSERT INTO account VALUES (1, 1)") // the transaction goes on
			for _, tx := range []dialect.OwnedTx{foreign, tx} {
				if err := tx.Rollback(e.ctx); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// Somebody has locked the gap in which the row belongs, for instance by a locking
// read of his own that missed it.
func TestCreatorDoesNotWaitForAGap(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		db.SQL().SetMaxIdleConns(10)
		before := e.poolVariables(t, db)
		foreign := e.conn(t)
		e.exec(t, foreign, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
		e.exec(t, foreign, "BEGIN")
		e.exec(t, foreign, "SELECT id FROM locks WHERE id = 1 FOR UPDATE")
		for class, call := range map[dialect.Class]func(context.Context, *mysql.DB, dialect.Tx, ...int64) error{
			dialect.Timeout: lock, dialect.NotAcquired: try,
		} {
			tx := e.begin(t, db, nil)
			refused := wantClass(t, call(e.ctx, db, tx, 1), class)
			if refused.Remains != dialect.RemainsUsable {
				t.Errorf("the transaction, which was not used, is said to be %d", refused.Remains)
			}
			e.exec(t, tx, "SELECT 1")
		}
		e.checkPoolVariables(t, db, before)
		e.exec(t, foreign, "ROLLBACK")
		if err := lock(e.ctx, db, e.begin(t, db, nil), 1); err != nil {
			t.Errorf("after the gap is free: %v", err)
		}
	})
}

func TestMissingTableIsNamed(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		tx := e.begin(t, db, nil)
		r := rows(1)
		r.Table.Name = "elsewhere"
		_, err := db.LockRows(e.ctx, tx, r)
		if refused := wantClass(t, err, dialect.Setup); refused.Remains != dialect.RemainsUsable || !strings.Contains(err.Error(), "elsewhere") {
			t.Errorf("%v, %+v", err, refused)
		}
		s := e.session(t, db, dialect.SessionOptions{})
		keys := []dialect.Key{key("missing/"+db.Features().Scope, 1)}
		for flags, table := range map[string]dialect.Table{
			"`dblock setup --table=elsewhere`":                  {Schema: db.Features().Scope, Name: "elsewhere"},
			"`dblock setup --schema=nowhere`":                   {Schema: "nowhere", Name: "locks"},
			"`dblock setup --schema=nowhere --table=elsewhere`": {Schema: "nowhere", Name: "elsewhere"},
		} {
			_, rowErr := db.LockRows(e.ctx, tx, dialect.RowRequest{Table: table, Keys: keys})
			_, fenceErr := s.Acquire(e.ctx, dialect.Request{Keys: keys, Fence: &table})
			_, checkErr := db.CheckTable(e.ctx, table)
			for _, err := range []error{rowErr, fenceErr, checkErr} {
				if refused := wantClass(t, err, dialect.Setup); !strings.Contains(refused.Hint, flags) {
					t.Errorf("%v does not name %s", err, flags)
				}
			}
		}
		if err := errors.Join(lock(e.ctx, db, tx, 1), tx.Commit(e.ctx)); err != nil {
			t.Errorf("after it: %v", err)
		}
	})
}

// The row of a new key is created on a second connection, which has to wait here; the
// end of the limit is not the loss of that connection.
func TestLimitEndsWhileTheRowIsCreated(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		creator, tx := e.begin(t, db, nil), e.begin(t, db, nil)
		e.exec(t, creator, "INSERT INTO locks (id, name) VALUES (1, 'k')")
		for range 20 {
			r := rows(1)
			r.Wait = 20 * time.Millisecond
			_, err := db.LockRows(e.ctx, tx, r)
			if timeout := wantClass(t, err, dialect.Timeout); timeout.Remains != dialect.RemainsUsable {
				t.Errorf("%v says that %d remains", err, timeout.Remains)
			}
		}
		e.exec(t, tx, "DO 0")
	})
}

// Who ends a wait from outside may do so in the moment of the grant.
func TestWaitThatSomebodyElseEndedMayHaveBeenGranted(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		holder, tx := e.begin(t, db, nil), e.begin(t, db, nil)
		if err := lock(e.ctx, db, holder, 1); err != nil {
			t.Fatal(err)
		}
		limit := "SET SESSION max_execution_time = 100"
		if e.mariadb() {
			limit = "SET SESSION max_statement_time = 0.1"
		}
		e.exec(t, tx, limit)
		err := lock(e.ctx, db, tx, 1)
		if ended := wantClass(t, err, dialect.Timeout); ended.Remains != dialect.RemainsUnknown {
			t.Errorf("%v says that %d remains", err, ended.Remains)
		}
		e.exec(t, tx, strings.Replace(strings.Replace(limit, "= 100", "= 0", 1), "= 0.1", "= 0", 1))
	})
}

// MariaDB tells that a deadlock has left nothing of a transaction.
func TestNoLockAfterADeadlockOnMariaDB(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		if !e.mariadb() {
			t.Skip("MySQL does not tell")
		}
		db := e.open(t)
		tx := e.begin(t, db, nil)
		if err := lock(e.ctx, db, tx, 1); err != nil {
			t.Fatal(err)
		}
		e.exec(t, tx, "ROLLBACK") // as the server does
		for _, keys := range [][]int64{{1}, {1, 2}} {
			wantClass(t, lock(e.ctx, db, tx, keys...), dialect.Unsupported)
		}
	})
}
