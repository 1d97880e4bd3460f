//go:build unix

package command_test

import (
	"encoding/json"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
)

func TestGraphShowsWhoWaitsForWhom(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		holder := hold(t, d.dsn, "report/2026")
		waiter := start(t, d.dsn, "exec", "--key", "report/2026", "--", "true")
		eventually(t, "somebody waits", func() bool { return d.waiting(t) == 1 })
		session := d.session(t, dblock.NewKey("report", "2026"))

		stdout, _ := run(t, d.dsn, 0, "graph", "--json")
		var s deadlock.Snapshot
		if err := json.Unmarshal([]byte(stdout), &s); err != nil {
			t.Fatalf("%v in %q", err, stdout)
		}
		i := slices.IndexFunc(s.Waits, func(w deadlock.Wait) bool { return w.Blocker == session })
		if i < 0 || !slices.Contains(s.Roots, session) {
			t.Fatalf("waits %+v, roots %v", s.Waits, s.Roots)
		}
		what := s.Waits[i].Describe()
		for format, marks := range map[string][]string{
			"text":    {"waits", "for " + what},
			"dot":     {"digraph locks {", "[label=\"" + what},
			"mermaid": {"flowchart LR", "-->|"},
		} {
			stdout, _ := run(t, d.dsn, 0, "graph", "--format", format)
			for _, mark := range marks {
				if !strings.Contains(stdout, mark) {
					t.Errorf("%s lacks %q:\n%s", format, mark, stdout)
				}
			}
		}
		holder.release()
		waiter.exit(0)
	})
}

func TestGraphOfAUserWhoSeesLittleNamesTheRemedy(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		holder := hold(t, d.dsn, "report/2026")
		stdout, stderr := run(t, d.user(t), 0, "graph")
		if stderr != "" || !strings.Contains(stdout, "not seen: ") || !strings.Contains(stdout, "GRANT ") {
			t.Errorf("stdout %q, stderr %q", stdout, stderr)
		}
		holder.release()
	})
}

func TestGraphWatchesUntilASignal(t *testing.T) {
	d := onPostgres(t)
	p := start(t, d.dsn, "graph", "--watch=50ms")
	for range 3 {
		p.stdout.expect(t, "postgres at ")
	}
	p.signal(syscall.SIGINT)
	p.exit(128 + int(syscall.SIGINT))
	if stderr := p.stderr.all(t); stderr != "" {
		t.Errorf("stderr %q", stderr)
	}
}
