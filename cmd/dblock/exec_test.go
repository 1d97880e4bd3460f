package main

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

func needsShell(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs sh")
	}
}

func TestExecPassesOn(t *testing.T) {
	needsShell(t)
	db := newFakeDB()
	term := newTerminal(db, "GREETING=hello")
	term.stdin = strings.NewReader("from stdin")
	code := term.main(t.Context(), []string{"exec", "-k", "job", "--", "sh", "-c", `echo "$GREETING $1 $(cat)"; echo oops >&2; exit 7`, "sh", "--json"})
	if code != 7 || term.out.String() != "hello --json from stdin\n" || term.err.String() != "oops\n" {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, &term.out, &term.err)
	}
	if db.held(dblock.NewKey("job")) {
		t.Error("the key is still held")
	}
	if db.opened.Application != "dblock exec sh" {
		t.Errorf("application %q", db.opened.Application)
	}
}

func TestExecHoldsEveryKey(t *testing.T) {
	needsShell(t)
	for _, key := range []string{"a", "b/c", "raw:5"} {
		db := newFakeDB()
		var k keyArg
		if err := k.UnmarshalText([]byte(key)); err != nil {
			t.Fatal(err)
		}
		db.hold(k.Key)
		for _, args := range []string{"--try", "--wait 0s", "--wait 0", "--wait 20ms"} {
			line := append(strings.Fields("exec --key a --key b/c --key raw:5 "+args), "--", "sh", "-c", "echo ran")
			if term := run(t, db, exitNotAcquired, line...); term.out.Len() > 0 {
				t.Errorf("%s held, %s: the command ran", key, args)
			}
		}
	}
}

func TestExecConflictExitCode(t *testing.T) {
	db := newFakeDB()
	db.hold(dblock.NewKey("a"))
	run(t, db, 9, "exec", "--try", "--key", "a", "--conflict-exit-code", "9", "--", os.Args[0])
	run(t, db, 0, "exec", "--try", "--key", "b", "--", os.Args[0], "-test.run=^$")
}

func TestExecGivesTheFencingNumber(t *testing.T) {
	needsShell(t)
	for args, want := range map[string]string{"--fence": "41\n", "": "none\n"} {
		line := append(strings.Fields("exec --key a "+args), "--", "sh", "-c", "echo ${DBLOCK_TOKEN:-none}")
		if term := run(t, newFakeDB(), 0, line...); term.out.String() != want {
			t.Errorf("%s: %q, want %q", args, &term.out, want)
		}
	}
}

// What cannot be executed is found out before the database is asked.
func TestExecUnusableCommand(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "plain")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	notFound := exitNotFound
	cannot := exitCannotExec
	if runtime.GOOS == "windows" {
		cannot = exitNotFound
	}
	for command, code := range map[string]int{
		"no-such-command":                  notFound,
		filepath.Join(folder, "not-there"): notFound,
		file:                               cannot,
		folder:                             cannot,
	} {
		if term := run(t, nil, code, "exec", "--key", "a", "--", command); !strings.Contains(term.err.String(), "command") {
			t.Errorf("%s: %s", command, &term.err)
		}
	}
}

// What the operating system finds out only when it tries leaves nothing held.
func TestExecUnusableFormat(t *testing.T) {
	needsShell(t)
	file := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(file, []byte("\x00\x01"), 0o755); err != nil {
		t.Fatal(err)
	}
	db := newFakeDB()
	run(t, db, exitCannotExec, "exec", "--key", "a", "--", file)
	if db.held(dblock.NewKey("a")) {
		t.Error("the key is still held")
	}
}

func TestExecLosesTheLock(t *testing.T) {
	needsShell(t)
	db := newFakeDB()
	term := newTerminal(db)
	term.stdout = writerFunc(func([]byte) {
		db.lost <- &dialect.Error{Class: dialect.Lost, Err: errors.New("the server said goodbye")}
	})
	// The command ignores SIGTERM, and so does what it waits for.
	code := term.main(t.Context(), []string{"exec", "--key", "a", "--kill-after", "50ms", "--", "sh", "-c", `trap "" TERM; echo ready; sleep 1000`})
	if code != exitLost || !strings.Contains(term.err.String(), "the server said goodbye") {
		t.Errorf("exit code %d: %s", code, &term.err)
	}
}

func TestApplicationIsShort(t *testing.T) {
	if got, want := application("/usr/bin/backup"), "dblock exec backup"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	got := application(strings.Repeat("ü", 100))
	if len(got) > 63 || len(got) < 60 || strings.ContainsRune(got, '�') {
		t.Errorf("%d bytes: %q", len(got), got)
	}
}
