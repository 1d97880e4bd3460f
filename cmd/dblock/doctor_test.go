package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

func TestDoctorPrintsTheWorstFirst(t *testing.T) {
	db := newFakeDB()
	db.health = []dialect.Finding{
		{Check: "server", Level: dialect.OK, Text: "Fake 1.0"},
		{Check: "timeouts", Level: dialect.Notice, Text: "statement_timeout = 1s", Advice: "mind\n\tit"},
		{Check: "privileges", Level: dialect.Warning, Text: "evil\x1b[2J"},
		{Check: "isolation", Level: dialect.OK, Text: "read committed"},
	}
	const want = `LEVEL    CHECK       FOUND
warning  privileges  evil?[2J
notice   timeouts    statement_timeout = 1s → mind it
ok       server      Fake 1.0
ok       isolation   read committed
`
	if term := run(t, db, 0, "doctor"); term.out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &term.out, want)
	}

	var found []finding
	if err := json.Unmarshal([]byte(run(t, db, 0, "doctor", "--json").out.String()), &found); err != nil || len(found) != 4 {
		t.Fatalf("%v, %v", found, err)
	}
	if want := (finding{"timeouts", "notice", "statement_timeout = 1s", "mind it"}); found[1] != want {
		t.Errorf("got %+v, want %+v", found[1], want)
	}
}

func TestDoctorFailsWhereLocksWouldNotBeSafe(t *testing.T) {
	db := newFakeDB()
	db.health = []dialect.Finding{{Check: "server", Level: dialect.OK, Text: "Fake 1.0"}, {Check: "pooler", Level: dialect.Danger, Text: "one", Advice: "go around"}}
	term := run(t, db, exitFailed, "doctor")
	if !strings.Contains(term.out.String(), "unsafe  pooler  one → go around") || !strings.Contains(term.err.String(), "not be safe") {
		t.Errorf("stdout:\n%s\nstderr: %s", &term.out, &term.err)
	}
}

func TestDoctorOpensWhatOthersRefuse(t *testing.T) {
	for _, test := range []struct {
		err  error
		want string // on stdout
	}{
		{nil, "ok     server"},
		{&dialect.Error{Class: dialect.Unsupported, Hint: "no application locks"}, "unsafe  server  no application locks"},
		{&dialect.Error{Class: dialect.Unsafe, Err: errors.New("a look-alike"), Hint: "row locks only"}, "unsafe  server  a look-alike → row locks only"},
		{&dialect.Error{Class: dialect.Unavailable, Hint: "nobody is there"}, ""},
	} {
		term := newTerminal(newFakeDB())
		term.open = func(_ context.Context, _ string, allowUnsafe bool) (dblock.DB, error) {
			if !allowUnsafe {
				t.Error("asked for a safe one only")
			}
			db := newFakeDB()
			db.health = []dialect.Finding{{Check: "server", Level: dialect.OK, Text: "Fake 1.0"}}
			return db, test.err
		}
		code := term.main(t.Context(), []string{"doctor"})
		if (code == 0) != (test.err == nil) || !strings.Contains(term.out.String(), test.want) || test.want == "" && term.out.Len() > 0 {
			t.Errorf("%v: exit code %d, stdout:\n%s\nstderr: %s", test.err, code, &term.out, &term.err)
		}
	}
}
