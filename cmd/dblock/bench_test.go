package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// benchDB is a fakeDB with a lock table and transactions.
type benchDB struct {
	*fakeDB
	noTable, noLock error
	noDelete        func(rows map[int64]bool) error // nil: it is allowed
	onLock          func()
	open            atomic.Int64 // sessions

	rowsMu sync.Mutex
	rows   map[int64]bool
	table  string // that rows were deleted from
}

func newBenchDB() *benchDB {
	return &benchDB{fakeDB: newFakeDB(), rows: map[int64]bool{}, onLock: func() {}}
}

func (d *benchDB) OpenSession(ctx context.Context, o dialect.SessionOptions) (dialect.Session, error) {
	s, err := d.fakeDB.OpenSession(ctx, o)
	d.open.Add(1)
	return benchSession{s, sync.OnceFunc(func() { d.open.Add(-1) })}, err
}

type benchSession struct {
	dialect.Session
	closed func()
}

func (s benchSession) Close() error {
	s.closed()
	return s.Session.Close()
}

func (s benchSession) Statements() dialect.Statements      { return fakeStatements{} }
func (s benchSession) EndStatements(context.Context) error { return nil }

func (*benchDB) Natives() (conn, tx reflect.Type) {
	return reflect.TypeFor[fakeStatements](), reflect.TypeFor[fakeTx]()
}
func (d *benchDB) CheckTable(context.Context, dialect.Table) (bool, error) {
	return d.noTable == nil, d.noTable
}
func (d *benchDB) Begin(context.Context, *sql.TxOptions) (dialect.OwnedTx, error) {
	return fakeTx{d}, nil
}

func (d *benchDB) LockRows(_ context.Context, _ dialect.Tx, r dialect.RowRequest) ([]int64, error) {
	d.onLock()
	d.rowsMu.Lock()
	defer d.rowsMu.Unlock()
	for _, k := range r.Keys {
		d.rows[k.ID] = true
	}
	return nil, d.noLock
}

func (d *benchDB) BeginRows(ctx context.Context, _ *sql.TxOptions, r dialect.RowRequest) (dialect.OwnedTx, error) {
	_, err := d.LockRows(ctx, nil, r)
	return dialect.Begun(ctx, fakeTx{d}, err)
}

type fakeTx struct{ db *benchDB }

func (t fakeTx) Native() any                    { return t }
func (t fakeTx) Commit(context.Context) error   { return nil }
func (t fakeTx) Rollback(context.Context) error { return nil }
func (t fakeTx) ExecContext(ctx context.Context, query string, _ ...any) (sql.Result, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var id int64
	if _, err := fmt.Sscanf(query, "DELETE FROM %s WHERE id = %d", &t.db.table, &id); err != nil {
		return nil, fmt.Errorf("%s: %w", query, err)
	}
	t.db.rowsMu.Lock()
	defer t.db.rowsMu.Unlock()
	if t.db.noDelete != nil {
		if err := t.db.noDelete(t.db.rows); err != nil {
			return nil, err
		}
	}
	delete(t.db.rows, id)
	return nil, nil
}

type fakeStatements struct{}

func (s fakeStatements) Native() any { return s }
func (s fakeStatements) ExecContext(_ context.Context, query string, _ ...any) (sql.Result, error) {
	time.Sleep(time.Microsecond) // no clock shall find that it took no time
	if query != "SELECT 1" {
		return nil, fmt.Errorf("not a round trip: %s", query)
	}
	return nil, nil
}

// nothingIsLeft fails if a session, a key or a row is.
func (d *benchDB) nothingIsLeft(t *testing.T) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if open := d.open.Load(); open > 0 || len(d.holders) > 0 || len(d.rows) > 0 {
		t.Errorf("left behind: %d sessions, %d keys, %d rows", open, len(d.holders), len(d.rows))
	}
}

func parseBench(t *testing.T, text string) (r benchResult, lines map[string]measurement) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	lines = map[string]measurement{}
	for _, m := range r.Measurements {
		lines[m.Name] = m
	}
	return r, lines
}

func TestBenchMeasuresEverything(t *testing.T) {
	db := newBenchDB()
	term := run(t, db, 0, "bench", "--json", "--duration", "20ms", "--goroutines", "5,3,5", "--keys", "7")
	r, lines := parseBench(t, term.out.String())
	names := make([]string, len(r.Measurements))
	for i, m := range r.Measurements {
		names[i] = m.Name
	}
	want := []string{"round_trip", "acquire_release", "keys_7", "goroutines_3", "goroutines_5", "hand_off", "hand_off_crowd", "transaction", "transaction_lock", "row_lock"}
	if !slices.Equal(names, want) {
		t.Errorf("measured %v, want %v", names, want)
	}
	if r.Database != "fake" || !r.Complete || r.Rounds < fewestRounds {
		t.Errorf("%+v", r)
	}
	for name, m := range lines {
		if name == "transaction_lock" {
			if m.Status != statusUnsupported || !strings.Contains(m.Reason, "use package rowlock") || m.RoundTrips != nil {
				t.Errorf("%+v", m)
			}
			continue
		}
		if m.Status != statusMeasured || m.Text == "" || m.Reason != "" {
			t.Errorf("%+v", m)
			continue
		}
		for _, s := range []*spread{m.RoundTrips, m.Microseconds} {
			if s.Min <= 0 || s.Min > s.Median || s.Median > s.Max {
				t.Errorf("%s: %+v", name, *s)
			}
		}
	}
	if one := lines["round_trip"].RoundTrips.Median; one < 0.999 || one > 1.001 {
		t.Errorf("a round trip takes %v round trips", one)
	}
	if db.opened.Application != "dblock bench" {
		t.Errorf("application %q", db.opened.Application)
	}
	db.nothingIsLeft(t)
}

func TestBenchSaysWhatFiguresMean(t *testing.T) {
	db := newBenchDB()
	db.noTable = &dialect.Error{Class: dialect.Setup, Hint: "run\n`dblock setup`"}
	text := run(t, db, 0, "bench", "--duration", "1ms").out.String()
	for _, want := range []string{
		"WHAT", "LOWEST",
		"SELECT 1", "1.00 round trips",
		"acquire + release a free key",
		"100 keys in one call",
		"64 goroutines, a key each", "one every ",
		"begin + transaction lock + commit: not supported: its advisory locks belong to sessions",
		"begin + row lock + commit: not measured: not set up (run `dblock setup`)",
		"fake: medians of 3 rounds. A round trip is SELECT 1",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in:\n%s", want, text)
		}
	}
	db.nothingIsLeft(t)
}

func TestBenchStoppedBySignal(t *testing.T) {
	db := newBenchDB()
	ctx, stop := context.WithCancelCause(t.Context())
	db.onLock = func() { stop(signalError{syscall.SIGINT}) }
	term := newTerminal(db)
	code := term.main(ctx, []string{"bench", "--json", "--duration", "1h", "--goroutines", "2"})
	if code != exitSignal+int(syscall.SIGINT) || term.err.String() != "dblock: stopped by signal: interrupt\n" {
		t.Errorf("exit code %d, stderr %q", code, &term.err)
	}
	r, lines := parseBench(t, term.out.String())
	if r.Complete || r.Rounds != 0 {
		t.Errorf("%+v", r)
	}
	if m := lines["goroutines_2"]; m.Status != statusMeasured {
		t.Errorf("%+v was measured before", m)
	}
	if m := lines["row_lock"]; m.Status != statusSkipped || m.Reason == "" {
		t.Errorf("%+v was not", m)
	}
	db.nothingIsLeft(t)
}

func TestBenchCreatesNoRowThatItCannotDelete(t *testing.T) {
	db := newBenchDB()
	db.noDelete = func(map[int64]bool) error { return &dialect.Error{Class: dialect.Denied} }
	db.onLock = func() { t.Error("a row was locked") }
	_, lines := parseBench(t, run(t, db, 0, "bench", "--json", "--duration", "1ms").out.String())
	if m := lines["row_lock"]; m.Status != statusSkipped || !strings.Contains(m.Reason, "could not be deleted afterwards: permission denied") {
		t.Errorf("%+v", m)
	}
}

func TestBenchTellsOfARowThatStaysBehind(t *testing.T) {
	db := newBenchDB()
	db.noDelete = func(rows map[int64]bool) error {
		if len(rows) > 0 {
			return &dialect.Error{Class: dialect.Unavailable}
		}
		return nil
	}
	term := run(t, db, exitFailed, "bench", "--json", "--duration", "1ms", "--table", `my"locks`, "--schema", "s")
	if db.table != `"s"."my""locks"` {
		t.Errorf("table %s", db.table)
	}
	if _, lines := parseBench(t, term.out.String()); lines["row_lock"].Status != statusMeasured {
		t.Errorf("%+v", lines["row_lock"])
	}
	for id := range db.rows {
		if want := fmt.Sprintf("id %d stays behind", id); !strings.Contains(term.err.String(), want) {
			t.Errorf("stderr %q, want %q", &term.err, want)
		}
	}
}

func TestBenchGoesOnAfterAFailure(t *testing.T) {
	db := newBenchDB()
	db.noLock = &dialect.Error{Class: dialect.Capacity, Hint: "the lock table is full"}
	term := run(t, db, exitFailed, "bench", "--json", "--duration", "1ms")
	r, lines := parseBench(t, term.out.String())
	if m := lines["row_lock"]; m.Status != statusFailed || !strings.Contains(m.Reason, "the lock table is full") {
		t.Errorf("%+v", m)
	}
	if !r.Complete || lines["acquire_release"].Status != statusMeasured {
		t.Errorf("%+v", r)
	}
	if !strings.Contains(term.err.String(), "begin + row lock + commit: ") {
		t.Errorf("stderr %q", &term.err)
	}
	db.nothingIsLeft(t)
}

func TestBenchFigures(t *testing.T) {
	for x, want := range map[float64]string{0.0161: "0.016", 0.25: "0.250", 0.9994: "0.999", 0.9999999: "1.00", 1: "1.00", 9.996: "10.0", 2.018: "2.02", 35.06: "35.1", 138.4: "138", 12345: "12345"} {
		if got := figure(x); got != want {
			t.Errorf("%v: %s, want %s", x, got, want)
		}
	}
	for d, want := range map[time.Duration]string{0: "0s", 7: "7ns", 41234: "41.2µs", 412345: "412µs", 1234567: "1.23ms", 2345678901: "2.35s"} {
		if got := roundedTime(d); got != want {
			t.Errorf("%d: %s, want %s", d, got, want)
		}
	}
	for _, test := range []struct {
		values []float64
		want   spread
	}{
		{[]float64{3}, spread{3, 3, 3}},
		{[]float64{9, 1, 2}, spread{2, 1, 9}},
		{[]float64{4, 1, 3, 2}, spread{2.5, 1, 4}},
	} {
		if got := spreadOf(test.values); got != test.want {
			t.Errorf("%v: %+v, want %+v", test.values, got, test.want)
		}
	}
}
