package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/dblock-go/dblock"
)

func TestUsage(t *testing.T) {
	for _, test := range []struct {
		args string
		want string // on stderr
	}{
		{"", `expected one of "exec"`},
		{"frob", "unexpected argument frob"},
		{"ls --frob", "unknown flag --frob"},
		{"ls", "DBLOCK_DSN"},
		{"exec -- true", "--key=K"},
		{"exec --key a", "<command>"},
		{"exec --key a --", "no command after --"},
		{"exec --key / -- true", "must not be empty"},
		{"exec --key raw:1x -- true", "64-bit integer"},
		{"exec --key a --frob -- true --frob", "unknown flag --frob"},
		{"exec --key a --try --wait 1s -- true", "can't be used together"},
		{"exec --key a --wait=-1s -- true", "must not be negative"},
		{"exec --key a --wait -1s -- true", "--wait -1s: must not be negative"},
		{"exec --key a --kill-after -1s -- true", "--kill-after -1s: must not be negative"},
		{"exec --key a --conflict-exit-code -1 -- true", "--conflict-exit-code -1: must not be negative"},
		{"exec --key a --wait soon -- true", "--wait"},
		{"exec --key a --kill-after=-1s -- true", "must not be negative"},
		{"exec --key a --conflict-exit-code 256 -- true", "from 0 to 255"},
		{"exec --key a --conflict-exit-code=-1 -- true", "from 0 to 255"},
		{"migrate", `expected one of "up"`},
		{"migrate up", "--dir"},
		{"migrate up --dir . --wait 0s", "must be positive"},
		{"migrate up-to --dir .", "<version>"},
		{"migrate up-to x --dir .", "<version>"},
		{"migrate up-to -1 --dir .", "a version is at least 1"},
		{"migrate up --dir not-there", "not-there"},
		{"migrate status --dir main.go", "main.go is not a folder"},
		{"bench", "DBLOCK_DSN"},
		{"bench --duration 0s", "must be positive"},
		{"bench --duration -1s", "--duration -1s: must not be negative"},
		{"bench --duration soon", "--duration"},
		{"bench --goroutines 0", "from 1 to 1000"},
		{"bench --goroutines 16,1001", "--goroutines 1001: must be from 1 to 1000"},
		{"bench --goroutines some", "--goroutines"},
		{"bench --keys 1001", "--keys 1001: must be from 1 to 1000"},
		{"bench --keys=-1", "from 1 to 1000"},
		{"bench fast", "unexpected argument fast"},
		{"hash", "<key>"},
		{"hash /", "must not be empty"},
	} {
		term := run(t, nil, exitUsage, strings.Fields(test.args)...)
		if !strings.Contains(term.err.String(), test.want) {
			t.Errorf("dblock %s: %q does not say %q", test.args, &term.err, test.want)
		}
		if term.out.Len() > 0 {
			t.Errorf("dblock %s: on stdout: %s", test.args, &term.out)
		}
	}
}

func TestHelpAndVersionSucceed(t *testing.T) {
	for args, want := range map[string]string{
		"--help":            "75       not acquired",
		"exec --help":       "SIGTERM",
		"migrate up --help": "--dir",
		"bench --help":      "2.02 round trips",
		"hash --help":       `NewKey("account", "42")`,
		"--version":         "dblock ",
	} {
		if term := run(t, nil, 0, strings.Fields(args)...); !strings.Contains(term.out.String(), want) {
			t.Errorf("dblock %s does not say %q:\n%s", args, want, &term.out)
		}
	}
}

func TestDSN(t *testing.T) {
	const fromFlag, fromEnv = "postgres://flag", "postgres://environment"
	for _, test := range []struct {
		args, want string
	}{
		{"ls", fromEnv},
		{"ls --dsn " + fromFlag, fromFlag},
		{"ls --dsn=" + fromFlag, fromFlag},
		{"--dsn " + fromFlag + " ls", fromFlag},
		{"--dsn=" + fromFlag + " ls", fromFlag},
		{"--dsn " + fromFlag + " exec --key a -- true", fromFlag},
		{"exec --dsn " + fromFlag + " --key a -- true", fromFlag},
		{"exec --key a true --dsn postgres://argument", fromEnv},
		{"exec --key a -- true --dsn postgres://argument", fromEnv},
	} {
		term := newTerminal(nil, "DBLOCK_DSN="+fromEnv)
		var got string
		term.open = func(_ context.Context, dsn string, _ bool) (dblock.DB, error) {
			got = dsn
			return newFakeDB(), nil
		}
		if code := term.main(t.Context(), strings.Fields(test.args)); code != 0 || got != test.want {
			t.Errorf("dblock %s: exit code %d, opened %q, want %q; %s", test.args, code, got, test.want, &term.err)
		}
	}
}

func TestBadDSN(t *testing.T) {
	for dsn, want := range map[string]string{
		"oracle://me:secret@host/db":     "oracle://",
		"me:secret@tcp(host)/db":         "not a URL",
		"host=here password=secret":      "not a URL",
		"me:secret@x://host":             "not a URL",
		"://secret":                      "not a URL",
		"postgres:secret":                "not a URL",
		"postgres+secret x://me@host/db": "not a URL",
	} {
		_, err := openDatabase(t.Context(), dsn, false)
		var exit *exitError
		if !errors.As(err, &exit) || exit.code != exitUsage {
			t.Errorf("%s: %v is no usage error", dsn, err)
			continue
		}
		if !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v; want %q and no password", dsn, err, want)
		}
	}
}

func TestUsageErrorsHaveNoPassword(t *testing.T) {
	for _, args := range []string{
		"postgres://me:secret@host/db ls",
		"ls postgres://me:secret@host/db",
		"ls me:secret@tcp(host)/db",
		"ls --dns=postgres://me:sec:secret@host/db",
		"migrate up-to postgres://me:secret@host --dir .",
	} {
		term := run(t, nil, exitUsage, strings.Fields(args)...)
		if strings.Contains(term.err.String(), "secret") {
			t.Errorf("dblock %s: %s", args, &term.err)
		}
	}
}

func TestExitCode(t *testing.T) {
	signalled, cancel := context.WithCancelCause(t.Context())
	cancel(signalError{syscall.SIGTERM})
	for _, test := range []struct {
		ctx  context.Context
		err  error
		want int
	}{
		{t.Context(), nil, 0},
		{t.Context(), errors.New("x"), 1},
		{t.Context(), fmt.Errorf("x: %w", dblock.ErrInvalidOption), 2},
		{t.Context(), fmt.Errorf("x: %w", dblock.ErrInvalidKey), 2},
		{t.Context(), fmt.Errorf("x: %w", &exitError{code: 77}), 77},
		{signalled, nil, 0},
		{signalled, dblock.ErrCanceled, 128 + 15},
		{signalled, &exitError{code: 7}, 7},
	} {
		if got := exitCode(test.ctx, test.err); got != test.want {
			t.Errorf("%v: exit code %d, want %d", test.err, got, test.want)
		}
	}
}

func TestErrorsTakeOneLine(t *testing.T) {
	err := fmt.Errorf("dblock: open: %w", errors.Join(errors.New("first\n\tand"), fmt.Errorf("second: %w", errors.New("dblock: third"))))
	if got, want := errorText(err), "open: first and second: third"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
