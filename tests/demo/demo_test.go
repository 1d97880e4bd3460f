// Package demo_test runs dblock demo as people do: the real command, with real
// processes, on real servers.
package demo_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock/tests/program"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m, program.Remove) }

// run is one dblock demo under test.
type run struct {
	cmd    *exec.Cmd
	stdout io.Reader
	stderr bytes.Buffer
	mark   string // in the environment of all its processes
	temp   string // its temporary folder
}

// newRun prepares a demo with the environment of the test, less what unset names.
func newRun(t *testing.T, unset []string, args ...string) *run {
	t.Helper()
	r := &run{mark: fmt.Sprintf("DBLOCK_DEMO_TEST=%s-%d", t.Name(), os.Getpid())}
	// Not t.TempDir: other accounts cannot get there.
	var err error
	if r.temp, err = os.MkdirTemp("", "dblock-demo-test-"); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(r.temp, 0o777); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(r.temp) })
	r.cmd = exec.Command(program.Build(t, "cmd/dblock"), append([]string{"demo"}, args...)...)
	unset = append(unset, "DBLOCK_DSN")
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); !slices.Contains(unset, name) {
			r.cmd.Env = append(r.cmd.Env, variable)
		}
	}
	r.cmd.Env = append(r.cmd.Env, "TMPDIR="+r.temp, r.mark, "GORACE=atexit_sleep_ms=0")
	r.cmd.Stderr = &r.stderr
	return r
}

func (r *run) start(t *testing.T) {
	t.Helper()
	var err error
	if r.stdout, err = r.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.cmd.Process.Kill() })
}

// until reads what the demo prints up to the first line with a text.
func (r *run) until(t *testing.T, text string) {
	t.Helper()
	var seen strings.Builder
	lines := bufio.NewScanner(r.stdout)
	for lines.Scan() {
		fmt.Fprintln(&seen, lines.Text())
		if strings.Contains(lines.Text(), text) {
			go io.Copy(io.Discard, r.stdout) // ends with the demo
			return
		}
	}
	t.Fatalf("no %q on the timeline:\n%s%s", text, seen.String(), r.stderr.String())
}

// untilServerStarts reads on, and returns when the files of the server are being
// made.
func (r *run) untilServerStarts(t *testing.T) {
	t.Helper()
	r.until(t, "Starting")
	r.await(t, "no file of the server", func() bool {
		files, err := filepath.Glob(filepath.Join(r.temp, "*", "data", "*"))
		return err != nil || len(files) > 0
	})
}

func (r *run) await(t *testing.T, missing string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("after 30 s: %s; there is %q", missing, r.left(t))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// report is what --json prints.
type report struct {
	OK         bool
	Database   string
	Server     string
	TakeoverMS float64 `json:"takeover_ms"`
	Invariants []struct {
		Name, Text string
		OK         bool
	}
	Timeline []struct {
		MS                  float64
		Process, Kind, Text string
		PID                 int
		Session             int64
		Versions            []int64
		Victim              string
	}
}

// play runs a whole demo with --json.
func (r *run) play(t *testing.T) report {
	t.Helper()
	var stdout bytes.Buffer
	r.cmd.Stdout = &stdout
	if err := r.cmd.Run(); err != nil {
		t.Fatalf("%v: %s\n%s", err, r.stderr.String(), stdout.String())
	}
	var result report
	if err := json.Unmarshal(stdout.Bytes(), &result); err != nil {
		t.Fatalf("%v in\n%s", err, stdout.String())
	}
	if r.stderr.Len() > 0 {
		t.Errorf("on stderr: %s", r.stderr.String())
	}
	return result
}

// checkReport looks at the report for itself, beside the demo's own verdict.
func checkReport(t *testing.T, r report) {
	t.Helper()
	if !r.OK {
		t.Error("not ok")
	}
	var names []string
	for _, i := range r.Invariants {
		names = append(names, i.Name)
		if !i.OK {
			t.Errorf("%s: %s", i.Name, i.Text)
		}
	}
	want := []string{"migrations_applied_once", "money_kept", "no_deadlock", "one_leader_at_a_time",
		"killed_leader_replaced", "late_write_refused", "nothing_left_locked"}
	if !slices.Equal(names, want) {
		t.Errorf("invariants %v, want %v", names, want)
	}
	if r.TakeoverMS <= 0 {
		t.Errorf("takeover in %v ms", r.TakeoverMS)
	}
	pids := map[string]int{}
	last := 0.0
	for _, e := range r.Timeline {
		if e.MS < last || e.Text == "" || e.PID == 0 {
			t.Errorf("event %+v after %v ms", e, last)
		}
		last = e.MS
		pids[e.Process] = e.PID
		if e.Kind == "waiting" && e.Session == 0 {
			t.Errorf("%s does not know for whom it waits", e.Process)
		}
	}
	processes := map[int]bool{}
	for _, pid := range pids {
		processes[pid] = true
	}
	if len(pids) != 12 || len(processes) != 12 {
		t.Errorf("4 replicas, 4 tellers, 3 projectors and the demo are 12 processes: %v", pids)
	}
}

// nothingLeft waits until no process and no file of the demo is left.
func (r *run) nothingLeft(t *testing.T) {
	t.Helper()
	r.await(t, "something is left", func() bool { return len(r.left(t)) == 0 })
}

func (r *run) left(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(r.temp, "*"))
	if err != nil {
		t.Fatal(err)
	}
	return append(files, r.processes(t)...)
}

// processes are the command lines of those that have the mark in their
// environment or the folder on their command line.
func (r *run) processes(t *testing.T) []string {
	t.Helper()
	if runtime.GOOS != "linux" {
		return nil
	}
	var found []string
	folders, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range folders {
		// Processes that end meanwhile, and those of others, cannot be read.
		environment, _ := os.ReadFile(filepath.Join(folder, "environ"))
		line, _ := os.ReadFile(filepath.Join(folder, "cmdline"))
		if bytes.Contains(environment, []byte(r.mark)) || bytes.Contains(line, []byte(r.temp)) {
			found = append(found, filepath.Base(folder)+" "+string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	return found
}

func TestOnInstalledPostgreSQLWithoutHome(t *testing.T) {
	t.Parallel()
	servers.Postgres(t) // where that skips, no PostgreSQL is installed
	r := newRun(t, []string{"HOME", "XDG_CACHE_HOME"}, "--json")
	result := r.play(t)
	checkReport(t, result)
	if result.Database != "postgres" || !strings.Contains(result.Server, "PostgreSQL") {
		t.Errorf("on %s: %s", result.Database, result.Server)
	}
	if left := r.left(t); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

func TestOnDSN(t *testing.T) {
	for _, server := range []struct {
		kind servers.Kind
		of   func(testing.TB) *servers.Server
	}{
		{servers.KindPostgres, servers.Postgres},
		{servers.KindMySQL, servers.MySQL},
		{servers.KindMariaDB, servers.MariaDB},
		{servers.KindSQLServer, servers.SQLServer},
	} {
		t.Run(string(server.kind), func(t *testing.T) {
			t.Parallel()
			s := server.of(t)
			dsn := s.Database(t)
			r := newRun(t, nil, "--dsn", dsn, "--json")
			result := r.play(t)
			checkReport(t, result)
			if result.Database != string(server.kind) || result.Server != "" {
				t.Errorf("on %s: %s", result.Database, result.Server)
			}
			if tables := demoTables(t, s, dsn); len(tables) > 0 {
				t.Errorf("tables left: %v", tables)
			}
			r.nothingLeft(t)
		})
	}
}

func demoTables(t *testing.T, s *servers.Server, dsn string) []string {
	t.Helper()
	rows, err := s.Open(t, dsn).QueryContext(t.Context(),
		"SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'dblock%' AND table_schema NOT IN ('mysql', 'sys') ORDER BY table_name")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var tables []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		tables = append(tables, name)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return tables
}

func TestForeignTablesAreNotTouched(t *testing.T) {
	t.Parallel()
	s := servers.Postgres(t)
	for _, table := range []string{"dblock_demo_accounts", "dblock_demo_owner", "dblock_dblock_demo_locks_version"} {
		dsn := s.Database(t)
		db := s.Open(t, dsn)
		if _, err := db.ExecContext(t.Context(), "CREATE TABLE "+table+" (note text)"); err != nil {
			t.Fatal(err)
		}
		r := newRun(t, nil, "--dsn", dsn)
		err := r.cmd.Run()
		if code := r.cmd.ProcessState.ExitCode(); code != 1 || err == nil {
			t.Errorf("%s: exit code %d", table, code)
		}
		if text := r.stderr.String(); !strings.Contains(text, table) || strings.Count(text, "\n") != 1 {
			t.Errorf("%s: %q", table, text)
		}
		if tables := demoTables(t, s, dsn); !slices.Equal(tables, []string{table}) {
			t.Errorf("%s: tables are now %v", table, tables)
		}
	}
}

// What a killed demo leaves in a database, the next one removes.
func TestAfterAKilledDemoOnDSN(t *testing.T) {
	t.Parallel()
	s := servers.Postgres(t)
	dsn := s.Database(t)
	killed := newRun(t, nil, "--dsn", dsn)
	killed.start(t)
	killed.until(t, "leads")
	if err := killed.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	killed.cmd.Wait()
	killed.nothingLeft(t)
	if len(demoTables(t, s, dsn)) == 0 {
		t.Fatal("the killed demo left no tables: the test shows nothing")
	}
	checkReport(t, newRun(t, nil, "--dsn", dsn, "--json").play(t))
	if tables := demoTables(t, s, dsn); len(tables) > 0 {
		t.Errorf("tables left: %v", tables)
	}
}

func TestOneDemoAtATimeOnDSN(t *testing.T) {
	t.Parallel()
	s := servers.Postgres(t)
	dsn := s.Database(t)
	first := newRun(t, nil, "--dsn", dsn)
	first.start(t)
	first.until(t, "Deploy")
	second := newRun(t, nil, "--dsn", dsn)
	err := second.cmd.Run()
	if text := second.stderr.String(); err == nil || !strings.Contains(text, "another demo runs on this database") || !strings.Contains(text, "session") {
		t.Errorf("%v: %s", err, text)
	}
	if err := first.cmd.Wait(); err != nil {
		t.Errorf("the first one: %v: %s", err, first.stderr.String())
	}
}

// moments are when a demo is cut short.
var moments = map[string]func(r *run, t *testing.T){
	"while the server starts":  (*run).untilServerStarts,
	"while transfers are made": func(r *run, t *testing.T) { r.until(t, "Transactions") },
	"while one leads":          func(r *run, t *testing.T) { r.until(t, "leads") },
}

func TestInterrupted(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("there is no signal to send")
	}
	servers.Postgres(t)
	for name, until := range moments {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRun(t, nil)
			r.start(t)
			until(r, t)
			if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			r.cmd.Wait()
			if code := r.cmd.ProcessState.ExitCode(); code != 130 {
				t.Errorf("exit code %d", code)
			}
			if text := r.stderr.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "interrupt") {
				t.Errorf("on stderr: %q", text)
			}
			if left := r.left(t); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

func TestKilled(t *testing.T) {
	servers.Postgres(t)
	for name, until := range moments {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRun(t, nil)
			r.start(t)
			until(r, t)
			if err := r.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			r.cmd.Wait()
			r.nothingLeft(t)
		})
	}
}

func TestAsAnOrdinaryUser(t *testing.T) {
	if runtime.GOOS == "windows" || os.Geteuid() != 0 {
		t.Skip("the other tests run as an ordinary user already")
	}
	t.Parallel()
	servers.Postgres(t)
	r := newRun(t, []string{"HOME"}, "--json")
	asNobody(r.cmd)
	checkReport(t, r.play(t))
	if left := r.left(t); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

func TestUnreachableDSN(t *testing.T) {
	t.Parallel()
	for _, dsn := range []string{"postgres://u:secret@127.0.0.1:1/db", "oracle://u:secret@127.0.0.1/db", "nonsense"} {
		r := newRun(t, nil, "--dsn", dsn)
		if err := r.cmd.Run(); err == nil {
			t.Errorf("%s: succeeded", dsn)
		}
		if text := r.stderr.String(); strings.Count(text, "\n") != 1 || strings.Contains(text, "secret") || strings.Contains(text, "goroutine") {
			t.Errorf("%s: %q", dsn, text)
		}
	}
}

// The password of the throwaway server, and of --dsn, is in no process's
// arguments.
func TestPasswordsAreNotInArguments(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc")
	}
	s := servers.Postgres(t)
	u, err := url.Parse(s.Database(t))
	if err != nil {
		t.Fatal(err)
	}
	password, _ := u.User.Password()
	r := newRun(t, nil, "--dsn", u.String())
	r.start(t)
	r.until(t, "waits")
	for _, line := range r.processes(t) {
		if strings.Contains(line, password) && !strings.Contains(line, " demo ") {
			t.Errorf("password in %q", line)
		}
	}
	if len(r.processes(t)) < 4 {
		t.Error("the demo's processes were not found: the test shows nothing")
	}
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	r.cmd.Wait()
	r.nothingLeft(t)
}
