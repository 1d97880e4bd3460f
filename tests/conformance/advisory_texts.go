package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

// advisoryTexts compares the whole text of each common error, as an operator reads
// it, with testdata/errors. DBLOCK_UPDATE_TEXTS=1 writes these files anew: read
// them then.
func advisoryTexts(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("report", "2026-11")
	var text strings.Builder
	show := func(what string, err error, class error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: no error", what)
			return
		}
		var ofDblock *dblock.Error
		var ofDialect *dialect.Error
		if !errors.Is(err, class) || !errors.As(err, &ofDblock) || !errors.As(err, &ofDialect) {
			t.Errorf("%s: %v leads to %v and %v, want %v", what, err, ofDblock, ofDialect, class)
		}
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: more than one line: %q", what, err)
		}
		fmt.Fprintf(&text, "%s:\n\t%s\n", what, withoutNumbers(err.Error()))
	}

	l := newLocker(t, d.DB, &advisory.Options{Application: "night shift"})
	limited := newLocker(t, d.Open(t), &advisory.Options{WaitLimit: 200 * time.Millisecond})
	others := newLocker(t, d.Open(t))
	lock := mustLock(t, l, key)

	_, err := others.TryLock(testContext(t), dblock.NewKey("another"), key)
	show("a try", err, dblock.ErrNotAcquired)
	_, err = limited.Lock(testContext(t), key)
	show("a wait limit", err, dblock.ErrTimeout)
	ctx, cancel := context.WithTimeout(testContext(t), 200*time.Millisecond)
	_, err = others.Lock(ctx, key)
	cancel()
	show("a deadline", err, dblock.ErrTimeout)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a deadline: %v", err)
	}
	ctx, cancel = context.WithCancel(testContext(t))
	failed := make(chan error, 1)
	go func() {
		_, err := others.Lock(ctx, key)
		failed <- err
	}()
	d.waiting(t, key, 1)
	cancel()
	err = <-failed
	show("a cancelled wait", err, dblock.ErrCanceled)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled wait: %v", err)
	}
	if h.Interrupt != "" {
		go func() {
			_, err := others.Lock(testContext(t), key)
			failed <- err
		}()
		d.waiting(t, key, 1)
		d.exec(t, fmt.Sprintf(h.Interrupt, d.waiter(t, key)))
		show("a wait that an administrator cancelled", <-failed, dblock.ErrCanceled)
	}

	_, err = newLocker(t, d.DB, &advisory.Options{Fencing: true}).Lock(testContext(t), dblock.NewKey("fenced"))
	show("fencing without its table", err, dblock.ErrSetup)
	if h.OfDriver != nil && !h.OfDriver(err) {
		t.Errorf("fencing without its table: %v does not lead to the driver's error", err)
	}
	_, err = l.Lock(testContext(t), dblock.NewKey(""))
	show("an empty key", err, dblock.ErrInvalidKey)
	if !d.DB.Features().Shared {
		_, err = l.Lock(testContext(t), key.Shared())
		show("a shared key", err, dblock.ErrUnsupported)
	}
	tx := d.Begin(t, nil)
	if d.DB.Features().Transaction {
		show("a try in a transaction", others.TryLockTx(testContext(t), tx, key), dblock.ErrNotAcquired)
		show("a wait limit in a transaction", limited.LockTx(testContext(t), tx, key), dblock.ErrTimeout)
	} else {
		show("a lock in a transaction", others.LockTx(testContext(t), tx, key), dblock.ErrUnsupported)
	}

	d.kill(t, d.holder(t, key))
	<-lock.Done()
	show("a killed session", lock.Err(), dblock.ErrLost)
	show("its release", lock.Release(testContext(t)), dblock.ErrLost)
	var late error
	for range 20 { // mostly the release is quicker than the holder's own listening
		lock = mustLock(t, l, key)
		d.kill(t, d.holder(t, key))
		if late = lock.Release(testContext(t)); late != nil && !strings.HasPrefix(late.Error(), "dblock: hold ") {
			break
		}
	}
	show("the release of a session that was just killed", late, dblock.ErrLost)

	closed := newLocker(t, d.DB)
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = closed.Lock(testContext(t), key)
	show("a locker that was closed", err, dblock.ErrClosed)

	root, _, _ := strings.Cut(t.Name(), "/")
	name := filepath.Join("testdata", "errors", root+".txt")
	if os.Getenv("DBLOCK_UPDATE_TEXTS") != "" {
		if err := os.WriteFile(name, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if got := text.String(); got != string(want) {
		t.Errorf("the texts are now:\n%s\nand not, as in %s:\n%s", got, name, want)
	}
}

var numbers = []struct {
	found *regexp.Regexp
	shown string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:]+Z`), "TIME"},
	{regexp.MustCompile(`\b(\d+(\.\d+)?(ns|µs|ms|s|m|h))+\b`), "DURATION"},
	{regexp.MustCompile(`\bt_\w+`), "DATABASE"},
	{regexp.MustCompile(`\b127\.0\.0\.1:\d+`), "ADDRESS"},
	// What lib/pq says of a connection that the server closed depends on who was quicker.
	{regexp.MustCompile(`\b(read|write) tcp ADDRESS->ADDRESS: (read|write): (connection reset by peer|broken pipe)`), "driver: bad connection"},
	{regexp.MustCompile(`\b(session|connection|process|of|user) \d+\b`), "$1 N"},
}

// withoutNumbers replaces what differs from run to run.
func withoutNumbers(text string) string {
	for _, n := range numbers {
		text = n.found.ReplaceAllString(text, n.shown)
	}
	return text
}

// waiter is a session that the server shows as waiting for the key.
func (d *Database) waiter(t testing.TB, key dblock.Key) int64 {
	t.Helper()
	var session int64
	eventually(t, "a waiter for "+key.String(), func() bool {
		found, err := d.holdings(key)
		if err != nil {
			t.Fatalf("inspect: %v", err)
		}
		for _, h := range found {
			if h.Waiting {
				session = h.Session
			}
		}
		return session != 0
	})
	return session
}
