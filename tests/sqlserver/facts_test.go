// Package sqlserver_test shows on a real server the facts that dialect/sqlserver
// is built on and that its unit tests take for granted.
package sqlserver_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	mssql "github.com/microsoft/go-mssqldb"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/sqlserver"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m) }

var (
	keyA = dialect.Key{ID: 1, Name: "a#0000000000000001", Label: "a"}
	keyB = dialect.Key{ID: 2, Name: "b#0000000000000002", Label: "b"}
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantClass(t testing.TB, err error, class dialect.Class) *dialect.Error {
	t.Helper()
	var e *dialect.Error
	if dialect.ClassOf(err) != class || !errors.As(err, &e) {
		t.Fatalf("error %v, want class %q", err, class)
	}
	return e
}

func openDB(t *testing.T) *sqlserver.DB {
	t.Helper()
	db, err := sqlserver.Open(t.Context(), servers.SQLServer(t).Database(t))
	must(t, err)
	t.Cleanup(func() { must(t, db.Close()) })
	return db
}

func withTable(t *testing.T) *sqlserver.DB {
	t.Helper()
	db := openDB(t)
	for _, statement := range db.Migrations(dialect.Table{})[0].Up {
		_, err := db.SQL().ExecContext(t.Context(), statement)
		must(t, err)
	}
	return db
}

func session(t *testing.T, db *sqlserver.DB) dialect.Session {
	t.Helper()
	s, err := db.OpenSession(t.Context(), dialect.SessionOptions{Application: "facts"})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

func begin(t *testing.T, db *sqlserver.DB) dialect.OwnedTx {
	t.Helper()
	tx, err := db.Begin(t.Context(), nil)
	must(t, err)
	t.Cleanup(func() { must(t, tx.Rollback(context.Background())) })
	return tx
}

func try(keys ...dialect.Key) dialect.Request { return dialect.Request{Keys: keys, Try: true} }

// getApplock calls the procedure alone, as a program without dblock would.
func getApplock(t *testing.T, on dialect.Tx, args ...any) (mssql.ReturnStatus, error) {
	t.Helper()
	var status mssql.ReturnStatus
	_, err := on.ExecContext(t.Context(), "sp_getapplock", append(args, &status)...)
	return status, err
}

func number(err error) int32 {
	var e mssql.Error
	errors.As(err, &e)
	return e.Number
}

// eventually asks until the answer is yes: the server tells of a waiter in no
// other way.
func eventually(t testing.TB, what string, ask func() bool) {
	t.Helper()
	deadline := time.NewTimer(20 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ask() {
		select {
		case <-deadline.C:
			t.Fatalf("never happened: %s", what)
		case <-tick.C:
		}
	}
}

func waiters(t testing.TB, db *sqlserver.DB, key dialect.Key) (n int) {
	t.Helper()
	holdings, err := db.Inspect(context.Background(), key)
	must(t, err)
	for _, h := range holdings {
		if h.Waiting {
			n++
		}
	}
	return n
}

func TestReturnCodesAreNoErrors(t *testing.T) {
	db := openDB(t)
	must(t, func() error { _, err := session(t, db).Acquire(t.Context(), try(keyA)); return err }())
	name, exclusive := sql.Named("Resource", keyA.Name), sql.Named("LockMode", "Exclusive")
	ofSession, public := sql.Named("LockOwner", "Session"), sql.Named("DbPrincipal", "public")
	for _, c := range []struct {
		what   string
		args   []any
		status mssql.ReturnStatus
		number int32
	}{
		{"busy", []any{name, exclusive, ofSession, public, sql.Named("LockTimeout", 0)}, -1, 0},
		{"no transaction", []any{name, exclusive, public, sql.Named("LockTimeout", 0)}, -999, 0},
		{"unknown mode", []any{name, sql.Named("LockMode", "Strong"), ofSession}, -999, 0},
		{"timeout below -1", []any{name, exclusive, ofSession, sql.Named("LockTimeout", -2)}, -999, 1227},
		{"no resource", []any{sql.Named("Resource", nil), exclusive, ofSession}, -999, 1224},
		{"unknown principal", []any{name, exclusive, ofSession, sql.Named("DbPrincipal", "nobody")}, -999, 1202},
	} {
		status, err := getApplock(t, db.SQL(), c.args...)
		if status != c.status || number(err) != c.number {
			t.Errorf("%s: code %d, error %v; want %d and %d", c.what, status, err, c.status, c.number)
		}
	}
	wantClass(t, db.AcquireTx(t.Context(), db.SQL(), dialect.TxRequest{Keys: []dialect.Key{keyA}}), dialect.Unsupported)
}

func TestReleaseOfWhatIsNotHeld(t *testing.T) {
	db := openDB(t)
	s := session(t, db)
	_, err := s.Acquire(t.Context(), try(keyB))
	must(t, err)
	if e := wantClass(t, s.Release(t.Context(), []dialect.Key{keyA, keyB}), dialect.NotHeld); e.Code != "1223" {
		t.Errorf("code %s", e.Code)
	}
	// The others of the call are released all the same.
	_, err = session(t, db).Acquire(t.Context(), try(keyB))
	must(t, err)
}

func TestFailedTryHoldsNothing(t *testing.T) {
	db := openDB(t)
	holder, loser := session(t, db), session(t, db)
	_, err := holder.Acquire(t.Context(), try(keyB))
	must(t, err)
	_, err = loser.Acquire(t.Context(), try(keyA, keyB))
	wantClass(t, err, dialect.NotAcquired)
	_, err = holder.Acquire(t.Context(), try(keyA))
	must(t, err)
	must(t, loser.Ping(t.Context()))
}

func TestHoldersShareUntilOneIsExclusive(t *testing.T) {
	db := openDB(t)
	shared := keyA
	shared.Mode = dialect.Shared
	one, two := session(t, db), session(t, db)
	for _, s := range []dialect.Session{one, two} {
		_, err := s.Acquire(t.Context(), try(shared))
		must(t, err)
		held, err := s.Held(t.Context(), []dialect.Key{shared})
		must(t, err)
		exclusively, err := s.Held(t.Context(), []dialect.Key{keyA})
		must(t, err)
		if !held[0] || exclusively[0] {
			t.Errorf("held %t, exclusively %t", held, exclusively)
		}
	}
	_, err := one.Acquire(t.Context(), try(keyA))
	wantClass(t, err, dialect.NotAcquired)
}

func TestDeadlockKeepsTransaction(t *testing.T) {
	db := openDB(t)
	one, two := begin(t, db), begin(t, db)
	must(t, db.AcquireTx(t.Context(), one, dialect.TxRequest{Keys: []dialect.Key{keyA}}))
	must(t, db.AcquireTx(t.Context(), two, dialect.TxRequest{Keys: []dialect.Key{keyB}}))
	var errs [2]error
	var both sync.WaitGroup
	cross := func(i int, tx dialect.OwnedTx, key dialect.Key) {
		both.Go(func() {
			errs[i] = db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: []dialect.Key{key}, Wait: time.Minute})
			if dialect.ClassOf(errs[i]) == dialect.Deadlock {
				if _, err := tx.ExecContext(t.Context(), "CREATE TABLE went_on (id int)"); err != nil {
					t.Errorf("the victim's transaction: %v", err)
				}
				if err := tx.Commit(t.Context()); err != nil {
					t.Errorf("the victim's transaction: %v", err)
				}
			}
		})
	}
	cross(0, one, keyB)
	cross(1, two, keyA)
	both.Wait()
	victim, survivor := errs[0], errs[1]
	if victim == nil {
		victim, survivor = survivor, victim
	}
	if e := wantClass(t, victim, dialect.Deadlock); e.Remains != dialect.RemainsUsable {
		t.Errorf("the transaction is left %d", e.Remains)
	}
	must(t, survivor)
}

func TestWaitEndsWithContext(t *testing.T) {
	db := openDB(t)
	_, err := session(t, db).Acquire(t.Context(), try(keyA))
	must(t, err)
	waiter := session(t, db)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() {
		_, err := waiter.Acquire(ctx, dialect.Request{Keys: []dialect.Key{keyA}})
		result <- err
	}()
	eventually(t, "a waiter", func() bool { return waiters(t, db, keyA) == 1 })
	cancel()
	wantClass(t, <-result, dialect.Canceled)
	eventually(t, "no waiter", func() bool { return waiters(t, db, keyA) == 0 })
}

func TestInspectShowsHolder(t *testing.T) {
	db := openDB(t)
	s := session(t, db)
	long := dialect.Key{Name: "account/" + strings.Repeat("4", 39) + "#0123456789abcdef"}
	_, err := s.Acquire(t.Context(), try(keyA, long))
	must(t, err)
	for _, key := range []dialect.Key{keyA, long} {
		holdings, err := db.Inspect(t.Context(), key)
		must(t, err)
		if len(holdings) != 1 || holdings[0].Name != key.Name || holdings[0].Session != s.ID() || holdings[0].Application != "facts" {
			t.Errorf("%s: %+v", key.Name, holdings)
		}
	}
}

// SET NOCOUNT in a batch with parameters ends with it, so a connection that is
// only borrowed keeps its settings.
func TestBorrowedConnectionKeepsSettings(t *testing.T) {
	db := openDB(t)
	conn, err := db.SQL().Conn(t.Context())
	must(t, err)
	defer conn.Close()
	before, after := 0, 0
	must(t, conn.QueryRowContext(t.Context(), "SELECT @@OPTIONS").Scan(&before))
	s, err := db.OnConn(t.Context(), conn)
	must(t, err)
	_, err = s.Acquire(t.Context(), try(keyA))
	must(t, err)
	must(t, s.Release(t.Context(), []dialect.Key{keyA}))
	must(t, conn.QueryRowContext(t.Context(), "SELECT @@OPTIONS").Scan(&after))
	if before != after {
		t.Errorf("@@OPTIONS %d became %d", before, after)
	}
}

func TestFencingNumbersGrow(t *testing.T) {
	db := withTable(t)
	last := int64(0)
	for range 3 {
		s := session(t, db)
		fences, err := s.Acquire(t.Context(), dialect.Request{Keys: []dialect.Key{keyA}, Fence: &dialect.Table{}})
		must(t, err)
		if len(fences) != 1 || fences[0] <= last {
			t.Errorf("%v after %d", fences, last)
		}
		last = fences[0]
		must(t, s.Release(t.Context(), []dialect.Key{keyA}))
	}
}

// NOWAIT is error 1222, which ends the statement only, unless XACT_ABORT is on.
func TestBusyRow(t *testing.T) {
	db := withTable(t)
	rows := dialect.RowRequest{Keys: []dialect.Key{keyA}, Try: true, Fence: true}
	_, err := db.LockRows(t.Context(), begin(t, db), rows)
	must(t, err)
	for setting, want := range map[string]dialect.Remains{"OFF": dialect.RemainsUsable, "ON": dialect.RemainsNothing} {
		conn, err := db.SQL().Conn(t.Context())
		must(t, err)
		_, err = conn.ExecContext(t.Context(), "SET XACT_ABORT "+setting+"; BEGIN TRANSACTION")
		must(t, err)
		_, err = db.LockRows(t.Context(), conn, rows)
		if e := wantClass(t, err, dialect.NotAcquired); e.Code != "1222" || e.Remains != want {
			t.Errorf("XACT_ABORT %s: code %s leaves %d", setting, e.Code, e.Remains)
		}
		_, err = conn.ExecContext(t.Context(), "IF @@TRANCOUNT > 0 ROLLBACK")
		must(t, err)
		must(t, conn.Close())
	}
}

// Locking hints lock and read the newest version under SNAPSHOT, too.
func TestRowsUnderSnapshot(t *testing.T) {
	db := withTable(t)
	_, err := db.SQL().ExecContext(t.Context(), "ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION ON")
	must(t, err)
	rows := dialect.RowRequest{Keys: []dialect.Key{keyA}, Fence: true, Try: true}
	tx, err := db.Begin(t.Context(), &sql.TxOptions{Isolation: sql.LevelSnapshot})
	must(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.ExecContext(t.Context(), "SELECT COUNT(*) FROM locks") // the snapshot begins
	must(t, err)
	if _, err = db.LockRows(t.Context(), tx, rows); err != nil {
		wantClass(t, err, dialect.Serialization)
		return
	}
	_, err = db.LockRows(t.Context(), begin(t, db), rows)
	wantClass(t, err, dialect.NotAcquired)
}

func TestLockTable(t *testing.T) {
	db := openDB(t)
	exists, err := db.CheckTable(t.Context(), dialect.Table{})
	wantClass(t, err, dialect.Setup)
	if exists {
		t.Error("exists before its migration")
	}
	for _, statement := range db.Migrations(dialect.Table{})[0].Up {
		_, err := db.SQL().ExecContext(t.Context(), statement)
		must(t, err)
	}
	exists, err = db.CheckTable(t.Context(), dialect.Table{})
	if !exists || err != nil {
		t.Errorf("%t, %v after its migration", exists, err)
	}
	_, err = db.SQL().ExecContext(t.Context(), "DROP TABLE locks; CREATE TABLE locks (id int PRIMARY KEY)")
	must(t, err)
	exists, err = db.CheckTable(t.Context(), dialect.Table{})
	wantClass(t, err, dialect.Setup)
	if !exists {
		t.Error("a table of another shape does not exist")
	}
	s := session(t, db)
	_, err = s.Acquire(t.Context(), dialect.Request{Keys: []dialect.Key{keyA}, Fence: &dialect.Table{Name: "missing"}})
	wantClass(t, err, dialect.Setup)
}
