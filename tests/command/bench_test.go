//go:build unix

package command_test

import (
	"encoding/json"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/dblock-go/dblock/tests/servers"
)

type benched struct {
	Database     string
	Rounds       int
	Complete     bool
	Measurements []measured
}

type measured struct {
	Name, Text, Status, Reason string
	RoundTrips                 *spread `json:"round_trips"`
	Microseconds               *spread
}

type spread struct{ Median, Min, Max float64 }

func parseBench(t *testing.T, stdout string) (b benched, lines map[string]measured) {
	t.Helper()
	if err := json.Unmarshal([]byte(stdout), &b); err != nil {
		t.Fatalf("%v in %q", err, stdout)
	}
	lines = map[string]measured{}
	for _, m := range b.Measurements {
		lines[m.Name] = m
		if m.Status == "measured" != (m.RoundTrips != nil) {
			t.Errorf("%+v", m)
		}
		for _, s := range []*spread{m.RoundTrips, m.Microseconds} {
			if s != nil && (s.Min <= 0 || s.Median < s.Min || s.Max < s.Median) {
				t.Errorf("%s: %+v", m.Name, *s)
			}
		}
	}
	return b, lines
}

// bench runs for as short as it can.
func bench(t *testing.T, dsn string, args ...string) (b benched, lines map[string]measured) {
	t.Helper()
	args = append([]string{"bench", "--json", "--duration", "1ms", "--goroutines", "2,8", "--keys", "3,20"}, args...)
	stdout, stderr := run(t, dsn, 0, args...)
	if stderr != "" {
		t.Errorf("stderr %q", stderr)
	}
	return parseBench(t, stdout)
}

// nothingIsLeft of the benchmark: neither a key nor a session that waits for one,
// nor a row.
func nothingIsLeft(t *testing.T, d *database, table string) {
	t.Helper()
	eventually(t, "the server has ended its sessions", func() bool {
		return !slices.ContainsFunc(ls(t, d), func(l listed) bool { return ofBench(d, l) })
	})
	if n := rows(t, d, table); n > 0 {
		t.Errorf("%d rows in the lock table", n)
	}
}

// ofBench: in PostgreSQL, where keys have no names, nobody else uses the database.
func ofBench(d *database, l listed) bool {
	return d.kind == servers.KindPostgres || strings.Contains(l.Key, "dblock_bench")
}

func rows(t *testing.T, d *database, table string) (n int) {
	t.Helper()
	d.query(t, &n, "SELECT count(*) FROM "+table)
	return n
}

func TestBenchMeasuresEverything(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		run(t, d.dsn, 0, "setup", "--table", "other_locks")
		b, lines := bench(t, d.dsn, "--table", "other_locks")
		if b.Database != string(d.kind) || !b.Complete || b.Rounds < 3 {
			t.Errorf("%+v", b)
		}
		for _, name := range []string{"round_trip", "acquire_release", "keys_3", "keys_20", "goroutines_2", "goroutines_8",
			"hand_off", "hand_off_crowd", "transaction", "transaction_lock", "row_lock"} {
			m, ok := lines[name]
			status := "measured"
			if name == "transaction_lock" && (d.kind == servers.KindMySQL || d.kind == servers.KindMariaDB) {
				status = "unsupported"
			}
			if !ok || m.Status != status || m.Text == "" || (m.Reason == "") != (status == "measured") {
				t.Errorf("%s: %+v, want it %s", name, m, status)
			}
		}
		nothingIsLeft(t, d, "other_locks")
	})
}

func TestBenchWithoutALockTable(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		_, lines := bench(t, d.dsn)
		if m := lines["row_lock"]; m.Status != "skipped" || !strings.Contains(m.Reason, "dblock setup") {
			t.Errorf("%+v", m)
		}
		var tables int
		d.query(t, &tables, "SELECT count(*) FROM information_schema.tables WHERE table_name LIKE '%lock%' AND table_schema IN ('public', 'dbo', '"+d.name(t)+"')")
		if tables > 0 {
			t.Errorf("%d tables were created", tables)
		}
		table, _ := run(t, d.dsn, 0, "bench", "--duration", "1ms", "--goroutines", "4")
		for _, want := range []string{"WHAT ", "1.00 round trips", "4 goroutines, a key each ", "one every ", "not measured: ", string(d.kind) + ": medians of 3 rounds"} {
			if !strings.Contains(table, want) {
				t.Errorf("no %q in:\n%s", want, table)
			}
		}
		t.Logf("\n%s", table)
	})
}

func TestBenchOfOneWhoMayNotDelete(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		run(t, d.dsn, 0, "setup")
		_, lines := bench(t, d.user(t))
		if m := lines["row_lock"]; m.Status != "skipped" || !strings.Contains(m.Reason, "denied") {
			t.Errorf("%+v", m)
		}
		if m := lines["acquire_release"]; m.Status != "measured" {
			t.Errorf("%+v", m)
		}
		nothingIsLeft(t, d, "locks")
	})
}

func TestBenchStoppedBySignal(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		run(t, d.dsn, 0, "setup")
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
			p := start(t, d.dsn, "bench", "--json", "--duration", "1h", "--goroutines", "4")
			// Its row comes last in a round: all else was measured.
			eventually(t, "it locks a row", func() bool { return rows(t, d, "locks") == 1 })
			p.signal(sig)
			p.exit(128 + int(sig))
			if stderr := p.stderr.all(t); !strings.HasPrefix(stderr, "dblock: stopped by signal: ") || strings.Contains(stderr, "\n") {
				t.Errorf("stderr %q", stderr)
			}
			b, lines := parseBench(t, p.stdout.all(t))
			if m := lines["goroutines_4"]; b.Complete || m.Status != "measured" {
				t.Errorf("complete: %v, %+v", b.Complete, m)
			}
			nothingIsLeft(t, d, "locks")
		}
		p := start(t, d.dsn, "bench", "--duration", "1h", "--goroutines", "64")
		eventually(t, "it holds keys", func() bool {
			return slices.ContainsFunc(ls(t, d), func(l listed) bool { return ofBench(d, l) })
		})
		p.signal(syscall.SIGINT)
		p.exit(128 + int(syscall.SIGINT))
		nothingIsLeft(t, d, "locks")
	})
}

func TestBenchIsRefusedBehindAPooler(t *testing.T) {
	t.Parallel()
	dsn := servers.PgBouncer(t, servers.Postgres(t), "transaction").Database(t)
	stdout, stderr := run(t, dsn, 1, "bench", "--duration", "1ms")
	if stdout != "" || !strings.Contains(stderr, "session mode") || strings.Contains(stderr, "\n") {
		t.Errorf("stdout %q, stderr %q", stdout, stderr)
	}
}
