package deadlock_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

var update = flag.Bool("update", false, "write the golden files anew")

// snapshotDB is a server with locks.
type snapshotDB struct {
	fakeDB
	seen  dialect.Snapshot
	then  *dialect.Snapshot // what is seen at the second look
	err   error
	asked dialect.SnapshotRequest
}

func (db *snapshotDB) Snapshot(_ context.Context, r dialect.SnapshotRequest) (*dialect.Snapshot, error) {
	db.asked = r
	seen := db.seen
	if db.then != nil {
		db.seen = *db.then
	}
	return &seen, db.err
}

var taken = time.Date(2026, 11, 2, 3, 4, 5, 0, time.UTC)

func key(name string) dialect.Target {
	return dialect.Target{Kind: dialect.KindAdvisory, Key: name}
}

func row(table, key string) dialect.Target {
	return dialect.Target{Kind: dialect.KindRow, Table: table, Row: key}
}

func wait(waiter, blocker int64, what dialect.Target) dialect.SnapshotWait {
	return dialect.SnapshotWait{Waiter: waiter, Blocker: blocker, Target: what}
}

func held(session int64, what dialect.Target) dialect.SnapshotLock {
	return dialect.SnapshotLock{Target: what, Session: session, Mode: "exclusive", Since: taken.Add(-time.Minute)}
}

func awaited(session int64, what dialect.Target, age time.Duration) dialect.SnapshotLock {
	return dialect.SnapshotLock{Target: what, Session: session, Mode: "exclusive", Waiting: true, Since: taken.Add(-age)}
}

// inspect looks at a server with these locks.
func inspect(t testing.TB, seen dialect.Snapshot) *deadlock.Snapshot {
	t.Helper()
	seen.Taken = taken
	seen.AddHolders()
	seen.Mentioned()
	s, err := deadlock.Inspect(t.Context(), &snapshotDB{seen: seen})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// hostile is everything that a format or a terminal might take for its own.
const hostile = "a\"b\\c<br/>{d}|[e]#35;`f`\x1b[2J\u202e\nend %% ];"

func scene(t testing.TB) *deadlock.Snapshot {
	named := dialect.Target{Kind: dialect.KindAdvisory, Key: "42", Name: "account/42#82bf33e224d2b8aa"}
	return inspect(t, dialect.Snapshot{
		Sessions: []dialect.SnapshotSession{
			{ID: 7, Application: hostile, Host: "10.0.0.7", User: "app", State: "idle in transaction", Began: taken.Add(-5 * time.Minute), Statement: "UPDATE accounts SET balance = ? WHERE id = ?"},
			{ID: 8, Application: "report", User: "app", State: "active", Began: taken.Add(-1500 * time.Millisecond), Statement: "SELECT * FROM accounts WHERE id = ? FOR UPDATE"},
			{ID: 9, Application: "migrate", State: "active", Statement: "ALTER TABLE accounts ADD note INT"},
			{ID: 20, Application: "one", State: "active"},
			{ID: 21, Application: "two", State: "active"},
			{ID: 30, Application: "projector", State: "idle"},
			{ID: 99, Application: "bystander"},
		},
		Locks: []dialect.SnapshotLock{
			held(7, named), awaited(8, row("accounts", "1"), 1500*time.Millisecond),
			awaited(9, dialect.Target{Kind: dialect.KindTable, Table: "accounts"}, 20*time.Millisecond),
			held(20, key("a")), awaited(20, row("accounts", "2"), time.Second), awaited(21, key("a"), 2*time.Second),
			held(30, key(hostile)),
		},
		Waits: []dialect.SnapshotWait{
			wait(8, 7, row("accounts", "1")),
			wait(9, 7, dialect.Target{Kind: dialect.KindTable, Table: "accounts"}), wait(9, 8, dialect.Target{Kind: dialect.KindTable, Table: "accounts"}),
			wait(20, 21, row("accounts", "2")), wait(21, 20, key("a")),
		},
		Gaps: []dialect.Gap{{Kind: dialect.KindRow, What: "some rows", Remedy: "GRANT THIS"}, {Kind: dialect.KindRow, What: "some rows", Remedy: "GRANT THIS"}},
	})
}

func TestRenderings(t *testing.T) {
	s := scene(t)
	asJSON, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	for file, got := range map[string]string{"graph.txt": s.Text(), "graph.dot": s.DOT(), "graph.mmd": s.Mermaid(), "graph.json": string(asJSON) + "\n"} {
		path := filepath.Join("testdata", file)
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
		}
	}
}

func TestRenderingsOfNothing(t *testing.T) {
	s := inspect(t, dialect.Snapshot{})
	asJSON, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"dialect":"fake","taken":"2026-11-02T03:04:05Z","sessions":[],"locks":[],"waits":[],"cycles":[],"roots":[],"gaps":[]}`; string(asJSON) != want {
		t.Errorf("%s, want %s", asJSON, want)
	}
	if want := "fake at 2026-11-02T03:04:05Z: 0 holding or waiting, 0 waiting, 0 in a deadlock\n"; s.Text() != want {
		t.Errorf("%q, want %q", s.Text(), want)
	}
}

var (
	dotLine     = regexp.MustCompile(`^\t(s\d+|s\d+ -> s\d+) \[label=Q(, color=red|, penwidth=3)?\];$`)
	dotString   = regexp.MustCompile(`"(\\.|[^"\\])*"`)
	mermaidLine = regexp.MustCompile(`^\t(s\d+\["[^"]*"\](:::\w+)?|s\d+ -->\|"[^"]*"\| s\d+|linkStyle \d+ stroke:red|classDef \w+ [\w:-]+)$`)
	mermaidText = regexp.MustCompile(`^[\pL\pN .,:/_\-=?()]*$`)
	entity      = regexp.MustCompile(`#\d+;|<br/>`)
)

// What clients call themselves and their keys stays within its quotes.
func FuzzRenderings(f *testing.F) {
	f.Add(hostile, hostile)
	f.Add("\\", "\\\"")
	f.Add("#quot;", "\"]\n s1 --> s2")
	f.Fuzz(func(t *testing.T, application, name string) {
		s := inspect(t, dialect.Snapshot{
			Sessions: []dialect.SnapshotSession{{ID: 1, Application: application, Host: name, User: application, State: name, Statement: application}, {ID: 2}},
			Locks:    []dialect.SnapshotLock{held(1, key(name)), awaited(2, key(name), time.Second)},
			Waits:    []dialect.SnapshotWait{wait(2, 1, key(name))},
		})
		lines := strings.Split(strings.TrimSuffix(s.DOT(), "\n"), "\n")
		if len(lines) != 7 {
			t.Errorf("DOT: %q", lines)
		}
		for _, line := range lines[3:6] {
			if !dotLine.MatchString(dotString.ReplaceAllString(line, "Q")) {
				t.Errorf("DOT: %q", line)
			}
		}
		for _, line := range strings.Split(strings.TrimSuffix(s.Mermaid(), "\n"), "\n")[1:] {
			if !mermaidLine.MatchString(line) {
				t.Errorf("Mermaid: %q", line)
			} else if parts := strings.Split(line, `"`); len(parts) == 3 && !mermaidText.MatchString(entity.ReplaceAllString(parts[1], "")) {
				t.Errorf("Mermaid: %q", line)
			}
		}
		for _, r := range s.Text() {
			if !unicode.IsPrint(r) && r != '\n' {
				t.Errorf("text has %U: %q", r, s.Text())
			}
		}
		if n := strings.Count(s.Text(), "\n"); n != 4 {
			t.Errorf("text of %d lines: %q", n, s.Text())
		}
		asJSON, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var back deadlock.Snapshot
		if err := json.Unmarshal(asJSON, &back); err != nil {
			t.Fatal(err)
		}
		if utf8.ValidString(name) && back.Waits[0].Key != name {
			t.Errorf("JSON: %q, want %q", back.Waits[0].Key, name)
		}
	})
}

func TestCyclesAndRoots(t *testing.T) {
	for name, test := range map[string]struct {
		waits  []dialect.SnapshotWait
		cycles [][]int64
		roots  []int64
	}{
		"nobody waits":          {nil, [][]int64{}, []int64{}},
		"a chain":               {[]dialect.SnapshotWait{wait(3, 2, key("b")), wait(2, 1, key("a"))}, [][]int64{}, []int64{1}},
		"two blockers":          {[]dialect.SnapshotWait{wait(3, 2, key("a")), wait(3, 1, key("a"))}, [][]int64{}, []int64{1, 2}},
		"a cycle":               {[]dialect.SnapshotWait{wait(2, 1, key("a")), wait(1, 2, key("b"))}, [][]int64{{1, 2}}, []int64{}},
		"a cycle, and a waiter": {[]dialect.SnapshotWait{wait(2, 1, key("a")), wait(1, 2, key("b")), wait(0, 1, key("a"))}, [][]int64{{1, 2}}, []int64{}},
		"of three":              {[]dialect.SnapshotWait{wait(5, 7, key("a")), wait(7, 6, key("b")), wait(6, 5, key("c"))}, [][]int64{{5, 7, 6}}, []int64{}},
		"two, and a root": {[]dialect.SnapshotWait{wait(1, 2, key("a")), wait(2, 1, key("b")), wait(3, 4, key("a")), wait(4, 3, key("b")), wait(4, 9, key("b"))},
			[][]int64{{1, 2}, {3, 4}}, []int64{9}},
		"the shortest": {[]dialect.SnapshotWait{wait(1, 2, key("a")), wait(2, 3, key("b")), wait(3, 1, key("c")), wait(1, 3, key("a"))}, [][]int64{{1, 3}}, []int64{}},
		"the shortest of two": {[]dialect.SnapshotWait{wait(1, 2, key("a")), wait(2, 1, key("b")), wait(1, 3, key("a")), wait(3, 4, key("c")), wait(4, 1, key("b"))},
			[][]int64{{1, 2}}, []int64{}},
		"oneself": {[]dialect.SnapshotWait{wait(1, 1, key("a"))}, [][]int64{}, []int64{}},
	} {
		s := inspect(t, dialect.Snapshot{Waits: test.waits})
		if !reflect.DeepEqual(s.Cycles, test.cycles) || !reflect.DeepEqual(s.Roots, test.roots) {
			t.Errorf("%s: cycles %v, roots %v, want %v and %v", name, s.Cycles, s.Roots, test.cycles, test.roots)
		}
	}
}

// Views that are read one after the other may show a cycle that never was.
func TestADeadlockIsSeenTwice(t *testing.T) {
	a, b := key("a"), row("accounts", "1")
	there, back := wait(1, 2, a), wait(2, 1, b)
	for what, test := range map[string]struct {
		seen, then []dialect.SnapshotWait
		cycles     [][]int64
		waits      int
	}{
		"it lasts":           {[]dialect.SnapshotWait{there, back}, []dialect.SnapshotWait{there, back, wait(3, 1, b)}, [][]int64{{1, 2}}, 3},
		"it was none":        {[]dialect.SnapshotWait{there, back}, []dialect.SnapshotWait{there}, [][]int64{}, 1},
		"for something else": {[]dialect.SnapshotWait{there, back}, []dialect.SnapshotWait{there, wait(2, 1, a)}, [][]int64{}, 1},
		"for both":           {[]dialect.SnapshotWait{there, back}, []dialect.SnapshotWait{there, back, wait(2, 1, a)}, [][]int64{{1, 2}}, 2},
		"another one":        {[]dialect.SnapshotWait{there, back}, []dialect.SnapshotWait{there, wait(2, 3, b), wait(3, 1, b)}, [][]int64{}, 1},
		"a shorter one": {[]dialect.SnapshotWait{there, wait(2, 3, b), wait(3, 1, b)}, []dialect.SnapshotWait{there, wait(2, 3, b), wait(3, 1, b), back},
			[][]int64{{1, 2, 3}}, 3},
	} {
		s, err := deadlock.Inspect(t.Context(), &snapshotDB{seen: dialect.Snapshot{Waits: test.seen}, then: &dialect.Snapshot{Waits: test.then}})
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(s.Cycles, test.cycles) || len(s.Waits) != test.waits {
			t.Errorf("%s: cycles %v, waits %+v", what, s.Cycles, s.Waits)
		}
	}
}

func TestALongQueueWaitsForItsHolder(t *testing.T) {
	var waits []dialect.SnapshotWait
	const n = 200
	for waiter := int64(2); waiter <= n; waiter++ {
		for blocker := int64(1); blocker < waiter; blocker++ { // all that came before
			waits = append(waits, wait(waiter, blocker, key("a")))
		}
	}
	s := inspect(t, dialect.Snapshot{Waits: waits})
	if len(s.Waits) != n-1 {
		t.Errorf("%d waits, want %d", len(s.Waits), n-1)
	}
	for _, w := range s.Waits {
		if w.Blocker != 1 {
			t.Errorf("%+v", w)
		}
	}
}

// A reader may stand behind a writer that the holder, a reader too, is in the way of.
func TestAWaiterInLineBlocksWhoIsBehindIt(t *testing.T) {
	s := inspect(t, dialect.Snapshot{Waits: []dialect.SnapshotWait{wait(2, 1, key("a")), wait(3, 2, key("a"))}})
	if len(s.Waits) != 2 {
		t.Errorf("waits %+v", s.Waits)
	}
}

func TestAWaiterWhoseBlockerIsNotSeenIsShown(t *testing.T) {
	s := inspect(t, dialect.Snapshot{
		Sessions: []dialect.SnapshotSession{{ID: 1, Application: "billing"}, {ID: 2, Application: "report"}, {ID: 3}},
		Locks:    []dialect.SnapshotLock{awaited(2, key("a"), time.Second), held(2, key("b")), awaited(3, key("b"), time.Minute), held(1, key("c"))},
		Waits:    []dialect.SnapshotWait{wait(3, 2, key("b"))},
	})
	if len(s.Roots) != 0 {
		t.Errorf("roots %v: the session waits", s.Roots)
	}
	if want := `
waits 1s for key a, and for whom is not seen: session 2 "report"
└─ waits 1m0s for key b: session 3

held, and nobody waits:
session 1 "billing"
   key c
`; !strings.HasSuffix(s.Text(), "deadlock\n"+want) {
		t.Errorf("text:\n%s", s.Text())
	}
	for what, text := range map[string]string{"DOT": s.DOT(), "Mermaid": s.Mermaid()} {
		if strings.Count(text, "waits for key a") != 1 {
			t.Errorf("%s:\n%s", what, text)
		}
	}
}

func TestInspectPassesItsOptionsOn(t *testing.T) {
	db := &snapshotDB{}
	if _, err := deadlock.Inspect(t.Context(), db, &deadlock.InspectOptions{FullStatements: true, Schema: "app", Table: "my_locks"}); err != nil {
		t.Fatal(err)
	}
	if want := (dialect.SnapshotRequest{FullStatements: true, Table: dialect.Table{Schema: "app", Name: "my_locks"}}); db.asked != want {
		t.Errorf("%+v, want %+v", db.asked, want)
	}
}

func TestInspectFails(t *testing.T) {
	cause := &dialect.Error{Class: dialect.Lost, Code: "57P01"}
	_, err := deadlock.Inspect(t.Context(), &snapshotDB{err: cause})
	var e *dblock.Error
	if !errors.Is(err, dblock.ErrLost) || !errors.As(err, &e) || e.Code != "57P01" || !strings.Contains(err.Error(), "inspect on fake") {
		t.Errorf("%v", err)
	}
	if _, err := deadlock.Inspect(t.Context(), nil); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("no database: %v", err)
	}
	if _, err := deadlock.Inspect(t.Context(), &snapshotDB{}, nil, nil); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("two options: %v", err)
	}
}

func TestManyKeysOfASessionAreCounted(t *testing.T) {
	var locks []dialect.SnapshotLock
	for i := range 1000 {
		locks = append(locks, held(1, key(fmt.Sprintf("k%04d", i))))
	}
	if text := inspect(t, dialect.Snapshot{Locks: locks}).Text(); !strings.Contains(text, "and 991 more") || strings.Count(text, "\n") > 20 {
		t.Errorf("text:\n%s", text)
	}
}
