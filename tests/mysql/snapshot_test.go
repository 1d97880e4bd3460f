package mysql_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
)

func (e *env) snapshot(t *testing.T, db *mysql.DB) *dialect.Snapshot {
	t.Helper()
	s, err := db.Snapshot(e.ctx, dialect.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func waitFor(s *dialect.Snapshot, name string) bool {
	return slices.ContainsFunc(s.Waits, func(w dialect.SnapshotWait) bool { return w.Kind == dialect.KindAdvisory && w.Key == name })
}

// What the server does not record is a gap; who waits for a key is found in the
// process list then, and its holder by IS_USED_LOCK.
func TestSnapshotNamesWhatTheServerLacks(t *testing.T) {
	eachPrivate(t, func(t *testing.T, e *env) {
		lacks, remedy := "UPDATE performance_schema.setup_instruments SET enabled = 'NO' WHERE name = 'wait/lock/metadata/sql/mdl'", "setup_instruments"
		if e.mariadb() {
			lacks, remedy = "UNINSTALL SONAME 'metadata_lock_info'", "INSTALL SONAME 'metadata_lock_info'"
		}
		e.exec(t, e.admin, lacks)
		db := e.open(t)
		holder, waiter, k := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{}), key("lacking", 1)
		if err := acquire(holder, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		granted := make(chan error, 1)
		go func() { granted <- acquire(waiter, e.ctx, false, k) }()
		e.awaitStatement(t, waiter.ID(), "SELECT GET_LOCK%", 0)
		var s *dialect.Snapshot
		for s = e.snapshot(t, db); !waitFor(s, k.Name); s = e.snapshot(t, db) {
			select {
			case <-e.ctx.Done():
				t.Fatalf("no wait: %+v", s)
			case <-time.After(20 * time.Millisecond):
			}
		}
		if w := s.Waits[0]; w.Waiter != waiter.ID() || w.Blocker != holder.ID() {
			t.Errorf("%+v", w)
		}
		if len(s.Gaps) != 1 || s.Gaps[0].Kind != dialect.KindAdvisory || !strings.Contains(s.Gaps[0].Remedy, remedy) {
			t.Errorf("gaps %+v", s.Gaps)
		}
		if err := holder.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-granted; err != nil {
			t.Error(err)
		}
		e.seesForeign(t, db)
	})
}

// seesForeign: what another session has in quotes is a name and no SQL of ours.
func (e *env) seesForeign(t *testing.T, db *mysql.DB) {
	const name = "é') OR SLEEP(9) -- "
	const lock = `DO GET_LOCK("` + name + `", 30)`
	holder, waiter := e.conn(t), e.conn(t)
	e.exec(t, holder, lock)
	granted := make(chan error, 1)
	go func() {
		_, err := waiter.ExecContext(e.ctx, lock)
		granted <- err
	}()
	want := value[int64](t, e.ctx, holder, "SELECT CONNECTION_ID()")
	for {
		s := e.snapshot(t, db)
		if i := slices.IndexFunc(s.Waits, func(w dialect.SnapshotWait) bool { return w.Key == name }); i >= 0 {
			if s.Waits[i].Blocker != want {
				t.Errorf("waits for %d, want %d", s.Waits[i].Blocker, want)
			}
			break
		}
		select {
		case <-e.ctx.Done():
			t.Fatalf("no wait for %s: %+v", name, s)
		case <-time.After(20 * time.Millisecond):
		}
	}
	e.exec(t, holder, `DO RELEASE_ALL_LOCKS()`)
	if err := <-granted; err != nil {
		t.Error(err)
	}
}

// Each view is read once, however many locks and waiters there are.
func TestSnapshotReadsEachViewOnce(t *testing.T) {
	eachPrivate(t, func(t *testing.T, e *env) {
		const keys, waiters = 100, 10
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE counted (id INT PRIMARY KEY, n INT)")
		e.exec(t, e.admin, "INSERT INTO counted VALUES (1, 0), (2, 0), (3, 0)")
		holder := e.conn(t)
		var columns []string
		for i := range keys {
			columns = append(columns, fmt.Sprintf("GET_LOCK('counted_%d', 0)", i))
		}
		e.exec(t, holder, "DO "+strings.Join(columns, ", "))
		e.exec(t, holder, "BEGIN")
		e.exec(t, holder, "UPDATE counted SET n = 1")
		ctx, cancel := context.WithCancel(e.ctx)
		var all sync.WaitGroup
		for i := range waiters {
			for _, statement := range []string{"DO GET_LOCK('counted_%d', 60)", "UPDATE counted SET n = 2 WHERE id = 1 + %d"} {
				c, statement := e.conn(t), fmt.Sprintf(statement, i%3)
				all.Go(func() { _, _ = c.ExecContext(ctx, statement) }) // ends with ctx
			}
		}
		defer all.Wait()
		defer cancel()
		questions := func() (n int) {
			var name string
			if err := e.admin.QueryRowContext(e.ctx, "SHOW GLOBAL STATUS LIKE 'Questions'").Scan(&name, &n); err != nil {
				t.Fatal(err)
			}
			return n
		}
		for {
			before := questions()
			s := e.snapshot(t, db)
			statements := questions() - before - 1 // it counts itself
			waiting := map[int64]bool{}
			for _, w := range s.Waits {
				waiting[w.Waiter] = true
			}
			if len(waiting) == 2*waiters {
				// MySQL: a setting, metadata_locks, data_lock_waits with data_locks, threads.
				// MariaDB: metadata_lock_info, the process list, the names of programs,
				// innodb_trx, innodb_locks, innodb_lock_waits.
				want := 4
				if e.mariadb() {
					want = 6
				}
				if statements != want {
					t.Errorf("%d statements, want %d", statements, want)
				}
				return
			}
			if e.ctx.Err() != nil {
				t.Fatalf("%d wait", len(waiting))
			}
		}
	})
}

// innodb_trx has the server's time zone, whatever the session's is.
func TestSnapshotTellsTheAgeOfTransactionsInEveryTimeZone(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.wrap(t, with(t, e.dsn, "time_zone", "'-11:00'"), 0)
		e.exec(t, e.admin, "CREATE TABLE aged (id INT PRIMARY KEY)")
		e.exec(t, e.admin, "INSERT INTO aged VALUES (1)")
		tx := e.begin(t, db, nil)
		e.exec(t, tx, "UPDATE aged SET id = 2")
		e.exec(t, tx, "DO GET_LOCK('aged', 0)") // so that it is in the snapshot
		id := value[int64](t, e.ctx, tx.Native().(*sql.Tx), "SELECT CONNECTION_ID()")
		deadline := time.Now().Add(30 * time.Second)
		for {
			s := e.snapshot(t, db)
			i := slices.IndexFunc(s.Sessions, func(x dialect.SnapshotSession) bool { return x.ID == id })
			if i >= 0 && !s.Sessions[i].Began.IsZero() {
				if age := s.Taken.Sub(s.Sessions[i].Began); age < 0 || age > time.Minute {
					t.Errorf("the transaction is %v old", age)
				}
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("the transaction is not seen: %+v", s)
			}
			time.Sleep(300 * time.Millisecond) // the view is renewed when nobody has looked for 100 ms
		}
	})
}

func TestSnapshotLeavesProbesOut(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		s, probe := e.session(t, db, dialect.SessionOptions{}), key("dblock/probe#"+db.Features().Scope, 1)
		if err := acquire(s, e.ctx, true, probe); err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(e.snapshot(t, db).Locks, func(l dialect.SnapshotLock) bool { return l.Key == probe.Name }) {
			t.Error("the probe's lock is listed")
		}
	})
}
