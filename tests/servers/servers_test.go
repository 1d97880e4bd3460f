package servers

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if helper := os.Getenv("DBLOCK_TEST_HELPER"); helper == "hold servers" {
		os.Exit(holdServers())
	}
	Main(m)
}

// each runs a test for every kind of server that may be installed.
func each(t *testing.T, test func(t *testing.T, kind Kind)) {
	for _, kind := range []Kind{KindPostgres, KindMySQL, KindMariaDB} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			test(t, kind)
		})
	}
}

func TestAnswers(t *testing.T) {
	each(t, func(t *testing.T, kind Kind) {
		s := sharedServer(t, kind)
		u, err := url.Parse(s.DSN())
		if err != nil || u.Scheme != string(kind) {
			t.Errorf("DSN %q: scheme is not %s", s.DSN(), kind)
		}
		query := "SELECT @@max_connections"
		if kind == KindPostgres {
			query = "SELECT current_setting('max_connections')::int"
		}
		if n := value[int](t, s.Open(t, s.DSN()), query); n < 300 {
			t.Errorf("max_connections is %d, want at least 300", n)
		}
	})
	t.Run("sqlserver", func(t *testing.T) {
		t.Parallel()
		s := SQLServer(t)
		if n := value[int](t, s.Open(t, s.Database(t)), "SELECT 1"); n != 1 {
			t.Errorf("SELECT 1 gave %d", n)
		}
	})
}

// Tests of other packages see who holds a lock through these.
func TestLocksCanBeInspected(t *testing.T) {
	t.Run("mysql", func(t *testing.T) {
		t.Parallel()
		s := MySQL(t)
		value[int](t, s.Open(t, s.DSN()), "SELECT COUNT(*) FROM performance_schema.metadata_locks")
	})
	t.Run("mariadb", func(t *testing.T) {
		t.Parallel()
		s := MariaDB(t)
		value[int](t, s.Open(t, s.DSN()), "SELECT COUNT(*) FROM information_schema.metadata_lock_info")
	})
}

func TestDatabase(t *testing.T) {
	each(t, func(t *testing.T, kind Kind) {
		s := sharedServer(t, kind)
		one, two := s.Open(t, s.Database(t)), s.Open(t, s.Database(t))
		execute(t, one, "CREATE TABLE t (id int)")
		if _, err := two.Exec("SELECT * FROM t"); err == nil {
			t.Error("a table of one database is visible in the other")
		}

		// A session that holds a lock does not keep the database from being dropped.
		var name string
		outer := t
		t.Run("dropped", func(t *testing.T) {
			dsn := s.Database(t)
			u, err := url.Parse(dsn)
			if err != nil {
				t.Fatal(err)
			}
			name = databaseOf(u)
			db := s.Open(outer, dsn) // still open when the database is dropped
			execute(t, db, "CREATE TABLE t (id int)")
			tx, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec("INSERT INTO t VALUES (1)"); err != nil {
				t.Fatal(err)
			}
		})
		query := "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = '%s'"
		if kind == KindPostgres {
			query = "SELECT count(*) FROM pg_database WHERE datname = '%s'"
		}
		if n := value[int](t, one, fmt.Sprintf(query, name)); name == "" || n != 0 {
			t.Errorf("database %q is still there", name)
		}
	})
}

func TestUser(t *testing.T) {
	each(t, func(t *testing.T, kind Kind) {
		s := sharedServer(t, kind)
		dsn := s.Database(t)
		admin := s.Open(t, dsn)
		execute(t, admin, "CREATE TABLE t (id int)")

		var login string
		t.Run("login", func(t *testing.T) {
			userDSN := s.User(t, dsn)
			u, err := url.Parse(userDSN)
			if err != nil {
				t.Fatal(err)
			}
			login = u.User.Username()
			user := s.Open(t, userDSN)
			value[int](t, user, "SELECT 1")
			if _, err := user.Exec("INSERT INTO t VALUES (1)"); err == nil {
				t.Error("the login may write without being granted that")
			}
			grantee := login
			if kind != KindPostgres {
				grantee = fmt.Sprintf("'%s'@'%%'", login)
			}
			execute(t, admin, "GRANT INSERT ON t TO "+grantee)
			execute(t, user, "INSERT INTO t VALUES (1)")
		})
		query := "SELECT COUNT(*) FROM mysql.user WHERE user = '%s'"
		if kind == KindPostgres {
			query = "SELECT count(*) FROM pg_roles WHERE rolname = '%s'"
		}
		if n := value[int](t, admin, fmt.Sprintf(query, login)); login == "" || n != 0 {
			t.Errorf("login %q is still there", login)
		}
	})
}

func TestKillAndRestart(t *testing.T) {
	each(t, func(t *testing.T, kind Kind) {
		s := Start(t, kind)
		dsn := s.Database(t)
		db := s.Open(t, dsn)
		execute(t, db, "CREATE TABLE t (id int)")
		pid := s.Pid()

		execute(t, db, "INSERT INTO t VALUES (1)")
		s.Kill(t)
		if err := db.Ping(); err == nil {
			t.Error("the server answers after Kill")
		}
		s.Restart(t)
		if n := value[int](t, db, "SELECT COUNT(*) FROM t"); n != 1 {
			t.Errorf("%d rows after a crash, want the committed one", n)
		}

		s.Stop(t)
		if err := db.Ping(); err == nil {
			t.Error("the server answers after Stop")
		}
		s.Restart(t)
		s.Restart(t) // a running one, too
		if n := value[int](t, db, "SELECT COUNT(*) FROM t"); n != 1 {
			t.Errorf("%d rows after a restart, want 1", n)
		}
		if pid != 0 && s.Pid() == pid {
			t.Error("the restarted server has the old process id")
		}
	})
}

func TestSettings(t *testing.T) {
	for kind, test := range map[Kind]struct{ setting, query, want string }{
		KindPostgres: {"max_connections=20", "SHOW max_connections", "20"},
		KindMySQL:    {"--wait-timeout=2", "SELECT @@global.wait_timeout", "2"},
		KindMariaDB:  {"wait-timeout=2", "SELECT @@global.wait_timeout", "2"},
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := Start(t, kind, test.setting)
			if got := value[string](t, s.Open(t, s.DSN()), test.query); got != test.want {
				t.Errorf("with %s: %s gave %s", test.setting, test.query, got)
			}
		})
	}
}

func TestBadSettingShowsTheLog(t *testing.T) {
	Postgres(t) // skips where there is none
	_, err := launch(KindPostgres, []string{"no_such_setting=1"})
	if err == nil || !strings.Contains(err.Error(), "no_such_setting") {
		t.Errorf("the error does not show what the server wrote: %v", err)
	}
}

func TestPgBouncer(t *testing.T) {
	target := Postgres(t)
	ctx := t.Context()
	connect := func(t *testing.T, s *Server, dsn string) *sql.Conn {
		t.Helper()
		conn, err := s.Open(t, dsn).Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	backend := func(t *testing.T, conn *sql.Conn) (pid int) {
		t.Helper()
		if err := conn.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
			t.Fatal(err)
		}
		return pid
	}

	t.Run("transaction", func(t *testing.T) {
		t.Parallel()
		s := PgBouncer(t, target, "transaction", "default_pool_size=1")
		dsn := s.Database(t)
		if a, b := backend(t, connect(t, s, dsn)), backend(t, connect(t, s, dsn)); a != b {
			t.Errorf("two idle clients have backends of their own, %d and %d", a, b)
		}
		value[int](t, s.Open(t, s.User(t, dsn)), "SELECT 1")

		s.Kill(t)
		s.Restart(t)
		backend(t, connect(t, s, dsn))
	})
	t.Run("session", func(t *testing.T) {
		t.Parallel()
		s := PgBouncer(t, target, "session")
		dsn := s.Database(t)
		if a, b := backend(t, connect(t, s, dsn)), backend(t, connect(t, s, dsn)); a == b {
			t.Errorf("two clients share backend %d", a)
		}
	})
	t.Run("statement", func(t *testing.T) {
		t.Parallel()
		s := PgBouncer(t, target, "statement")
		conn := connect(t, s, s.Database(t))
		backend(t, conn)
		if tx, err := conn.BeginTx(ctx, nil); err == nil {
			tx.Rollback()
			t.Error("statement mode lets a transaction begin")
		}
	})
}

func TestGiven(t *testing.T) {
	for kind, s := range map[Kind]func(testing.TB) *Server{KindPostgres: Postgres, KindMySQL: MySQL, KindMariaDB: MariaDB} {
		t.Run(string(kind), func(t *testing.T) {
			t.Setenv(dsnVariable(kind), s(t).DSN())
			s, err := given(kind)
			if err != nil {
				t.Fatal(err)
			}
			value[int](t, s.Open(t, s.User(t, s.Database(t))), "SELECT 1")
			if s.Pid() != 0 {
				t.Errorf("Pid is %d for a server that is not ours", s.Pid())
			}
		})
	}
	t.Run("MariaDB is not MySQL", func(t *testing.T) {
		t.Setenv(dsnVariable(KindMySQL), "mysql"+strings.TrimPrefix(MariaDB(t).DSN(), "mariadb"))
		if _, err := given(KindMySQL); err == nil || !strings.Contains(err.Error(), "is not mysql but") {
			t.Errorf("MariaDB was taken for MySQL: %v", err)
		}
	})
}

// child runs one test of this binary in a process where no MySQL server is to be had.
func child(t *testing.T, env ...string) (output string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestWantsMySQL$", "-test.v")
	cmd.Env = append(os.Environ(), append([]string{
		"DBLOCK_TEST_HELPER=want MySQL",
		"DBLOCK_TEST_MYSQL_DSN=",
		"DBLOCK_MYSQL_ROOT=" + t.TempDir(),
		"PATH=" + t.TempDir(),
		"DOCKER_HOST=tcp://127.0.0.1:1",
	}, env...)...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestWantsMySQL(t *testing.T) {
	if os.Getenv("DBLOCK_TEST_HELPER") != "want MySQL" {
		t.Skip("a helper of TestMissing")
	}
	MySQL(t)
	t.Log("found MySQL")
}

func TestMissing(t *testing.T) {
	if path, ok := lookPath("mysqld"); ok && strings.Contains(path, "mysqld") {
		t.Skip("MySQL is installed where it is always found: " + path)
	}
	out, err := child(t, "DBLOCK_TEST_REQUIRE=")
	if err != nil || !strings.Contains(out, "--- SKIP: TestWantsMySQL") || !strings.Contains(out, "scripts/install-servers") {
		t.Errorf("a test without its server is not skipped with a hint: %v\n%s", err, out)
	}
	out, err = child(t, "DBLOCK_TEST_REQUIRE=postgres, mysql")
	if err == nil || !strings.Contains(out, "--- FAIL: TestWantsMySQL") || !strings.Contains(out, "scripts/install-servers") {
		t.Errorf("a test without its required server does not fail with a hint: %v\n%s", err, out)
	}
	out, err = child(t, "DBLOCK_TEST_REQUIRE=", "DBLOCK_TEST_MYSQL_DSN=postgres://localhost/x")
	if err == nil || !strings.Contains(out, "DBLOCK_TEST_MYSQL_DSN is not a URL that begins with mysql://") {
		t.Errorf("a wrong DSN does not fail: %v\n%s", err, out)
	}
}

// holdServers is a helper process: it starts servers, tells their process ids and folders, and
// keeps them until it is killed.
func holdServers() int {
	for _, kind := range []Kind{KindPostgres, KindMySQL, KindMariaDB} {
		s, err := launch(kind, nil)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		if p, ok := s.engine.(*process); ok {
			fmt.Println(s.Pid(), p.folder)
		}
	}
	fmt.Println("ready")
	bufio.NewReader(os.Stdin).ReadByte()
	return 0
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if poll(ctx, condition) != nil {
		t.Errorf("still not: %s", what)
	}
}

func execute(t *testing.T, db *sql.DB, statement string) {
	t.Helper()
	if _, err := db.Exec(statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func value[T any](t *testing.T, db *sql.DB, query string) (v T) {
	t.Helper()
	if err := db.QueryRow(query).Scan(&v); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}
