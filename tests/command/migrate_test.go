//go:build unix

package command_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func migrate(args ...string) []string {
	return append(append([]string{"migrate"}, args...), "--dir", "testdata")
}

func TestMigrateFromManyProcesses(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		var all []*process
		for range 10 {
			all = append(all, start(t, d.dsn, migrate("up", "--json")...))
		}
		var applied []int64
		for _, p := range all {
			p.exit(0)
			var results []struct {
				Version   int64
				File      string
				Direction string
				Seconds   *float64
			}
			if err := json.Unmarshal([]byte(p.stdout.all(t)), &results); err != nil {
				t.Fatalf("%v in %s", err, p.stdout.seen())
			}
			for _, r := range results {
				applied = append(applied, r.Version)
				if r.Direction != "up" || r.Seconds == nil || !strings.HasSuffix(r.File, ".sql") {
					t.Errorf("%+v", r)
				}
			}
		}
		slices.Sort(applied)
		if want := []int64{1, 2, 3}; !slices.Equal(applied, want) {
			t.Errorf("applied %v, want %v", applied, want)
		}
		var balance, rows int
		d.query(t, &balance, "SELECT balance FROM accounts WHERE id = 1")
		d.query(t, &rows, "SELECT count(*) FROM goose_db_version WHERE version_id > 0")
		if balance != 101 || rows != 3 {
			t.Errorf("balance %d, want 101; %d rows in the version table, want 3", balance, rows)
		}
	})
}

func TestMigrateUpAndDown(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		version := func(want string) {
			t.Helper()
			if stdout, _ := run(t, d.dsn, 0, migrate("version")...); stdout != want {
				t.Errorf("version %q, want %q", stdout, want)
			}
		}
		version("0")
		run(t, d.dsn, 0, migrate("up-to", "2")...)
		version("2")
		if stdout, _ := run(t, d.dsn, 0, migrate("status")...); strings.Count(stdout, "applied") != 2 || strings.Count(stdout, "pending") != 1 {
			t.Errorf("status:\n%s", stdout)
		}
		stdout, _ := run(t, d.dsn, 0, migrate("up")...)
		if !strings.Contains(stdout, "00003_transfers.sql") || strings.Contains(stdout, "00002") {
			t.Errorf("up:\n%s", stdout)
		}
		if stdout, _ := run(t, d.dsn, 0, migrate("up")...); stdout != "nothing to do" {
			t.Errorf("up again:\n%s", stdout)
		}
		if stdout, _ := run(t, d.dsn, 0, migrate("up", "--json")...); stdout != "[]" {
			t.Errorf("up again: %q", stdout)
		}
		if stdout, _ := run(t, d.dsn, 0, migrate("down")...); !strings.Contains(stdout, "00003_transfers.sql") {
			t.Errorf("down:\n%s", stdout)
		}
		if stdout, _ := run(t, d.dsn, 0, migrate("version", "--json")...); strings.Join(strings.Fields(stdout), "") != `{"version":2}` {
			t.Errorf("version: %s", stdout)
		}

		stdout, _ = run(t, d.dsn, 0, migrate("status", "--json")...)
		var status []struct {
			Version   int64
			File      string
			State     string
			AppliedAt *time.Time `json:"applied_at"`
		}
		if err := json.Unmarshal([]byte(stdout), &status); err != nil || len(status) != 3 {
			t.Fatalf("%v in %s", err, stdout)
		}
		for i, m := range status {
			applied := i < 2
			if m.Version != int64(i+1) || (m.State == "applied") != applied || (m.AppliedAt != nil) != applied {
				t.Errorf("%+v", m)
			}
		}

		run(t, d.dsn, 0, migrate("version", "--table", "other_version")...)
		if stdout, _ := run(t, d.dsn, 0, migrate("version", "--table", "other_version")...); stdout != "0" {
			t.Errorf("another table: version %s", stdout)
		}
	})
}

func TestMigrateWaits(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		// The guard is an advisory lock like any other.
		migrator := hold(t, d.dsn, "migrations/goose_db_version")
		stdout, stderr := run(t, d.dsn, 75, migrate("up", "--wait", "200ms")...)
		if stdout != "" || !strings.Contains(stderr, "migrations/goose_db_version") {
			t.Errorf("stdout %q, stderr %q", stdout, stderr)
		}
		waiter := start(t, d.dsn, migrate("up")...)
		waiter.stderr.expect(t, "waiting for migrations/goose_db_version")
		migrator.release()
		waiter.exit(0)
		waiter.stdout.expect(t, "00003_transfers.sql")
	})
}

func TestMigrateBadFolders(t *testing.T) {
	d := onPostgres(t)
	folder := t.TempDir()
	file := filepath.Join(folder, "00001_bad.sql")
	for _, test := range []struct {
		dir, want string
		code      int
		prepare   func()
	}{
		{dir: filepath.Join(folder, "not-there"), want: "not-there", code: 2},
		{dir: folder, want: "00001_name.sql", code: 1},
		{dir: file, want: "not a folder", code: 2, prepare: func() { write(t, file, "-- +goose Up\nSELECT 1;\nNO SUCH STATEMENT;\n") }},
		{dir: folder, want: "00001_bad.sql", code: 1},
	} {
		if test.prepare != nil {
			test.prepare()
		}
		stdout, stderr := run(t, d.dsn, test.code, "migrate", "up", "--dir", test.dir)
		if stdout != "" || !strings.Contains(stderr, test.want) || strings.Contains(stderr, "\n") {
			t.Errorf("%s: stdout %q, stderr %q; want %q", test.dir, stdout, stderr, test.want)
		}
		if stdout, _ := run(t, d.dsn, test.code, "migrate", "up", "--json", "--dir", test.dir); stdout != "[]" {
			t.Errorf("%s: as JSON %q, want []", test.dir, stdout)
		}
	}
}

// What was applied before a failure is told with it.
func TestMigrateFailsHalfway(t *testing.T) {
	d := onPostgres(t)
	folder := t.TempDir()
	write(t, filepath.Join(folder, "00001_good.sql"), "-- +goose Up\nCREATE TABLE good (id int);\n")
	write(t, filepath.Join(folder, "00002_bad.sql"), "-- +goose Up\nNO SUCH STATEMENT;\n")
	stdout, stderr := run(t, d.dsn, 1, "migrate", "up", "--dir", folder)
	if !strings.Contains(stdout, "00001_good.sql") || strings.Contains(stdout, "bad") || !strings.Contains(stderr, "00002_bad.sql") {
		t.Errorf("stdout %q, stderr %q", stdout, stderr)
	}
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
