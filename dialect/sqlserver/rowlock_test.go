package sqlserver

import (
	"database/sql/driver"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

var rowKeys = []dialect.Key{{ID: -8, Name: "b#fffffffffffffff8", Label: "b"}, keyA}

// begin is a transaction of an application.
func begin(t *testing.T, d *DB) dialect.OwnedTx {
	t.Helper()
	tx, err := d.Begin(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback(t.Context()) })
	return tx
}

func rows(missing, fences string) answer {
	return answer{outs: map[string]any{"missing": missing, "fences": fences}}
}

func TestLockRows(t *testing.T) {
	stub, d := openDB(t, rows("", "3,4,"), rows("", "3,4,"), rows("", "5,6,"))
	tx := begin(t, d)
	request := dialect.RowRequest{Table: dialect.Table{Schema: "s", Name: "t]x"}, Keys: rowKeys}
	if fences, err := d.LockRows(t.Context(), tx, request); err != nil || fences != nil {
		t.Errorf("got %v, %v", fences, err)
	}
	request.Fence = true
	if fences, err := d.LockRows(t.Context(), tx, request); err != nil || !slices.Equal(fences, []int64{5, 6}) {
		t.Errorf("got %v, %v", fences, err)
	}
	sent := stub.sent("")
	if !strings.Contains(sent[0].query, "SELECT @fence = fence FROM [s].[t]]x] WITH (UPDLOCK, HOLDLOCK, ROWLOCK) WHERE id = @id") {
		t.Errorf("locked with %s", sent[0].query)
	}
	if !strings.Contains(sent[2].query, "UPDATE [s].[t]]x] WITH (UPDLOCK, HOLDLOCK, ROWLOCK) SET @fence = fence = CASE") {
		t.Errorf("drawn with %s", sent[2].query)
	}
	if sent[1].session != sent[0].session || sent[2].session == sent[0].session {
		t.Error("the numbers are those of the transaction, whose rollback would give them again")
	}
	if ids := sent[0].args["ids"].(string); len(ids) != 2*idSlot || !slices.Equal(strings.Fields(ids), []string{"-8", "7"}) {
		t.Errorf("sent ids %q", ids)
	}
}

func TestLockRowsShared(t *testing.T) {
	stub, d := openDB(t, rows("", "0,"))
	if _, err := d.LockRows(t.Context(), begin(t, d), dialect.RowRequest{Keys: []dialect.Key{keyB}}); err != nil {
		t.Fatal(err)
	}
	sent := stub.sent("FROM [locks] WITH (HOLDLOCK, ROWLOCK) WHERE id = @id")
	if len(sent) != 1 || sent[0].args["modes"] != "S" {
		t.Errorf("sent %v", sent)
	}
}

// A limit is that of the whole call, while LOCK_TIMEOUT begins anew with each key.
func TestLockRowsWithin(t *testing.T) {
	stub, d := openDB(t, rows("", "0,"), rows("", "0,"))
	if _, err := d.LockRows(t.Context(), begin(t, d), dialect.RowRequest{Keys: rowKeys, Wait: time.Minute}); err != nil {
		t.Fatal(err)
	}
	sent := stub.sent("SET LOCK_TIMEOUT ")
	if len(sent) != 2 || sent[0].args["count"] != int32(1) {
		t.Fatalf("sent %v", sent)
	}
	for limit, text := range map[time.Duration]string{-time.Second: " 1;", 1: " 1;", 1500 * time.Microsecond: " 2;", math.MaxInt64: " 2147483647;"} {
		if got := lockTimeout(limit); !strings.Contains(got, text) {
			t.Errorf("%v: %q", limit, got)
		}
	}
}

func TestGuard(t *testing.T) {
	highest := func(n int64) answer { return answer{outs: map[string]any{"highest": n}} }
	r := dialect.GuardRequest{Key: keyA, Token: 100}
	for n, class := range map[int64]dialect.Class{100: "", 101: dialect.NotHeld} {
		stub, d := openDB(t, rows("", "0,"), highest(n))
		err := d.Guard(t.Context(), begin(t, d), r)
		if dialect.ClassOf(err) != class {
			t.Errorf("%d: %v", n, err)
		}
		if sent := stub.sent("SELECT @drawn = fence FROM [locks] WITH (READCOMMITTED)"); len(sent) != 1 || sent[0].args["guard"] != dialect.GuardRows(keyA)[0].ID {
			t.Errorf("sent %v", sent)
		}
	}
}

func TestCleanRows(t *testing.T) {
	stub, d := openDB(t, answer{outs: map[string]any{"seen": 5, "last": 77, "deleted": 3}})
	cleaned, err := d.CleanRows(t.Context(), dialect.CleanRequest{From: -9, Rows: 5, Age: time.Second})
	if want := (dialect.Cleaned{Deleted: 3, Last: 77, More: true}); err != nil || cleaned != want {
		t.Errorf("%+v, %v", cleaned, err)
	}
	if sent := stub.sent("DELETE FROM [locks] WITH (XLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK)"); len(sent) != 1 || sent[0].args["age"] != int64(1e6) {
		t.Errorf("sent %v", sent)
	}
}

// Missing rows are created outside the transaction; 2627 (primary key) and 2601
// (unique index) say that somebody else was faster.
func TestLockRowsCreatesMissing(t *testing.T) {
	for _, number := range []int32{2627, 2601} {
		stub, d := openDB(t, rows("0,1,", ""), answer{err: serverError(number)}, answer{}, rows("", "0,0,"))
		tx := begin(t, d)
		if _, err := d.LockRows(t.Context(), tx, dialect.RowRequest{Keys: rowKeys}); err != nil {
			t.Fatal(err)
		}
		sent := stub.sent("")
		if len(sent) != 4 || sent[1].session == sent[0].session || sent[2].session == sent[0].session || sent[3].session != sent[0].session {
			t.Fatalf("sent %v", sent)
		}
		if sent[0].args["ensured"] != int32(0) || sent[3].args["ensured"] != int32(1) {
			t.Errorf("sent %v", sent)
		}
	}
	_, d := openDB(t, rows("0,", ""), answer{err: serverError(229)})
	_, err := d.LockRows(t.Context(), begin(t, d), dialect.RowRequest{Keys: rowKeys})
	wantError(t, err, dialect.Denied, "229")
}

// Without another connection the transaction creates the rows itself instead of
// waiting for ever for itself.
func TestLockRowsWithoutSpareConnection(t *testing.T) {
	stub, d := openDB(t, rows("0,1,", ""), rows("", "0,0,"))
	d.db.SetMaxOpenConns(1)
	if _, err := d.LockRows(t.Context(), begin(t, d), dialect.RowRequest{Keys: rowKeys}); err != nil {
		t.Fatal(err)
	}
	if sent := stub.sent(""); len(sent) != 2 || sent[1].args["ensured"] != int32(1) {
		t.Errorf("sent %v", sent)
	}
	if n := d.db.Stats().WaitCount; n != 0 {
		t.Errorf("waited %d times for a connection that nobody else can free", n)
	}
}

// A try does not wait for another creator either: the locking statement decides.
func TestTryRowsMeetsCreator(t *testing.T) {
	stub, d := openDB(t, rows("0,", ""), answer{err: serverError(1222)}, rows("", "0,0,"))
	if _, err := d.LockRows(t.Context(), begin(t, d), dialect.RowRequest{Keys: rowKeys, Try: true}); err != nil {
		t.Fatal(err)
	}
	if len(stub.sent("INSERT INTO [locks] WITH (ROWLOCK, NOWAIT)")) != 1 {
		t.Errorf("sent %v", stub.sent("INSERT"))
	}
}

// Error 1222 ends the statement alone, unless XACT_ABORT is on: the server is
// asked. Errors 1205 and 3960 end the transaction.
func TestLockRowsErrors(t *testing.T) {
	state := func(n int) answer { return answer{outs: map[string]any{"state": n}} }
	for _, c := range []struct {
		name    string
		try     bool
		number  int32
		then    []answer
		class   dialect.Class
		code    string
		remains dialect.Remains
	}{
		{"try", true, 1222, []answer{state(1)}, dialect.NotAcquired, "1222", dialect.RemainsUsable},
		{"wait", false, 1222, []answer{state(1)}, dialect.Timeout, "1222", dialect.RemainsUsable},
		{"doomed", true, 1222, []answer{state(-1)}, dialect.NotAcquired, "1222", dialect.RemainsAborted},
		{"XACT_ABORT", true, 1222, []answer{state(0)}, dialect.NotAcquired, "1222", dialect.RemainsNothing},
		{"no answer", true, 1222, []answer{{err: serverError(0)}}, dialect.NotAcquired, "1222", dialect.RemainsUnknown},
		{"deadlock", false, 1205, nil, dialect.Deadlock, "1205", dialect.RemainsNothing},
		{"update conflict", false, 3960, nil, dialect.Serialization, "3960", dialect.RemainsNothing},
		{"no table", false, 208, nil, dialect.Setup, "208", dialect.RemainsUnknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			stub, d := openDB(t, append([]answer{{err: serverError(c.number)}}, c.then...)...)
			_, err := d.LockRows(t.Context(), begin(t, d), dialect.RowRequest{Keys: rowKeys, Try: c.try})
			wantError(t, err, c.class, c.code, c.remains)
			if nowait := len(stub.sent("HOLDLOCK, ROWLOCK, NOWAIT")) > 0; nowait != c.try {
				t.Errorf("NOWAIT is %t", nowait)
			}
		})
	}
	if !strings.Contains(rowsText, "{lock};\n\tSELECT @error = @@ERROR, @found = @@ROWCOUNT;\n\tIF @error <> 0 RETURN;") {
		t.Error("the batch goes on after a statement that failed")
	}
}

func TestUnreadableAnswers(t *testing.T) {
	for _, a := range []answer{rows("", "1,"), rows("", "1,x,"), rows("9,", ""), rows("x,", "")} {
		_, d := openDB(t, a)
		if _, err := d.LockRows(t.Context(), begin(t, d), dialect.RowRequest{Keys: rowKeys, Fence: true}); err == nil {
			t.Errorf("%v passed", a.outs)
		}
	}
}

func TestTableShape(t *testing.T) {
	lockTable := func() map[string]column {
		return map[string]column{
			"id":    {kind: "bigint", length: 8, primary: true},
			"name":  {kind: "varchar", length: 64},
			"fence": {kind: "bigint", length: 8, optional: true},
		}
	}
	if got := compare("U", lockTable()); got != "" {
		t.Errorf("refused the lock table: %s", got)
	}
	for _, c := range []struct {
		want   string
		object string
		change func(map[string]column)
	}{
		{"not a table", "V", func(map[string]column) {}},
		{"no column fence", "U", func(m map[string]column) { delete(m, "fence") }},
		{"column id is not bigint", "U", func(m map[string]column) { m["id"] = column{kind: "int", length: 4, primary: true} }},
		{"column name is not varchar", "U", func(m map[string]column) { m["name"] = column{kind: "varchar", length: 20} }},
		{"column fence is not bigint NOT NULL", "U", func(m map[string]column) { m["fence"] = column{kind: "bigint", length: 8, nullable: true} }},
		{"primary key", "U", func(m map[string]column) { m["id"] = column{kind: "bigint", length: 8} }},
		{"column owner has no default", "U", func(m map[string]column) { m["owner"] = column{kind: "int", length: 4} }},
	} {
		columns := lockTable()
		c.change(columns)
		if got := compare(c.object, columns); !strings.Contains(got, c.want) {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

func TestCheckTable(t *testing.T) {
	columns := []string{"type", "name", "kind", "length", "nullable", "optional", "primary"}
	_, d := openDB(t,
		answer{columns: columns},
		answer{columns: columns, rows: [][]driver.Value{
			{"U", "id", "bigint", int64(8), int64(0), int64(0), int64(1)},
			{"U", "name", "varchar", int64(64), int64(0), int64(0), int64(0)},
			{"U", "fence", "bigint", int64(8), int64(0), int64(1), int64(0)}}},
		answer{columns: columns, rows: [][]driver.Value{{"U", "id", "int", int64(4), int64(0), int64(0), int64(1)}}})
	exists, err := d.CheckTable(t.Context(), dialect.Table{})
	wantError(t, err, dialect.Setup, "")
	if exists {
		t.Error("a missing table exists")
	}
	if exists, err := d.CheckTable(t.Context(), dialect.Table{}); !exists || err != nil {
		t.Errorf("got %t, %v", exists, err)
	}
	exists, err = d.CheckTable(t.Context(), dialect.Table{})
	wantError(t, err, dialect.Setup, "")
	if !exists {
		t.Error("a table of another shape is missing")
	}
}

func TestMigrations(t *testing.T) {
	m := (*DB)(nil).Migrations(dialect.Table{Schema: "s", Name: "l"})
	if len(m) != 1 || m[0].Version != 1 || !strings.HasPrefix(m[0].Up[0], "CREATE TABLE [s].[l] (") || m[0].Down[0] != "DROP TABLE [s].[l];" {
		t.Errorf("got %v", m)
	}
}
