package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

func waitingDB() *fakeDB {
	db := newFakeDB()
	row := dialect.Target{Kind: dialect.KindRow, Table: "accounts", Row: "1"}
	db.found = dialect.Snapshot{
		Taken:    time.Date(2026, 11, 2, 3, 4, 5, 0, time.UTC),
		Sessions: []dialect.SnapshotSession{{ID: 7, Application: "billing"}, {ID: 8, Application: "evil\x1b[2J"}},
		Locks:    []dialect.SnapshotLock{{Target: row, Session: 7}, {Target: row, Session: 8, Waiting: true}},
		Waits:    []dialect.SnapshotWait{{Waiter: 8, Blocker: 7, Target: row}},
		Gaps:     []dialect.Gap{{What: "more", Remedy: "GRANT MORE"}},
	}
	return db
}

func TestGraph(t *testing.T) {
	db := waitingDB()
	for args, want := range map[string]string{
		"graph":                  "waits for row 1 of accounts: session 8 \"evil?[2J\"",
		"graph --format text":    "not seen: more → GRANT MORE",
		"graph --format dot":     "s8 -> s7 [label=\"row 1 of accounts\"]",
		"graph --format=mermaid": "s8 -->|\"row 1 of accounts\"| s7",
	} {
		term := run(t, db, 0, strings.Fields(args)...)
		if text := term.out.String(); !strings.Contains(text, want) || strings.Contains(text, "\x1b") {
			t.Errorf("dblock %s: %q lacks %q", args, text, want)
		}
	}
	if run(t, db, 0, "graph", "--full-statements"); !db.asked.FullStatements {
		t.Error("--full-statements has no effect")
	}
	run(t, db, 0, "graph", "--schema", "app", "--table", "my_locks")
	if want := (dialect.SnapshotRequest{Table: dialect.Table{Schema: "app", Name: "my_locks"}}); db.asked != want {
		t.Errorf("asked for %+v, want %+v", db.asked, want)
	}
	var s deadlock.Snapshot
	if err := json.Unmarshal([]byte(run(t, db, 0, "graph", "--json").out.String()), &s); err != nil || len(s.Waits) != 1 || len(s.Roots) != 1 || s.Roots[0] != 7 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestGraphUsage(t *testing.T) {
	for args, want := range map[string]string{
		"graph --format svg":        "--format must be one of",
		"graph --json --format dot": "exclude each other",
		"graph --watch=soon":        `--watch: takes a time such as 500ms or 2s, not "soon"`,
		"graph --watch=0s":          "takes a time",
		"graph --watch=-1s":         "takes a time",
	} {
		if term := run(t, waitingDB(), exitUsage, strings.Fields(args)...); !strings.Contains(term.err.String(), want) {
			t.Errorf("dblock %s: %s", args, &term.err)
		}
	}
}

func TestGraphFails(t *testing.T) {
	db := waitingDB()
	db.failures = 1
	if term := run(t, db, exitFailed, "graph"); term.out.Len() > 0 || !strings.Contains(term.err.String(), "inspect on fake: session lost") {
		t.Errorf("stdout %q, stderr %q", &term.out, &term.err)
	}
}
