package main

import (
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

func advisoryLock(key string, session int64, mode string, waiting bool, since time.Time) dialect.SnapshotLock {
	return dialect.SnapshotLock{Target: dialect.Target{Kind: dialect.KindAdvisory, Key: key}, Session: session, Mode: mode, Waiting: waiting, Since: since}
}

func TestLs(t *testing.T) {
	db := newFakeDB()
	if term := run(t, db, 0, "ls", "--json"); term.out.String() != "[]\n" {
		t.Errorf("nothing held: %q", &term.out)
	}
	run(t, db, 0, "ls")

	since := time.Date(2026, 11, 2, 3, 4, 5, 0, time.FixedZone("", 3600))
	named := advisoryLock("43", 7, "exclusive", false, time.Time{})
	named.Name = "account/42#82bf33e224d2b8aa"
	db.found = dialect.Snapshot{
		Sessions: []dialect.SnapshotSession{{ID: 7, Application: "<projector>"}, {ID: 8}, {ID: 9}},
		Locks: []dialect.SnapshotLock{
			advisoryLock("shop/report#00ff", 9, "shared", true, time.Time{}),
			advisoryLock("42", 8, "exclusive", true, since),
			advisoryLock("42", 7, "exclusive", false, time.Time{}),
			named,
			{Target: dialect.Target{Kind: dialect.KindRow, Table: "accounts", Row: "1"}, Session: 9, Mode: "X", Waiting: true},
		},
	}
	const want = `[
  {
    "key": "42",
    "id": 42,
    "mode": "exclusive",
    "state": "held",
    "session": 7,
    "application": "<projector>"
  },
  {
    "key": "42",
    "id": 42,
    "mode": "exclusive",
    "state": "waiting",
    "session": 8,
    "application": "",
    "since": "2026-11-02T02:04:05Z"
  },
  {
    "key": "43",
    "id": 43,
    "name": "account/42#82bf33e224d2b8aa",
    "mode": "exclusive",
    "state": "held",
    "session": 7,
    "application": "<projector>"
  },
  {
    "key": "shop/report#00ff",
    "id": null,
    "mode": "shared",
    "state": "waiting",
    "session": 9,
    "application": ""
  }
]
`
	if term := run(t, db, 0, "ls", "--json"); term.out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &term.out, want)
	}
	table := run(t, db, 0, "ls").out.String()
	if !strings.HasPrefix(table, "KEY ") || !strings.Contains(table, "account/42#82bf33e224d2b8aa") || strings.Contains(table, "accounts") {
		t.Errorf("table:\n%s", table)
	}
	if all := run(t, db, 0, "ls", "--all", "--json").out.String(); !strings.Contains(all, `"key": "row 1 of accounts",
    "id": null,
    "kind": "row",`) {
		t.Errorf("all:\n%s", all)
	}

	db.found = dialect.Snapshot{
		Sessions: []dialect.SnapshotSession{{ID: 7, Application: "evil\x1b[2J\tname"}},
		Locks:    []dialect.SnapshotLock{advisoryLock("42", 7, "exclusive", false, time.Time{})},
	}
	text := run(t, db, 0, "ls").out.String()
	if !strings.HasPrefix(text, "KEY") || strings.Contains(text, "NAME") || !strings.Contains(text, "evil?[2J?name") {
		t.Errorf("table:\n%q", text)
	}
}

// A program must not take a part for all.
func TestLsListsAllOrNothing(t *testing.T) {
	db := newFakeDB()
	db.found.Gaps = []dialect.Gap{{Kind: dialect.KindRow, What: "rows", Remedy: "GRANT ROWS"}, {What: "details", Remedy: "GRANT DETAILS"}}
	run(t, db, 0, "ls", "--json")
	if term := run(t, db, exitFailed, "ls", "--all", "--json"); term.out.Len() > 0 || !strings.Contains(term.err.String(), "not seen: rows (GRANT ROWS)") {
		t.Errorf("stdout %q, stderr %q", &term.out, &term.err)
	}
	db.found.Gaps[0].Kind = dialect.KindAdvisory
	if term := run(t, db, exitFailed, "ls"); term.out.Len() > 0 || !strings.Contains(term.err.String(), "GRANT ROWS") {
		t.Errorf("stdout %q, stderr %q", &term.out, &term.err)
	}
}
