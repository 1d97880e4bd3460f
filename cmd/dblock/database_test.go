package main

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
)

const silentDSN = "mysql://me:secret@db.example/shop"

// deaf opens nothing, and does not end with its context.
func deaf(t *testing.T) *terminal {
	term := newTerminal(nil, "DBLOCK_DSN="+silentDSN)
	ended := make(chan struct{})
	t.Cleanup(func() { close(ended) })
	term.open = func(context.Context, string, bool) (dblock.DB, error) {
		<-ended
		return nil, errors.New("the test has ended")
	}
	return term
}

func TestConnectingIsBounded(t *testing.T) {
	_, err := deaf(t).connect(t.Context(), silentDSN, time.Millisecond, false)
	if !errors.Is(err, dblock.ErrUnavailable) || exitCode(t.Context(), err) != exitFailed {
		t.Fatalf("%v, exit code %d", err, exitCode(t.Context(), err))
	}
	for _, part := range []string{"db.example:3306", "longer than 1ms", "check the host"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q lacks %q", err, part)
		}
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("the password is in %q", err)
	}
}

func TestHowLongConnectingMayTake(t *testing.T) {
	for args, want := range map[string]time.Duration{
		"ls":                                  30 * time.Second,
		"setup":                               30 * time.Second,
		"migrate status --dir .":              30 * time.Second,
		"migrate up --dir .":                  30 * time.Second,
		"migrate up --dir . --wait 3s":        3 * time.Second,
		"demo --dsn " + silentDSN:             30 * time.Second,
		"exec --key a -- go":                  30 * time.Second,
		"exec --key a --try -- go":            30 * time.Second,
		"exec --key a --wait 0 -- go":         30 * time.Second,
		"exec --key a --wait 1ms -- go":       2 * time.Second,
		"exec --key a --wait 5s -- go":        5 * time.Second,
		"exec --key a --wait 2h -- go":        30 * time.Second,
		"exec --key a --wait 2h -- go --wait": 30 * time.Second,
	} {
		term := newTerminal(nil, "DBLOCK_DSN="+silentDSN)
		begin := time.Now()
		asked := false
		term.open = func(ctx context.Context, _ string, _ bool) (dblock.DB, error) {
			asked = true
			deadline, ok := ctx.Deadline()
			if !ok || deadline.Sub(begin) < want || time.Until(deadline) > want {
				t.Errorf("dblock %s: may take until %v (%t), want %v", args, deadline.Sub(begin), ok, want)
			}
			return nil, errors.New("no")
		}
		if code := term.main(t.Context(), strings.Fields(args)); code != exitFailed || !asked {
			t.Errorf("dblock %s: exit code %d, connected %t: %s", args, code, asked, &term.err)
		}
	}
}

func TestSignalWhileConnecting(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(signalError{syscall.SIGTERM})
	_, err := deaf(t).connect(ctx, silentDSN, time.Hour, false)
	if code := exitCode(ctx, err); code != 128+15 {
		t.Errorf("exit code %d", code)
	}
	if got, want := errorText(err), "connecting to db.example:3306: stopped by signal: "+syscall.SIGTERM.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAddress(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://me:secret@host/db":                 "host:5432",
		"postgres://me:secret@[::1]/db":                "[::1]:5432",
		"postgres://me:secret@a:1,b:2/db":              "a:1,b:2",
		"mariadb://me:secret@host:3307/db":             "host:3307",
		"sqlserver://me:secret@host/instance":          "host",
		"sqlserver://me:secret@host:1?database=a":      "host:1",
		"postgres:///db?host=/run":                     "the server",
		"postgres://me:s@secret/x@host/db":             "the server",
		"postgres://me:1/secret@host/db":               "the server",
		"postgres://me:s@secret?x@host/db":             "the server",
		"postgres://me:s@secret#x@host/db":             "the server",
		"postgres://me:secret/x@host/db":               "the server",
		"mysql://me:se%2Fcret@host/db?tls=skip-verify": "host:3306",
	} {
		if got := address(dsn); got != want {
			t.Errorf("%s: %q, want %q", dsn, got, want)
		}
	}
}
