//go:build unix

package command_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/dblock-go/dblock/tests/servers"
)

type found struct{ Check, Level, Text, Advice string }

// doctor returns what doctor finds, by the checks' names.
func doctor(t *testing.T, dsn string, code int) map[string]found {
	t.Helper()
	stdout, stderr := run(t, dsn, code, "doctor", "--json")
	if (stderr != "") != (code != 0) || strings.Contains(stderr, "\n") {
		t.Errorf("stderr %q", stderr)
	}
	var all []found
	if err := json.Unmarshal([]byte(stdout), &all); err != nil {
		t.Fatalf("%v in %q", err, stdout)
	}
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	if password, ok := u.User.Password(); ok && strings.Contains(stdout+stderr, password) {
		t.Errorf("the password is in\n%s\n%s", stdout, stderr)
	}
	worst := []string{"unsafe", "warning", "notice", "ok"}
	if !slices.IsSortedFunc(all, func(x, y found) int { return slices.Index(worst, x.Level) - slices.Index(worst, y.Level) }) {
		t.Errorf("not the worst first: %v", all)
	}
	byName := map[string]found{}
	for _, f := range all {
		if strings.Contains(f.Text, "could not be looked at") {
			t.Errorf("%+v", f)
		}
		if f.Level == "ok" != (f.Level != "unsafe" && f.Level != "warning" && f.Level != "notice") || f.Text == "" || strings.ContainsAny(f.Text+f.Advice, "\n\t") {
			t.Errorf("%+v", f)
		}
		if _, twice := byName[f.Check]; twice {
			t.Errorf("%s is found twice: %+v", f.Check, all)
		}
		byName[f.Check] = f
	}
	return byName
}

func wantFound(t *testing.T, found map[string]found, check, level, text string) {
	t.Helper()
	f, ok := found[check]
	if !ok || f.Level != level || !strings.Contains(f.Text+" → "+f.Advice, text) {
		t.Errorf("%s: %+v, want %s and %q", check, f, level, text)
	}
}

func TestDoctorOfAnOrdinaryServer(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		product := map[servers.Kind]string{servers.KindPostgres: "PostgreSQL ", servers.KindMySQL: "MySQL ", servers.KindMariaDB: "MariaDB ", servers.KindSQLServer: "SQL Server "}[d.kind]
		before := doctor(t, d.dsn, 0)
		wantFound(t, before, "server", "ok", product)
		wantFound(t, before, "primary", "ok", "yes")
		wantFound(t, before, "locks", "ok", "kept the other out")
		wantFound(t, before, "lock table", "notice", "dblock setup")
		wantFound(t, before, "once table", "notice", "rowlock.Once")
		wantFound(t, before, "privileges", "ok", "shown")
		if d.kind != servers.KindSQLServer {
			wantFound(t, before, "connections", "ok", "are in use")
			// The tests' servers are set up to forget what a crash of the machine would cost.
			wantFound(t, before, "durability", "warning", "fencing numbers")
		}
		run(t, d.dsn, 0, "setup", "--table", "locks") // as an older version did
		wantFound(t, doctor(t, d.dsn, 0), "once table", "notice", "dblock setup")
		run(t, d.dsn, 0, "setup")
		for _, table := range []string{"lock table", "once table"} {
			wantFound(t, doctor(t, d.dsn, 0), table, "ok", "there")
		}
		table, _ := run(t, d.dsn, 0, "doctor")
		if !strings.HasPrefix(table, "LEVEL ") || !strings.Contains(table, product) {
			t.Errorf("table:\n%s", table)
		}
		t.Logf("\n%s", table)
	})
}

func TestDoctorOfOneWhoMayOnlyConnect(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		run(t, d.dsn, 0, "setup")
		dsn := d.user(t)
		found := doctor(t, dsn, 0)
		wantFound(t, found, "locks", "ok", "kept the other out")
		wantFound(t, found, "privileges", "notice", "GRANT ")
		switch d.kind {
		case servers.KindPostgres:
			wantFound(t, found, "lock table", "warning", "GRANT SELECT, INSERT, UPDATE ON locks")
		case servers.KindMySQL, servers.KindMariaDB: // there it may also read
			wantFound(t, found, "once table", "warning", "GRANT INSERT, UPDATE ON once")
		}
	})
}

func TestDoctorOfOneWhoMayLockButNotClean(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		run(t, d.dsn, 0, "setup")
		dsn := d.user(t)
		u, err := url.Parse(dsn)
		if err != nil {
			t.Fatal(err)
		}
		d.exec(t, "GRANT SELECT, INSERT, UPDATE ON locks TO "+u.User.Username())
		d.exec(t, "GRANT SELECT, INSERT, UPDATE, DELETE ON once TO "+u.User.Username())
		found := doctor(t, dsn, 0)
		wantFound(t, found, "lock table", "notice", "GRANT DELETE ON locks")
		wantFound(t, found, "once table", "ok", "privileges")
	})
}

func TestDoctorOfADatabaseWithTimeouts(t *testing.T) {
	d := onPostgres(t)
	d.exec(t, fmt.Sprintf("ALTER DATABASE %s SET statement_timeout = '90s'", d.name(t)))
	d.exec(t, fmt.Sprintf("ALTER DATABASE %s SET default_transaction_isolation = 'repeatable read'", d.name(t)))
	d.exec(t, fmt.Sprintf("ALTER DATABASE %s SET default_transaction_read_only = on", d.name(t)))
	found := doctor(t, d.dsn, 0)
	wantFound(t, found, "timeouts", "notice", "statement_timeout = 90s")
	wantFound(t, found, "isolation", "notice", "older than the lock")
	wantFound(t, found, "read-only", "warning", "READ WRITE")
}

func TestDoctorBehindAPooler(t *testing.T) {
	t.Parallel()
	for mode, level := range map[string]string{"transaction": "unsafe", "statement": "unsafe", "session": "notice"} {
		dsn := servers.PgBouncer(t, servers.Postgres(t), mode).Database(t)
		code := map[string]int{"unsafe": 1, "notice": 0}[level]
		found := doctor(t, dsn, code)
		wantFound(t, found, "pooler", level, "session mode")
		wantFound(t, found, "primary", "ok", "yes")
		if _, tried := found["locks"]; tried != (code == 0) {
			t.Errorf("%s: %+v; a lock in a shared session could leak", mode, found)
		}
		table, _ := run(t, dsn, code, "doctor")
		t.Logf("%s:\n%s", mode, table)
	}
}

func TestDoctorOfAStandbyAndItsPrimary(t *testing.T) {
	t.Parallel()
	primary := servers.Start(t, servers.KindPostgres)
	standby := servers.Standby(t, primary)
	found := doctor(t, standby.DSN(), 1)
	wantFound(t, found, "primary", "unsafe", "connect to the primary")
	wantFound(t, found, "pooler", "ok", "none")
	for _, dsn := range []string{primary.DSN(), primary.User(t, primary.DSN())} {
		wantFound(t, doctor(t, dsn, 0), "failover", "notice", "standbys: 1")
	}
}

func TestDoctorOfAReadOnlyServer(t *testing.T) {
	for _, kind := range []servers.Kind{servers.KindMySQL, servers.KindMariaDB} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := servers.Start(t, kind, "read-only=1", "log-bin=binlog")
			found := doctor(t, s.DSN(), 1)
			wantFound(t, found, "primary", "unsafe", "read_only = ON")
			wantFound(t, found, "locks", "ok", "kept the other out")
			wantFound(t, found, "failover", "ok", "no replica")
			user := doctor(t, s.User(t, s.DSN()), 1)
			wantFound(t, user, "failover", "notice", "not shown to this user")
			table, _ := run(t, s.DSN(), 1, "doctor")
			t.Logf("\n%s", table)
		})
	}
}

func TestDoctorWithoutAServer(t *testing.T) {
	for dsn, code := range map[string]int{
		"postgres://me:secret@" + closedPort(t) + "/db": 1,
		"mysql://me:secret@" + closedPort(t) + "/db":    1,
		"oracle://me:secret@host/db":                    2,
	} {
		stdout, stderr := run(t, dsn, code, "doctor")
		if stdout != "" || stderr == "" || strings.Contains(stderr, "secret") || strings.Contains(stderr, "\n") {
			t.Errorf("%s: stdout %q, stderr %q", dsn, stdout, stderr)
		}
	}
}
