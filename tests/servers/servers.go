// Package servers gives tests real database servers.
//
// A server is found in this order:
//
//   - a DSN in the environment: DBLOCK_TEST_POSTGRES_DSN, DBLOCK_TEST_MYSQL_DSN,
//     DBLOCK_TEST_MARIADB_DSN, DBLOCK_TEST_SQLSERVER_DSN;
//   - installed binaries (scripts/install-servers installs them), run as a private instance on a
//     free loopback port, with its files in a temporary folder;
//   - a container, where a Docker engine answers.
//
// A test whose server is not to be had is skipped, or fails if DBLOCK_TEST_REQUIRE, a list such as
// "postgres,mysql,mariadb,network", names it.
//
// A package that uses servers has this TestMain:
//
//	func TestMain(m *testing.M) { servers.Main(m) }
//
// Servers that a test binary started end with it, however it ends: on Linux the kernel kills their
// processes when the binary dies, and the next run removes the folders that they left.
//
// Every DSN is a URL whose scheme names the database: postgres, mysql, mariadb or sqlserver.
//
// A test that looks for leaked goroutines takes goleak.IgnoreCurrent() after it has its server:
// a running server is watched by goroutines of this package.
package servers

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/url"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Kind says what software a Server is.
type Kind string

// The kinds of servers.
const (
	KindPostgres  Kind = "postgres"
	KindMySQL     Kind = "mysql"
	KindMariaDB   Kind = "mariadb"
	KindSQLServer Kind = "sqlserver"
	KindPgBouncer Kind = "pgbouncer"
)

const (
	startTimeout = 2 * time.Minute
	stopTimeout  = 10 * time.Second
)

// Server is a database server, or a pooler in front of one.
type Server struct {
	Kind Kind

	dsn     *url.URL
	engine  engine  // nil if the server was given by its DSN
	private bool    // one test's own
	target  *Server // the server behind a pooler, the primary of a standby
}

// engine is what a server runs in: a process or a container.
type engine interface {
	start(ctx context.Context) error
	running() bool
	pid() int
	signal(os.Signal) error
	kill() error // at once, as a crash
	stop() error // in order
	remove()     // ends it and frees what it used
	logTail() string
}

// registry holds what a test binary shares among its tests. Main empties it.
type registry struct {
	mu      sync.Mutex
	servers map[Kind]func() (*Server, error)
	started []*Server
	folders map[string]string // by parent folder
}

var shared = registry{servers: map[Kind]func() (*Server, error){}, folders: map[string]string{}}

// Main runs the tests, then stops the servers that they shared and calls what else has to be cleaned
// up. It does not return.
func Main(m *testing.M, cleanups ...func()) {
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue {
		// Tests wait for servers more than they compute.
		if err := parallel.Value.Set(strconv.Itoa(2 * runtime.GOMAXPROCS(0))); err != nil {
			fmt.Fprintf(os.Stderr, "servers: run more tests side by side: %v\n", err)
		}
	}
	code := m.Run()
	shared.close()
	for _, cleanup := range cleanups {
		cleanup()
	}
	os.Exit(code)
}

func (r *registry) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.started {
		s.engine.remove()
	}
	for _, folder := range r.folders {
		if err := os.RemoveAll(folder); err != nil {
			fmt.Fprintf(os.Stderr, "servers: remove temporary folder: %v\n", err)
		}
	}
}

// get returns the shared server of a kind, or the error that its first use ended with.
func (r *registry) get(kind Kind) (*Server, error) {
	r.mu.Lock()
	start, ok := r.servers[kind]
	if !ok {
		start = sync.OnceValues(func() (*Server, error) {
			if s, err := given(kind); s != nil || err != nil {
				return s, err
			}
			s, err := launch(kind, nil)
			if err == nil {
				r.mu.Lock()
				r.started = append(r.started, s)
				r.mu.Unlock()
			}
			return s, err
		})
		r.servers[kind] = start
	}
	r.mu.Unlock()
	return start() // outside the lock: different kinds may start side by side
}

// Postgres returns the PostgreSQL server that all tests of the binary share. A test that
// disturbs the whole server takes one of its own from [Start].
func Postgres(t testing.TB) *Server { t.Helper(); return sharedServer(t, KindPostgres) }

// MySQL returns the shared MySQL server. It is never MariaDB.
func MySQL(t testing.TB) *Server { t.Helper(); return sharedServer(t, KindMySQL) }

// MariaDB returns the shared MariaDB server.
func MariaDB(t testing.TB) *Server { t.Helper(); return sharedServer(t, KindMariaDB) }

// SQLServer returns the shared SQL Server, which is given by its DSN or runs in a container.
func SQLServer(t testing.TB) *Server { t.Helper(); return sharedServer(t, KindSQLServer) }

func sharedServer(t testing.TB, kind Kind) *Server {
	t.Helper()
	s, err := shared.get(kind)
	return must(t, kind, s, err)
}

// Start starts a server for this test alone, to be killed, stopped or configured at will; it is
// gone when the test ends. It is never the server of a DSN in the environment.
//
// Settings are written name=value: the server's configuration parameters, such as
// "max_connections=20" for PostgreSQL or "wait-timeout=2" for MySQL; leading dashes are optional.
func Start(t testing.TB, kind Kind, settings ...string) *Server {
	t.Helper()
	s, err := launch(kind, settings)
	return must(t, kind, s, err).own(t)
}

// own makes the server one test's.
func (s *Server) own(t testing.TB) *Server {
	s.private = true
	t.Cleanup(s.engine.remove)
	return s
}

// missingError says that a server is neither given, nor installed, nor to be had as a container.
type missingError struct{ kind Kind }

func (e missingError) Error() string {
	var ways []string
	if e.kind != KindSQLServer {
		ways = append(ways, "install it with scripts/install-servers")
	}
	if e.kind != KindPgBouncer {
		ways = append(ways, "start Docker", "or set "+dsnVariable(e.kind))
	}
	return fmt.Sprintf("no %s server: %s", e.kind, strings.Join(ways, ", "))
}

// must ends the test unless it got its server: a missing server skips the test if it may.
func must(t testing.TB, kind Kind, s *Server, err error) *Server {
	t.Helper()
	if err == nil {
		return s
	}
	var missing missingError
	if errors.As(err, &missing) {
		SkipWithout(t, string(kind), err)
	}
	t.Fatal(err)
	return nil
}

// SkipWithout ends a test that lacks what it needs: it skips the test, or fails it if
// DBLOCK_TEST_REQUIRE names what is missing. The reason says how to get it.
func SkipWithout(t testing.TB, what string, reason any) {
	t.Helper()
	if slices.Contains(strings.Split(strings.ReplaceAll(os.Getenv("DBLOCK_TEST_REQUIRE"), " ", ""), ","), what) {
		t.Fatal(reason)
	}
	t.Skip(reason)
}

func dsnVariable(kind Kind) string {
	return "DBLOCK_TEST_" + strings.ToUpper(string(kind)) + "_DSN"
}

// given returns the server that the environment names, or nil.
func given(kind Kind) (*Server, error) {
	dsn := os.Getenv(dsnVariable(kind))
	if dsn == "" {
		return nil, nil
	}
	u, err := url.Parse(dsn)
	if err != nil || (u.Scheme != string(kind) && (kind != KindPostgres || u.Scheme != "postgresql")) {
		return nil, fmt.Errorf("%s is not a URL that begins with %s://", dsnVariable(kind), kind)
	}
	s := &Server{Kind: kind, dsn: u}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := s.check(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", dsnVariable(kind), err)
	}
	return s, nil
}

// launch starts a new server.
func launch(kind Kind, settings []string) (*Server, error) {
	in, err := findInstallation(kind)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	switch {
	case in != nil:
		return in.launch(ctx, settings)
	case dockerAnswers():
		return launchContainer(kind, settings)
	default:
		return nil, missingError{kind}
	}
}

// awaitReady waits until the server answers a query.
func (s *Server) awaitReady(ctx context.Context) error {
	var last error
	err := poll(ctx, func() bool {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if err := s.check(attempt); err != nil {
			last = err
		} else {
			last = nil
		}
		return last == nil || !s.engine.running()
	})
	switch {
	case !s.engine.running():
		return fmt.Errorf("%s ended while it started; its log ends with:\n%s", s.Kind, s.engine.logTail())
	case err != nil:
		return fmt.Errorf("%s does not answer: %w; its log ends with:\n%s", s.Kind, errors.Join(err, last), s.engine.logTail())
	}
	return nil
}

// check asks the server who it is.
func (s *Server) check(ctx context.Context) error {
	db, err := open(s.Kind, s.DSN())
	if err != nil {
		return err
	}
	defer db.Close()
	query := "SELECT version()"
	if s.Kind == KindSQLServer {
		query = "SELECT @@version"
	}
	var version string
	if err := db.QueryRowContext(ctx, query).Scan(&version); err != nil {
		return err
	}
	if isMariaDB := strings.Contains(version, "MariaDB"); isMariaDB != (s.Kind == KindMariaDB) {
		return fmt.Errorf("the server is not %s but %s", s.Kind, version)
	}
	return nil
}

// DSN returns the administrator's DSN on the server's default database.
func (s *Server) DSN() string { return s.dsn.String() }

// Pid returns the id of the server's main process, or 0 if it is not a process of ours.
func (s *Server) Pid() int {
	if s.engine == nil {
		return 0
	}
	return s.engine.pid()
}

// Kill ends the server as a crash does: by SIGKILL, for all its processes. Committed data stays.
func (s *Server) Kill(t testing.TB) {
	t.Helper()
	s.control(t, "kill", func() error { return s.engine.kill() })
}

// Stop shuts the server down in order, disconnecting its clients.
func (s *Server) Stop(t testing.TB) {
	t.Helper()
	s.control(t, "stop", func() error { return s.engine.stop() })
}

// Restart starts the server with its data, address and settings again, after it was killed or
// stopped, or stops it first.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.control(t, "restart", func() error {
		if s.engine.running() {
			if err := s.engine.stop(); err != nil {
				return err
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		if err := s.engine.start(ctx); err != nil {
			return err
		}
		return s.awaitReady(ctx)
	})
}

// Signal sends a signal to the server's main process. Note that a PostgreSQL session is served by
// a process of its own, whose id is pg_backend_pid().
func (s *Server) Signal(t testing.TB, sig os.Signal) {
	t.Helper()
	s.control(t, "signal", func() error { return s.engine.signal(sig) })
}

func (s *Server) control(t testing.TB, verb string, do func() error) {
	t.Helper()
	if !s.private {
		t.Fatalf("cannot %s the %s server: other tests share it; take one from servers.Start", verb, s.Kind)
	}
	if err := do(); err != nil {
		t.Fatalf("%s the %s server: %v", verb, s.Kind, err)
	}
}

// poll calls done until it returns true or ctx ends.
func poll(ctx context.Context, done func() bool) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}
