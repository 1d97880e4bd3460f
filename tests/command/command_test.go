//go:build unix

// Package command_test runs the real command in real processes against real
// servers.
package command_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/tests/program"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m, program.Remove) }

// patience is how long anything may take before the test gives up.
const patience = time.Minute

// process is a dblock that runs. It ends with the test at the latest.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdin  *os.File
	stdout *lines
	stderr *lines
	ended  chan struct{}
}

// command prepares a dblock in a session of its own, and so without a terminal.
func command(t *testing.T, dsn string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(program.Build(t, "cmd/dblock"), args...)
	// The race detector waits for a second at every exit; a race is exit code 66.
	cmd.Env = append(os.Environ(), "DBLOCK_DSN="+dsn, "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

func start(t *testing.T, dsn string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: command(t, dsn, args...), ended: make(chan struct{})}
	// Pipes of the test's own: those of exec.Cmd end with dblock, and so would
	// what it left running.
	stdin, stdinEnd := pipe(t)
	stdoutEnd, stdout := pipe(t)
	stderrEnd, stderr := pipe(t)
	p.stdin = stdinEnd
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = stdin, stdout, stderr
	p.run(stdoutEnd, stderrEnd)
	for _, f := range []*os.File{stdin, stdout, stderr} {
		f.Close()
	}
	return p
}

func (p *process) run(stdout, stderr io.Reader) {
	p.t.Helper()
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.stdout, p.stderr = readLines(stdout), readLines(stderr)
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait() // how it ended is in ProcessState
	}()
	p.t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // an error says that it has ended
		<-p.ended
	})
}

func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		w.Close()
	})
	return r, w
}

// exit waits for the end of dblock and expects its exit code.
func (p *process) exit(code int) *process {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatalf("%v has not ended; stderr: %s", p.cmd.Args, p.stderr.seen())
	}
	if got := p.cmd.ProcessState.ExitCode(); got != code {
		p.t.Fatalf("%v: exit code %d (%v), want %d; stderr: %s", p.cmd.Args, got, p.cmd.ProcessState, code, p.stderr.all(p.t))
	}
	return p
}

func (p *process) signal(sig os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// lines is what a process has printed.
type lines struct {
	mu   sync.Mutex
	read []string
	more chan string // closed when nobody can print any more
}

func readLines(r io.Reader) *lines {
	l := &lines{more: make(chan string, 10000)}
	go func() {
		defer close(l.more)
		for scanner := bufio.NewScanner(r); scanner.Scan(); {
			l.mu.Lock()
			l.read = append(l.read, scanner.Text())
			l.mu.Unlock()
			l.more <- scanner.Text()
		}
	}()
	return l
}

// expect reads on until a line has the text in it, and returns that line.
func (l *lines) expect(t *testing.T, text string) string {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case line, ok := <-l.more:
			if !ok {
				t.Fatalf("no %q in:\n%s", text, l.seen())
			}
			if strings.Contains(line, text) {
				return line
			}
		case <-limit:
			t.Fatalf("no %q yet in:\n%s", text, l.seen())
		}
	}
}

// all waits until nobody can print any more: neither dblock nor what it started.
func (l *lines) all(t *testing.T) string {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case _, ok := <-l.more:
			if !ok {
				return l.seen()
			}
		case <-limit:
			t.Fatalf("somebody still runs; so far:\n%s", l.seen())
		}
	}
}

func (l *lines) seen() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.read, "\n")
}

// run runs dblock to its end and returns what it printed.
func run(t *testing.T, dsn string, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	p := start(t, dsn, args...)
	p.stdin.Close()
	p.exit(code)
	return p.stdout.all(t), p.stderr.all(t)
}

// hold starts an exec whose command holds the key until its stdin ends.
func hold(t *testing.T, dsn, key string) *process {
	t.Helper()
	p := start(t, dsn, "exec", "--key", key, "--", "sh", "-c", "echo held; read x; exit 0")
	p.stdout.expect(t, "held")
	return p
}

func (p *process) release() {
	p.t.Helper()
	p.stdin.Close()
	p.exit(0)
}

// database is an empty database of one test.
type database struct {
	kind servers.Kind
	dsn  string
	sql  *sql.DB
	user func(t testing.TB) string // the DSN of one who may only connect
}

// onEach runs a test on each database.
func onEach(t *testing.T, test func(t *testing.T, d *database)) {
	for kind, server := range map[servers.Kind]func(testing.TB) *servers.Server{
		servers.KindPostgres:  servers.Postgres,
		servers.KindMySQL:     servers.MySQL,
		servers.KindMariaDB:   servers.MariaDB,
		servers.KindSQLServer: servers.SQLServer,
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := server(t)
			dsn := s.Database(t)
			test(t, &database{kind: kind, dsn: dsn, sql: s.Open(t, dsn), user: func(t testing.TB) string { return s.User(t, dsn) }})
		})
	}
}

// onPostgres runs a test for which it does not matter which database it is.
func onPostgres(t *testing.T) *database {
	t.Helper()
	t.Parallel()
	s := servers.Postgres(t)
	dsn := s.Database(t)
	return &database{kind: servers.KindPostgres, dsn: dsn, sql: s.Open(t, dsn)}
}

func (d *database) name(t *testing.T) string {
	t.Helper()
	u, err := url.Parse(d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimPrefix(u.Path, "/")
}

// session is the server's number of the session that holds the key.
func (d *database) session(t *testing.T, key dblock.Key) (id int64) {
	t.Helper()
	switch d.kind {
	case servers.KindPostgres:
		d.query(t, &id, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND (classid::bigint << 32 | objid::bigint) = $1 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())", key.ID())
	case servers.KindSQLServer:
		d.query(t, &id, "SELECT request_session_id FROM sys.dm_tran_locks WHERE resource_type = 'APPLICATION' AND request_status = 'GRANT' AND resource_database_id = DB_ID()")
	default:
		d.query(t, &id, "SELECT IS_USED_LOCK(?)", key.Name(d.name(t)))
	}
	return id
}

// kill makes the server end a session.
func (d *database) kill(t *testing.T, session int64) {
	t.Helper()
	statement := fmt.Sprintf("KILL %d", session)
	if d.kind == servers.KindPostgres {
		statement = fmt.Sprintf("SELECT pg_terminate_backend(%d)", session)
	}
	d.exec(t, statement)
}

// waiting is how many sessions wait for an advisory lock of this database.
func (d *database) waiting(t *testing.T) (n int) {
	t.Helper()
	switch d.kind {
	case servers.KindPostgres:
		d.query(t, &n, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
	case servers.KindSQLServer:
		d.query(t, &n, "SELECT count(*) FROM sys.dm_tran_locks WHERE resource_type = 'APPLICATION' AND request_status <> 'GRANT' AND resource_database_id = DB_ID()")
	default:
		d.query(t, &n, "SELECT count(*) FROM information_schema.processlist WHERE state = 'User lock' AND db = DATABASE()")
	}
	return n
}

func (d *database) query(t *testing.T, into any, query string, args ...any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := d.sql.QueryRowContext(ctx, query, args...).Scan(into); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func (d *database) exec(t *testing.T, statement string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.sql.ExecContext(ctx, statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

// eventually asks until the answer is yes.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	limit := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("still not: %s", what)
		}
	}
}

func exists(t *testing.T, pid int) bool {
	t.Helper()
	err := syscall.Kill(pid, 0)
	if err != nil && !errors.Is(err, syscall.ESRCH) {
		t.Fatal(err)
	}
	return err == nil
}
