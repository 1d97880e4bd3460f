package sqlserver

import (
	"database/sql/driver"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

func TestSnapshot(t *testing.T) {
	since := time.Date(2026, 11, 2, 3, 4, 5, 0, time.UTC)
	locks := answer{columns: make([]string, 8), rows: [][]driver.Value{
		{"APPLICATION", "0:[" + keyA.Name + "]:(1)", "", "X", "GRANT", int64(51), "0x01", since},
		{"APPLICATION", "0:[" + keyA.Name + "]:(1)", "", "S", "WAIT", int64(52), "0x02", since},
		{"KEY", "(8194443284a0)", "dbo.accounts", "U", "WAIT", int64(53), "0x03", since},
		{"OBJECT", "", "dbo.accounts", "Sch-M", "CONVERT", int64(54), "0x04", since},
		{"PAGE", "1:104", "dbo.accounts", "IX", "WAIT", int64(55), "0x05", since},
		{"XACT", "17", "", "S", "WAIT", int64(56), "0x06", since},
	}}
	tasks := answer{columns: make([]string, 4), rows: [][]driver.Value{
		{int64(52), int64(51), "0x02", int64(1500)},
		{int64(53), int64(51), "0x03", int64(10)},
		{int64(54), int64(53), "0x04", int64(10)},
		{int64(54), int64(53), "0x04", int64(10)}, // a parallel plan has several
		{int64(55), int64(-2), "0x05", int64(10)}, // an orphaned distributed transaction
		{int64(60), int64(61), "0x99", int64(10)}, // another database's
	}}
	sessions := answer{columns: make([]string, 8), rows: [][]driver.Value{
		{int64(51), "app", append([]byte("dblock:billing"), 0, 0), "web1", "sa", "idle in transaction", since, "UPDATE t SET a = 'secret'"},
		{int64(53), "app", nil, "web2", "sa", "active", nil, nil},
	}}
	stub, d := openDB(t, locks, tasks, sessions)
	before := time.Now()
	s, err := d.Snapshot(t.Context(), dialect.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	application := dialect.Target{Kind: dialect.KindAdvisory, Key: keyA.Name}
	row := dialect.Target{Kind: dialect.KindRow, Table: "dbo.accounts", Row: "(8194443284a0)"}
	table := dialect.Target{Kind: dialect.KindTable, Table: "dbo.accounts"}
	page := dialect.Target{Kind: dialect.KindRow, Table: "dbo.accounts", Row: "page 1:104"}
	if want := []dialect.SnapshotWait{{Waiter: 52, Blocker: 51, Target: application}, {Waiter: 53, Blocker: 51, Target: row},
		{Waiter: 54, Blocker: 53, Target: table}, {Waiter: 54, Blocker: 53, Target: table}, {Waiter: 55, Blocker: -2, Target: page}}; !reflect.DeepEqual(s.Waits, want) {
		t.Errorf("waits %+v", s.Waits)
	}
	if l := s.Locks[0]; l.Target != application || l.Session != 51 || l.Waiting || l.Mode != "exclusive" || !l.Since.Equal(since) {
		t.Errorf("the holder: %+v", l)
	}
	if l := s.Locks[1]; l.Target != application || l.Session != 52 || !l.Waiting || l.Mode != "shared" || before.Sub(l.Since) < time.Second || before.Sub(l.Since) > 2*time.Second {
		t.Errorf("the waiter: %+v", l)
	}
	if l := s.Locks[5]; l.Kind != dialect.KindOther || l.Key != "xact 17" {
		t.Errorf("something else: %+v", l)
	}
	if l := s.Locks[6]; l.Target != row || l.Session != 51 || l.Waiting {
		t.Errorf("the holder of the row: %+v", l)
	}
	found := map[int64]dialect.SnapshotSession{}
	for _, x := range s.Sessions {
		found[x.ID] = x
	}
	if want := (dialect.SnapshotSession{ID: 51, Application: "billing", Host: "web1", User: "sa", State: "idle in transaction", Began: since,
		Statement: "UPDATE t SET a = ?"}); found[51] != want || len(found) != 7 {
		t.Errorf("sessions %+v", found)
	}
	query := stub.sent("dm_exec_sql_text")[0].query
	for _, part := range []string{"IN (", "51", "-2", "LEFT(q.text, 4000)"} {
		if !strings.Contains(query, part) {
			t.Errorf("%s lacks %s", query, part)
		}
	}
}

func TestSnapshotShowsWholeStatements(t *testing.T) {
	const statement = "UPDATE t SET a = 'secret'"
	_, d := openDB(t,
		answer{columns: make([]string, 8), rows: [][]driver.Value{{"APPLICATION", "0:[a]:(1)", "", "X", "GRANT", int64(51), "0x01", nil}}},
		answer{columns: make([]string, 4)},
		answer{columns: make([]string, 8), rows: [][]driver.Value{{int64(51), nil, nil, nil, nil, "active", nil, statement}}})
	s, err := d.Snapshot(t.Context(), dialect.SnapshotRequest{FullStatements: true})
	if err != nil || len(s.Sessions) != 1 || s.Sessions[0].Statement != statement {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestSnapshotOfNothingAsksForNoSessions(t *testing.T) {
	_, d := openDB(t, answer{columns: make([]string, 8)}, answer{columns: make([]string, 4)})
	if s, err := d.Snapshot(t.Context(), dialect.SnapshotRequest{}); err != nil || len(s.Sessions)+len(s.Locks)+len(s.Waits)+len(s.Gaps) != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestSnapshotDenied(t *testing.T) {
	_, d := openDB(t, answer{err: serverError(300)})
	s, err := d.Snapshot(t.Context(), dialect.SnapshotRequest{})
	if err != nil || len(s.Gaps) != 1 || !strings.Contains(s.Gaps[0].Remedy, "GRANT VIEW SERVER STATE") || s.Gaps[0].Kind != dialect.KindAdvisory {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestSnapshotFails(t *testing.T) {
	_, d := openDB(t, answer{columns: make([]string, 8)}, answer{err: driver.ErrBadConn}, answer{err: driver.ErrBadConn}, answer{err: driver.ErrBadConn})
	_, err := d.Snapshot(t.Context(), dialect.SnapshotRequest{})
	wantError(t, err, dialect.Lost, "")
}
