//go:build unix

package command_test

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/tests/servers"
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

func TestWatchesUntilASignal(t *testing.T) {
	d := onPostgres(t)
	for _, test := range []struct {
		sig  syscall.Signal
		mark string
		args []string
	}{
		{syscall.SIGINT, "postgres at ", []string{"graph", "--watch=50ms"}},
		{syscall.SIGTERM, `"gaps": []`, []string{"graph", "--watch=1ns", "--json"}},
		{syscall.SIGINT, "nobody holds or waits", []string{"ls", "--watch=1ns"}},
		{syscall.SIGTERM, "[]", []string{"ls", "--watch=50ms", "--json"}},
	} {
		p := start(t, d.dsn, test.args...)
		for range 3 {
			p.stdout.expect(t, test.mark)
		}
		p.signal(test.sig)
		p.exit(128 + int(test.sig))
		if stderr := p.stderr.all(t); stderr != "" {
			t.Errorf("%v: stderr %q", test.args, stderr)
		}
		lines := strings.Split(p.stdout.all(t), "\n")
		if last := lines[len(lines)-1]; slices.Contains(test.args, "--json") && last != "}" && last != "[]" {
			t.Errorf("%v: ends with %q", test.args, last)
		}
	}
}

func TestASignalEndsWatchingWhereNobodyReads(t *testing.T) {
	d := onPostgres(t)
	for _, name := range []string{"graph", "ls"} {
		_, full := pipe(t)
		if err := full.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := full.Write(make([]byte, 1<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
		p := &process{t: t, cmd: command(t, d.dsn, name, "--watch"), ended: make(chan struct{})}
		p.cmd.Stdout = full
		p.run(strings.NewReader(""), strings.NewReader(""))
		eventually(t, "it has looked", func() bool {
			var n int
			d.query(t, &n, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle' AND query LIKE '%pg_locks%' AND pid <> pg_backend_pid()")
			return n > 0
		})
		p.signal(syscall.SIGTERM)
		p.exit(128 + int(syscall.SIGTERM))
	}
}

// It is when something is wrong that somebody watches.
func TestWatchesAServerThatGoesAndComesBack(t *testing.T) {
	for _, kind := range []servers.Kind{servers.KindPostgres, servers.KindMySQL, servers.KindMariaDB} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := servers.Start(t, kind)
			p := start(t, s.DSN(), "graph", "--watch=20ms")
			p.stdout.expect(t, " at ")
			s.Kill(t)
			p.stderr.expect(t, "dblock: inspect on "+string(kind)+": ")
			s.Restart(t)
			for len(p.stdout.more) > 0 {
				<-p.stdout.more // what it saw before
			}
			p.stdout.expect(t, " at ")
			if kind != servers.KindPostgres { // of which only the process that makes new ones would stop
				s.Signal(t, syscall.SIGSTOP)
				defer s.Signal(t, syscall.SIGCONT)
			}
			p.signal(syscall.SIGTERM)
			p.exit(128 + int(syscall.SIGTERM))
		})
	}
}
