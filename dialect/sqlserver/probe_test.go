package sqlserver

import (
	"database/sql/driver"
	"slices"
	"strings"
	"testing"

	"github.com/dblock-go/dblock/dialect"
)

func server(version string, engine int, updateability any) answer {
	return answer{columns: []string{"", "", "", ""}, rows: [][]driver.Value{{version, int64(engine), "app", updateability}}}
}

var (
	good    = server("16.0.4165.4", 3, "READ_WRITE")
	granted = status(0, 1)
	busy    = status(-1, 0)
	isHeld  = answer{outs: map[string]any{"held": "1"}}
	isFree  = answer{outs: map[string]any{"held": "0"}}
	gone    = released(0)
)

func TestNew(t *testing.T) {
	for _, c := range []struct {
		name   string
		script []answer
		class  dialect.Class // of the refusal
		unsafe bool          // what AllowUnsafe gives
	}{
		{"good", []answer{good, granted, busy, isHeld, gone, granted, gone}, "", true},
		{"Azure SQL", []answer{server("12.0.2000.8", 5, "READ_WRITE"), granted, busy, isHeld, gone, granted, gone}, "", true},
		{"too old", []answer{server("10.50.6000.34", 3, "READ_WRITE")}, dialect.Unsupported, false},
		{"another server", []answer{server("PostgreSQL", 3, nil)}, dialect.Unsupported, false},
		{"Synapse", []answer{server("10.0.21525.0", 6, "READ_WRITE")}, dialect.Unsupported, false},
		{"serverless Synapse", []answer{server("12.0.2000.8", 11, "READ_WRITE")}, dialect.Unsupported, false},
		{"secondary replica", []answer{server("16.0.1", 3, "READ_ONLY")}, dialect.Unsafe, true},
		{"locks do nothing", []answer{good, granted, granted}, dialect.Unsafe, true},
		{"lock is lost", []answer{good, granted, busy, isFree}, dialect.Unsafe, true},
		{"lock is not released", []answer{good, granted, busy, isHeld, gone, busy}, dialect.NotAcquired, true},
		{"no permission", []answer{good, {err: serverError(229)}}, dialect.Denied, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			stub, db := newStub(t, c.script...)
			_, err := New(t.Context(), db)
			if c.class == "" && err != nil || c.class != dialect.ClassOf(err) {
				t.Errorf("got %v, want class %q", err, c.class)
			}
			if len(c.script) > 1 && len(stub.closed) != 2 {
				t.Errorf("connections %v of the probe were destroyed, want two", stub.closed)
			}
			_, db = newStub(t, c.script[0])
			if _, err := New(t.Context(), db, &Options{AllowUnsafe: true}); (err == nil) != c.unsafe {
				t.Errorf("AllowUnsafe gave %v", err)
			}
		})
	}
}

func TestProbeSeesSharedSession(t *testing.T) {
	stub, db := newStub(t, good)
	stub.spid = func(int) int32 { return 51 }
	_, err := New(t.Context(), db)
	wantError(t, err, dialect.Unsafe, "")
	if !strings.Contains(err.Error(), "session 51") {
		t.Errorf("%q does not say what happened", err)
	}
}

func TestNewBadInput(t *testing.T) {
	_, err := New(t.Context(), nil)
	wantError(t, err, dialect.InvalidOption, "")
	_, db := newStub(t)
	_, err = New(t.Context(), db, nil, nil)
	wantError(t, err, dialect.InvalidOption, "")
	_, err = (&DB{}).OnConn(t.Context(), nil)
	wantError(t, err, dialect.InvalidOption, "")
}

func TestPoolOfOne(t *testing.T) {
	_, db := newStub(t, good)
	db.SetMaxOpenConns(1)
	d, err := New(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.OpenSession(t.Context(), dialect.SessionOptions{})
	wantError(t, err, dialect.Capacity, "")
	if !strings.Contains(err.Error(), "SetMaxOpenConns") {
		t.Errorf("%q does not name the way out", err)
	}
}

// The pool given to New stays open, and a session's connection never returns.
func TestWhoClosesWhat(t *testing.T) {
	stub, d := openDB(t)
	s, err := d.OpenSession(t.Context(), dialect.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Ping(t.Context()); err != nil {
		t.Errorf("Close closed what it was given: %v", err)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	if len(stub.closed) != 1 {
		t.Errorf("closed %v, want the session's connection", stub.closed)
	}
}

func single(value driver.Value) answer {
	return answer{columns: []string{""}, rows: [][]driver.Value{{value}}}
}

func TestDiagnose(t *testing.T) {
	var (
		locks   = []answer{granted, busy, isHeld, gone, granted, gone}
		noTable = answer{columns: []string{"", "", ""}}
		denied  = answer{err: serverError(300)}
		details = []answer{single(nil), noTable, noTable, denied, single(true), single("DISABLED"), single(int64(0))}
	)
	for _, c := range []struct {
		name   string
		script [][]answer
		want   string // the levels
		text   string
	}{
		{"an ordinary server", [][]answer{{good}, locks, details},
			"ok server, ok primary, ok locks, notice lock table, notice once table, notice privileges, ok isolation, ok durability, ok failover", "GRANT VIEW SERVER STATE"},
		{"a secondary", [][]answer{{server("16.0.1", 3, "READ_ONLY")}, locks, details},
			"ok server, unsafe primary, ok locks, notice lock table, notice once table, notice privileges, ok isolation, ok durability, ok failover", "connect to the primary"},
		{"locks do nothing", [][]answer{{good, granted, granted}, details},
			"ok server, ok primary, unsafe locks, notice lock table, notice once table, notice privileges, ok isolation, ok durability, ok failover", "past any proxy"},
		{"Azure, forced to be less durable", [][]answer{{server("12.0.2000.8", 5, "READ_WRITE")}, locks,
			{single(nil), noTable, noTable, denied, single(false), single("FORCED"), single(int64(0))}},
			"ok server, ok primary, ok locks, notice product, notice lock table, notice once table, notice privileges, ok isolation, warning durability, notice failover", "fencing"},
		{"Babelfish", [][]answer{{good}, locks, {single(int64(1)), noTable, noTable, denied, single(false), denied, single(int64(0))}},
			"ok server, ok primary, ok locks, notice product, notice lock table, notice once table, notice privileges, ok isolation, warning durability, ok failover", "Babelfish"},
	} {
		t.Run(c.name, func(t *testing.T) {
			stub, pool := newStub(t, slices.Concat(c.script...)...)
			found, err := newDB(pool).Diagnose(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var levels, texts []string
			for _, f := range found {
				levels = append(levels, string(f.Level)+" "+f.Check)
				texts = append(texts, f.Text+" "+f.Advice)
			}
			if got := strings.Join(levels, ", "); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if !strings.Contains(strings.Join(texts, "\n"), c.text) {
				t.Errorf("nothing says %q:\n%s", c.text, strings.Join(texts, "\n"))
			}
			if len(stub.closed) != 2 {
				t.Errorf("connections %v of the probe were destroyed, want two", stub.closed)
			}
		})
	}
}

func TestFencingNumberOfAnotherSessionIsRefused(t *testing.T) {
	stub, d := openDB(t)
	s, err := d.OpenSession(t.Context(), dialect.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	moving := answer{outs: map[string]any{"status": 0, "granted": 1, "missing": "0,"}}
	stub.script = []answer{moving, {}, {outs: map[string]any{"fences": "1,", "session": 99}}}
	_, err = s.Acquire(t.Context(), dialect.Request{Keys: []dialect.Key{{Name: "a"}}, Fence: &dialect.Table{}})
	wantError(t, err, dialect.Unsafe, "")
	if !strings.Contains(err.Error(), "session 99") {
		t.Errorf("%q does not say what happened", err)
	}
}
