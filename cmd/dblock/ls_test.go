package main

import (
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
)

func TestLs(t *testing.T) {
	db := newFakeDB()
	if term := run(t, db, 0, "ls", "--json"); term.out.String() != "[]\n" {
		t.Errorf("nothing held: %q", &term.out)
	}
	run(t, db, 0, "ls")

	since := time.Date(2026, 11, 2, 3, 4, 5, 0, time.FixedZone("", 3600))
	db.found = []dblock.Blocker{
		{Name: "shop/report#00ff", Session: 9, Waiting: true, Mode: dblock.Shared},
		{ID: 42, Session: 8, Waiting: true, Since: since},
		{ID: 42, Session: 7, Application: "<projector>"},
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

	db.found = []dblock.Blocker{{ID: 42, Session: 7, Application: "evil\x1b[2J\tname"}}
	text := run(t, db, 0, "ls").out.String()
	if !strings.HasPrefix(text, "KEY") || !strings.Contains(text, "evil?[2J?name") {
		t.Errorf("table:\n%q", text)
	}
}
