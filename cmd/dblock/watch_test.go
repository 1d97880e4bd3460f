package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/dblock-go/dblock/dialect"
)

func TestWatchesUntilASignal(t *testing.T) {
	for args, whole := range map[string]func(text string) bool{
		"graph --watch=1ms":              func(text string) bool { return strings.Count(text, "fake at ") == 3 },
		"graph --watch=1ns --json":       documents(3),
		"graph --json --watch=1ms":       documents(3),
		"ls --watch=1ms":                 func(text string) bool { return strings.Count(text, "nobody holds") == 3 },
		"ls --watch=1ms --all":           func(text string) bool { return strings.Count(text, "KEY ") == 3 },
		"ls --watch=1ms --json":          documents(3),
		"graph --watch=1ms --format dot": func(text string) bool { return strings.Count(text, "digraph") == 3 },
	} {
		db := waitingDB()
		db.failures = 1
		ctx, cancel := context.WithCancelCause(t.Context())
		term := newTerminal(db)
		var out bytes.Buffer
		looks := 0
		term.stdout = writerFunc(func(p []byte) {
			out.Write(p)
			if !bytes.HasSuffix(p, []byte("\n")) {
				t.Errorf("%s: a part of a line: %q", args, p)
			}
			if looks++; looks == 3 {
				cancel(signalError{syscall.SIGINT})
			}
		})
		if code := term.main(ctx, strings.Fields(args)); code != 128+2 || looks != 3 || !whole(out.String()) {
			t.Errorf("%s: exit code %d after %d looks:\n%s", args, code, looks, &out)
		}
		// A server that does not answer once is not the end.
		if got := term.err.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "session lost") {
			t.Errorf("%s: stderr %q", args, got)
		}
	}
}

// documents expects n JSON documents, one after the other.
func documents(n int) func(text string) bool {
	return func(text string) bool {
		d := json.NewDecoder(strings.NewReader(text))
		for range n {
			var v any
			if d.Decode(&v) != nil {
				return false
			}
		}
		return errors.Is(d.Decode(new(any)), io.EOF)
	}
}

func TestStopsWatchingWhatCannotBeSeen(t *testing.T) {
	db := newFakeDB()
	db.found.Gaps = []dialect.Gap{{Kind: dialect.KindAdvisory, What: "locks", Remedy: "GRANT LOCKS"}}
	if term := run(t, db, exitFailed, "ls", "--watch=1ms"); term.out.Len() > 0 || strings.Count(term.err.String(), "GRANT LOCKS") != 1 {
		t.Errorf("stdout %q, stderr %q", &term.out, &term.err)
	}
}

func TestStopsWatchingForAReaderThatHasGone(t *testing.T) {
	for _, command := range []string{"graph", "ls"} {
		term := newTerminal(waitingDB())
		gone := errors.New("broken pipe")
		term.stdout = brokenPipe{gone}
		if code := term.main(t.Context(), []string{command, "--watch=1ms"}); code != exitFailed || !strings.Contains(term.err.String(), gone.Error()) {
			t.Errorf("%s: exit code %d: %s", command, code, &term.err)
		}
	}
}

type brokenPipe struct{ err error }

func (b brokenPipe) Write([]byte) (int, error) { return 0, b.err }

// steering is what a terminal would take for a command: ESC, the CSI of C1, DEL, an
// override of the direction, a line separator, and a character beyond U+FFFF.
const steering = "\x1b[2J\u009b2J\x7f\u202e\u2028\U000e0041\x00\"é"

func TestNoOutputSteersATerminal(t *testing.T) {
	key := dialect.Target{Kind: dialect.KindAdvisory, Key: steering, Name: steering}
	row := dialect.Target{Kind: dialect.KindRow, Table: steering, Row: steering}
	db := newFakeDB()
	db.found = dialect.Snapshot{
		Sessions: []dialect.SnapshotSession{{ID: 7, Application: steering, Host: steering, User: steering, State: steering, Statement: steering}, {ID: 8}},
		Locks:    []dialect.SnapshotLock{{Target: key, Session: 7, Mode: steering}, {Target: row, Session: 8, Mode: steering, Waiting: true}, {Target: key, Session: 8, Waiting: true}},
		Waits:    []dialect.SnapshotWait{{Waiter: 8, Blocker: 7, Target: key}},
		Gaps:     []dialect.Gap{{What: steering, Remedy: steering}},
	}
	for _, args := range []string{"graph", "graph --json", "graph --format dot", "graph --format mermaid", "ls", "ls --json", "ls --all", "ls --all --json"} {
		term := run(t, db, 0, strings.Fields(args)...)
		harmless(t, args, term.out.String())
		if strings.HasSuffix(args, "--json") && !strings.Contains(term.out.String(), `\u001b[2J\u009b2J\u007f\u202e\u2028\udb40\udc41\u0000\"é`) {
			t.Errorf("%s:\n%s", args, &term.out)
		}
	}
	db.found.Gaps = []dialect.Gap{{Kind: dialect.KindAdvisory, What: steering, Remedy: steering}}
	harmless(t, "an error", run(t, db, exitFailed, "ls").err.String())
}

func harmless(t *testing.T, what, text string) {
	t.Helper()
	if printable(strings.ReplaceAll(text, "\n", "")) != strings.NewReplacer("\n", "", "\t", "?").Replace(text) {
		t.Errorf("%s: %q", what, text)
	}
}
