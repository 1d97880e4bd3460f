// Package lookalikes_test shows what dblock does with servers that speak a
// database's protocol but do not lock as it does. They are stubs that say just
// enough: what they are asked before they are refused. Each is one faithful stub
// with a single difference, and the faithful one is accepted.
package lookalikes_test

import (
	"context"
	"net"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/dblock-go/dblock/dialect"
)

// listener serves a stub's connections until the test ends.
type listener struct {
	address string
	mu      sync.Mutex
	seen    []string
}

func serve(t *testing.T, connection func(id int, c net.Conn)) *listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for c := range open {
			c.Close()
		}
		mu.Unlock()
		serving.Wait()
	})
	serving.Go(func() {
		for id := 1; ; id++ {
			c, err := l.Accept()
			if err != nil { // closed
				return
			}
			mu.Lock()
			open[c] = true
			mu.Unlock()
			serving.Go(func() {
				defer c.Close()
				connection(id, c)
			})
		}
	})
	return &listener{address: l.Addr().String()}
}

func (l *listener) record(statement string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = append(l.seen, statement)
}

// harmless are statements that change nothing, in no later session either.
var harmless = regexp.MustCompile(`^(SELECT|SHOW|WITH) |^(BEGIN|ROLLBACK)$|^-- ping$`)

func (l *listener) wantNothingChanged(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.seen) == 0 {
		t.Error("the stub was asked nothing")
	}
	for _, statement := range l.seen {
		if !harmless.MatchString(statement) || strings.Contains(strings.ToLower(statement), "set_config") {
			t.Errorf("before it was refused the server got %q", statement)
		}
	}
}

// wantRefused expects a refusal in words that name what is wrong and the way out,
// and the same words from Diagnose.
func wantRefused(t *testing.T, l *listener, open func(ctx context.Context, allowUnsafe bool) (dialect.DB, error), class dialect.Class, names string) {
	t.Helper()
	_, err := open(t.Context(), false)
	if dialect.ClassOf(err) != class {
		t.Fatalf("error %v, want class %q", err, class)
	}
	l.wantNothingChanged(t)
	if !strings.Contains(err.Error(), names) {
		t.Errorf("%v does not say %q", err, names)
	}
	db, allowed := open(t.Context(), true)
	if allowed != nil {
		t.Fatalf("allowed: %v", allowed)
	}
	defer db.Close()
	found, diagnosis := db.Diagnose(t.Context())
	if diagnosis != nil {
		t.Fatal(diagnosis)
	}
	l.wantNothingChanged(t)
	refusal := dialect.Refusal(err)
	for _, f := range found {
		if f.Level == dialect.Danger {
			if varies.ReplaceAllString(f.Text, "") != varies.ReplaceAllString(refusal.Text, "") || f.Advice != refusal.Advice {
				t.Errorf("Diagnose says %+v, the constructor %v", f, err)
			}
			return
		}
	}
	t.Errorf("nothing is unsafe in %+v", found)
}

// varies from one look to the next: the probe's key, and the sessions' numbers.
var varies = regexp.MustCompile(`dblock/probe#[a-z0-9]+|[0-9]+`)

// wantAccepted expects that a server opens, and that Diagnose agrees.
func wantAccepted(t *testing.T, l *listener, open func(ctx context.Context, allowUnsafe bool) (dialect.DB, error)) {
	t.Helper()
	db, err := open(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	found, err := db.Diagnose(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l.wantNothingChanged(t)
	for _, f := range found {
		if f.Level == dialect.Danger {
			t.Errorf("unsafe: %+v", f)
		}
	}
}
