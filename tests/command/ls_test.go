//go:build unix

package command_test

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/tests/servers"
)

type listed struct {
	Key         string
	ID          *int64
	Mode        string
	State       string
	Session     int64
	Application string
	Since       *time.Time
}

func ls(t *testing.T, d *database) []listed {
	t.Helper()
	stdout, _ := run(t, d.dsn, 0, "ls", "--json")
	var all []listed
	if err := json.Unmarshal([]byte(stdout), &all); err != nil || all == nil {
		t.Fatalf("%v in %q", err, stdout)
	}
	return all
}

func TestLsShowsHolderAndWaiter(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		key := dblock.NewKey("report", "2026")
		name := key.Name(d.name(t))
		if d.kind == servers.KindPostgres {
			name = strconv.FormatInt(key.ID(), 10)
			// A server that knows names shares them among its databases.
			if got := ls(t, d); len(got) > 0 {
				t.Errorf("nobody holds anything: %+v", got)
			}
		}
		holder := hold(t, d.dsn, "report/2026")
		waiter := start(t, d.dsn, "exec", "--key", "report/2026", "--", "true")
		eventually(t, "somebody waits", func() bool { return d.waiting(t) == 1 })

		var got []listed
		for _, l := range ls(t, d) {
			if l.Key == name {
				got = append(got, l)
			}
		}
		if len(got) != 2 {
			t.Fatalf("%d lines for %s: %+v", len(got), name, got)
		}
		for i, state := range []string{"held", "waiting"} {
			l := got[i]
			if l.State != state || l.Mode != "exclusive" || l.Session == 0 {
				t.Errorf("%+v", l)
			}
			if byID := l.ID != nil; byID != (d.kind == servers.KindPostgres) || byID && *l.ID != key.ID() {
				t.Errorf("id %v, want %d", l.ID, key.ID())
			}
		}
		if session := d.session(t, key); got[0].Session != session {
			t.Errorf("held by session %d, want %d", got[0].Session, session)
		}
		if got[0].Session == got[1].Session {
			t.Error("holder and waiter are one session")
		}
		if want := "dblock exec sh"; d.kind == servers.KindPostgres && got[0].Application != want {
			t.Errorf("application %q, want %q", got[0].Application, want)
		}
		if table, _ := run(t, d.dsn, 0, "ls"); !strings.HasPrefix(table, "KEY ") || !strings.Contains(table, name) {
			t.Errorf("table:\n%s", table)
		}
		holder.release()
		waiter.exit(0)
	})
}

func TestLsNeedsAPrivilege(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		if d.kind == servers.KindPostgres {
			t.Skip("everybody may see the locks")
		}
		stdout, stderr := run(t, d.user(t), 1, "ls", "--json")
		if stdout != "" || !strings.Contains(stderr, "GRANT ") {
			t.Errorf("stdout %q, stderr %q", stdout, stderr)
		}
	})
}
