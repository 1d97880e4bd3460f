package mysql_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
)

func TestInspectShowsHoldersAndWaiters(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		for name, dsn := range map[string]string{"administrator": e.dsn, "plain user": e.server.User(t, e.dsn)} {
			t.Run(name, func(t *testing.T) {
				privileged := name == "administrator"
				db, err := mysql.Open(e.ctx, dsn)
				if err != nil {
					t.Fatal(err)
				}
				defer db.Close()
				scope := db.Features().Scope
				a, b := key("inspect-a/"+scope, 1), key("inspect-b/"+scope, 2)
				app := dialect.SessionOptions{Application: "it's \\ mine"}
				holder, waiter := e.session(t, db, app), e.session(t, db, app)
				if err := acquire(holder, e.ctx, false, a, b); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(e.ctx)
				result := make(chan error, 1)
				go func() { result <- acquire(waiter, ctx, false, a) }()
				e.awaitStatement(t, waiter.ID(), "SELECT GET_LOCK%", 0)
				e.await(t, "it waits", fmt.Sprintf("SELECT COUNT(*) FROM information_schema.processlist WHERE id = %d AND state = 'User lock'", waiter.ID()))

				found, err := db.Inspect(e.ctx, a)
				if err != nil {
					t.Fatal(err)
				}
				if len(found) != 2 {
					t.Fatalf("found %+v", found)
				}
				u, _ := url.Parse(dsn)
				application := "dblock" // the name of all connections, from their attributes
				if privileged && !e.mariadb() {
					application = app.Application
				} else if e.mariadb() {
					application = "" // without performance_schema
				}
				for i, h := range found {
					want := dialect.Holding{Name: a.Name, Session: holder.ID(), State: "idle", User: u.User.Username(), Application: application}
					if i == 1 {
						want.Waiting, want.Session, want.State = true, waiter.ID(), "User lock"
						if age := time.Since(h.Since); age < 0 || age > time.Minute {
							t.Errorf("waits since %v", h.Since)
						}
					}
					h.Since = time.Time{}
					if h != want {
						t.Errorf("got %+v, want %+v", h, want)
					}
				}
				all, err := db.Inspect(e.ctx)
				switch {
				case !privileged:
					if refused := wantClass(t, err, dialect.Denied); !strings.Contains(refused.Hint, "GRANT") {
						t.Errorf("%v", err)
					}
				case err != nil:
					t.Fatal(err)
				default:
					names := map[string]int{}
					for _, h := range all {
						names[h.Name]++
					}
					if names[a.Name] != 2 || names[b.Name] != 1 {
						t.Errorf("all: %v", names)
					}
				}
				cancel()
				wantClass(t, <-result, dialect.Canceled)
				if err := waiter.Close(); err != nil {
					t.Fatal(err)
				}
				e.awaitGone(t, waiter.ID())
				if found, err := db.Inspect(e.ctx, a, b); err != nil || len(found) != 2 || found[0].Waiting || found[1].Waiting {
					t.Errorf("after the waiter has gone: %+v, %v", found, err)
				}
			})
		}
	})
}

func TestInspectLeavesProbesOut(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		s := e.session(t, db, dialect.SessionOptions{})
		probe, own := key("dblock/probe#"+db.Features().Scope, 1), key("no-probe/"+db.Features().Scope, 2)
		if err := acquire(s, e.ctx, true, probe, own); err != nil {
			t.Fatal(err)
		}
		all, err := db.Inspect(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		names := map[string]bool{}
		for _, h := range all {
			names[h.Name] = true
		}
		if names[probe.Name] || !names[own.Name] {
			t.Errorf("all: %v", names)
		}
		if found, err := db.Inspect(e.ctx, probe); err != nil || len(found) != 1 {
			t.Errorf("of a given key: %+v, %v", found, err)
		}
	})
}

func TestInspectNamesWhatTheServerLacks(t *testing.T) {
	eachPrivate(t, func(t *testing.T, e *env) {
		lacks, hint := "UPDATE performance_schema.setup_instruments SET enabled = 'NO' WHERE name = 'wait/lock/metadata/sql/mdl'", "setup_instruments"
		if e.mariadb() {
			lacks, hint = "UNINSTALL SONAME 'metadata_lock_info'", "INSTALL SONAME"
		}
		e.exec(t, e.admin, lacks)
		db := e.open(t)
		_, err := db.Inspect(e.ctx)
		if refused := wantClass(t, err, dialect.Setup); !strings.Contains(refused.Hint, hint) {
			t.Errorf("%v", err)
		}
		s, k := e.session(t, db, dialect.SessionOptions{}), key("lacking", 1)
		if err := acquire(s, e.ctx, false, k); err != nil {
			t.Fatal(err)
		}
		if found, err := db.Inspect(e.ctx, k); err != nil || len(found) != 1 || found[0].Session != s.ID() {
			t.Errorf("of a given key: %+v, %v", found, err)
		}
	})
}
