package mysql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/servers"
)

func acquire(s dialect.Session, ctx context.Context, try bool, keys ...dialect.Key) error {
	_, err := s.Acquire(ctx, dialect.Request{Keys: keys, Try: try})
	return err
}

// free reports whether somebody else could have the lock.
func (e *env) free(t *testing.T, k dialect.Key) bool {
	t.Helper()
	return value[int](t, e.ctx, e.admin, fmt.Sprintf("SELECT IS_FREE_LOCK('%s')", k.Name)) == 1
}

// MySQL answers with error 1317, MariaDB with NULL and no error.
func TestKillQueryIsNoGrant(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		k := key("kill-query/"+db.Features().Scope, 1)
		holder, waiter := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
		if err := acquire(holder, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		result := make(chan error, 1)
		go func() { result <- acquire(waiter, e.ctx, false, k) }()
		e.awaitStatement(t, waiter.ID(), "SELECT GET_LOCK%", 0)
		e.exec(t, e.admin, fmt.Sprintf("KILL QUERY %d", waiter.ID()))
		wantClass(t, <-result, dialect.Canceled)
	})
}

func TestCancelledAcquireLeavesTheServersQueueOnClose(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		k := key("cancelled/"+db.Features().Scope, 1)
		holder, waiter := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
		if err := acquire(holder, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(e.ctx)
		result := make(chan error, 1)
		go func() { result <- acquire(waiter, ctx, false, k) }()
		e.awaitStatement(t, waiter.ID(), "SELECT GET_LOCK%", 0)
		cancel(errors.New("no longer wanted"))
		err := <-result
		wantClass(t, err, dialect.Canceled)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v does not contain %v", err, context.Canceled)
		}
		if err := waiter.Close(); err != nil {
			t.Fatal(err)
		}
		e.awaitGone(t, waiter.ID())
		if err := holder.Release(e.ctx, []dialect.Key{k}); err != nil {
			t.Fatal(err)
		}
		if !e.free(t, k) {
			t.Error("the lock was granted to the waiter that had gone")
		}
	})
}

// 3058 on MySQL, 1213 on MariaDB; a victim keeps what it had, so it must go.
func TestCycleOfAdvisoryLocksIsADeadlock(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		a, b := key("cycle-a/"+db.Features().Scope, 1), key("cycle-b/"+db.Features().Scope, 2)
		one, two := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
		if err := errors.Join(acquire(one, e.ctx, true, a), acquire(two, e.ctx, true, b)); err != nil {
			t.Fatal(err)
		}
		result := make(chan error, 1)
		go func() { result <- acquire(one, e.ctx, false, b) }()
		e.awaitStatement(t, one.ID(), "SELECT GET_LOCK%", 0)
		wantClass(t, acquire(two, e.ctx, false, a), dialect.Deadlock)
		if err := two.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-result; err != nil {
			t.Errorf("the survivor: %v", err)
		}
	})
}

func TestTryOfSeveralKeysIsAllOrNothing(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		scope := db.Features().Scope
		a, b, c := key("all-a/"+scope, 1), key("all-b/"+scope, 2), key("all-c/"+scope, 3)
		holder, tries := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
		if err := errors.Join(acquire(holder, e.ctx, true, b), acquire(tries, e.ctx, true, a)); err != nil {
			t.Fatal(err)
		}
		// a, which the session has already, is counted: it must lose the new count only.
		wantClass(t, acquire(tries, e.ctx, true, a, b, c), dialect.NotAcquired)
		if !e.free(t, c) {
			t.Error("the key behind the held one was taken")
		}
		if held, err := tries.Held(e.ctx, []dialect.Key{a, b, c}); err != nil || !slices.Equal(held, []bool{true, false, false}) {
			t.Errorf("what the session had before, somebody else's, and nobody's: held %v, %v", held, err)
		}
		if err := tries.Release(e.ctx, []dialect.Key{a}); err != nil {
			t.Fatal(err)
		}
		if !e.free(t, a) {
			t.Error("a count was left over")
		}
		wantClass(t, tries.Release(e.ctx, []dialect.Key{a}), dialect.NotHeld) // nobody's: NULL
		wantClass(t, tries.Release(e.ctx, []dialect.Key{b}), dialect.NotHeld) // somebody else's: 0
	})
}

// The application's pool may read only, commit by hand and limit statements; it
// must not matter to a session of dblock's own.
func TestSessionIsIndependentOfThePoolsSettings(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		readOnly, limit, milliseconds := "transaction_read_only", "max_execution_time", "300"
		if e.mariadb() {
			readOnly, limit, milliseconds = "tx_read_only", "max_statement_time", "0.3"
		}
		dsn := with(t, e.dsn, "autocommit", "0", readOnly, "1", limit, milliseconds)
		db := e.wrap(t, dsn, 0)
		k := key("settings/"+db.Features().Scope, 7)
		holder, waiter := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
		if err := acquire(holder, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		result := make(chan error, 1)
		var fences []int64
		go func() {
			var err error
			fences, err = waiter.Acquire(e.ctx, dialect.Request{Keys: []dialect.Key{k}, Fence: &dialect.Table{}})
			result <- err
		}()
		e.awaitStatement(t, waiter.ID(), "SELECT GET_LOCK%", 1) // longer than the limit
		if err := holder.Release(e.ctx, []dialect.Key{k}); err != nil {
			t.Fatal(err)
		}
		if err := <-result; err != nil {
			t.Fatal(err)
		}
		if n := value[int64](t, e.ctx, e.admin, "SELECT fence FROM locks"); len(fences) != 1 || fences[0] <= 0 || n != fences[0] {
			t.Errorf("the fencing number is %v, in the table %d", fences, n)
		}
	})
}

func TestFencingNumbersComeFromTheUpsert(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		scope := db.Features().Scope
		keys := []dialect.Key{key("fence-a/"+scope, -9223372036854775808), key("fence-b/"+scope, 9223372036854775807)}
		last := []int64{0, 0}
		for grant := range 3 {
			s := e.session(t, db, dialect.SessionOptions{})
			fences, err := s.Acquire(e.ctx, dialect.Request{Keys: keys, Fence: &dialect.Table{}})
			if err != nil {
				t.Fatal(err)
			}
			if len(fences) != 2 || fences[0] < last[0]+dialect.FenceStride || fences[1] < last[1]+dialect.FenceStride {
				t.Fatalf("grant %d got %v after %v", grant, fences, last)
			}
			last = fences
			if err := s.Release(e.ctx, keys); err != nil {
				t.Fatal(err)
			}
		}
		s := e.session(t, db, dialect.SessionOptions{})
		_, err := s.Acquire(e.ctx, dialect.Request{Keys: keys, Fence: &dialect.Table{Name: "elsewhere"}})
		wantClass(t, err, dialect.Setup)
	})
}

// The server ends a session that gives no sign of life, and the lock with it.
func TestSilentSessionIsEndedByTheServer(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		k := key("silent/"+db.Features().Scope, 1)
		s := e.session(t, db, dialect.SessionOptions{KeepAlive: 100 * time.Millisecond}) // wait_timeout: 1 s
		if err := acquire(s, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		e.awaitGone(t, s.ID())
		if !e.free(t, k) {
			t.Error("the lock outlived its session")
		}
		wantClass(t, s.Ping(e.ctx), dialect.Lost)
		_, err := s.Held(e.ctx, []dialect.Key{k})
		wantClass(t, err, dialect.Lost)
		wantClass(t, s.Release(e.ctx, []dialect.Key{k}), dialect.Lost)
		wantClass(t, acquire(s, e.ctx, true, k), dialect.Lost)
	})
}

func TestKilledSessionIsLost(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		k := key("killed/"+db.Features().Scope, 1)
		s := e.session(t, db, dialect.SessionOptions{})
		if err := acquire(s, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		e.exec(t, e.admin, fmt.Sprintf("KILL %d", s.ID()))
		e.awaitGone(t, s.ID())
		_, err := s.Held(e.ctx, []dialect.Key{k})
		wantClass(t, err, dialect.Lost)
		wantClass(t, acquire(s, e.ctx, true, k), dialect.Lost) // and no new session takes its place
		if !e.free(t, k) {
			t.Error("the lock outlived its session")
		}
	})
}

func TestBorrowedConnectionKeepsItsSettings(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		k := key("borrowed/"+db.Features().Scope, 1)
		conn, err := db.SQL().Conn(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		before := e.sessionVariables(t, conn)
		s, err := db.OnConn(e.ctx, conn)
		if err != nil {
			t.Fatal(err)
		}
		if err := acquire(s, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		if err := s.Release(e.ctx, []dialect.Key{k}); err != nil {
			t.Fatal(err)
		}
		if after := e.sessionVariables(t, conn); !maps.Equal(before, after) {
			t.Errorf("settings changed from %v to %v", before, after)
		}
		if err := acquire(s, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		e.awaitGone(t, s.ID())
		if !e.free(t, k) {
			t.Error("the lock outlived its session")
		}
	})
}

// sessionVariables are those that statements do not change by themselves.
func (e *env) sessionVariables(t *testing.T, conn *sql.Conn) map[string]string {
	t.Helper()
	rows, err := conn.QueryContext(e.ctx, "SHOW SESSION VARIABLES WHERE Variable_name IN ('autocommit', 'wait_timeout',"+
		" 'innodb_lock_wait_timeout', 'lock_wait_timeout', 'max_execution_time', 'max_statement_time', 'transaction_isolation',"+
		" 'tx_isolation', 'transaction_read_only', 'tx_read_only', 'sql_mode')")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	variables := map[string]string{}
	for rows.Next() {
		var name, value string
		if err := rows.Scan(&name, &value); err != nil {
			t.Fatal(err)
		}
		variables[name] = value
	}
	if len(variables) < 6 || rows.Err() != nil {
		t.Fatalf("%v, %v", variables, rows.Err())
	}
	return variables
}

func TestSilenceOfABorrowedConnectionIsAllowedForAWhile(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.wrap(t, with(t, e.dsn, "wait_timeout", "1"), 0)
		conn, err := db.SQL().Conn(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		s, err := db.OnConn(e.ctx, conn)
		if err != nil {
			t.Fatal(err)
		}
		restore, err := s.AllowSilence(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(2500 * time.Millisecond)
		if err := s.Ping(e.ctx); err != nil {
			t.Errorf("after a pause: %v", err)
		}
		if err := restore(context.Background()); err != nil {
			t.Error(err)
		}
		if limit := value[int](t, e.ctx, conn, "SELECT @@SESSION.wait_timeout"); limit != 1 {
			t.Errorf("wait_timeout %d instead of that before", limit)
		}
	})
}

func TestHoldersGetTheTypesOfTheirDriver(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		s := e.session(t, e.open(t), dialect.SessionOptions{StatementGap: time.Minute})
		if id := value[int64](t, e.ctx, s.Statements().Native().(dialect.Conn), "SELECT CONNECTION_ID()"); id != s.ID() {
			t.Errorf("the statement ran on connection %d instead of %d", id, s.ID())
		}
		tx, err := s.Begin(e.ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil {
			t.Fatal(err)
		}
		if id := value[int64](t, e.ctx, tx.Native().(*sql.Tx), "SELECT CONNECTION_ID()"); id != s.ID() {
			t.Errorf("the transaction runs on connection %d instead of %d", id, s.ID())
		}
		if err := tx.Commit(e.ctx); err != nil {
			t.Error(err)
		}
	})
}

// MariaDB has limits of its own for transactions that pause.
func TestIdleLimitsOfTransactionsAreLifted(t *testing.T) {
	e := newEnv(t, servers.Start(t, servers.KindMariaDB, "idle-transaction-timeout=1", "idle-write-transaction-timeout=1"))
	db := e.open(t)
	s := e.session(t, db, dialect.SessionOptions{StatementGap: time.Minute})
	conn := e.conn(t)
	borrowed, err := db.OnConn(e.ctx, conn)
	if err != nil {
		t.Fatal(err)
	}
	restore, err := borrowed.AllowSilence(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	tx, err := s.Begin(e.ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.exec(t, tx, "UPDATE locks SET fence = 1")
	e.exec(t, conn, "BEGIN")
	e.exec(t, conn, "UPDATE locks SET fence = 2 WHERE id = 0")
	<-time.After(2500 * time.Millisecond)
	e.exec(t, conn, "COMMIT")
	if err := tx.Commit(e.ctx); err != nil {
		t.Error(err)
	}
	if err := restore(context.Background()); err != nil {
		t.Error(err)
	}
	if limit := value[int](t, e.ctx, conn, "SELECT @@SESSION.idle_transaction_timeout"); limit != 1 {
		t.Errorf("idle_transaction_timeout %d instead of that before", limit)
	}
}
