package servers

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	_ "github.com/microsoft/go-mssqldb" // registers the driver "sqlserver"
)

const statementTimeout = 30 * time.Second

// Open opens a plain handle: pgx's for PostgreSQL, go-sql-driver's for MySQL and MariaDB,
// go-mssqldb's for SQL Server. It is closed when the test ends.
func (s *Server) Open(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := open(s.Kind, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func open(kind Kind, dsn string) (*sql.DB, error) {
	switch kind {
	case KindPostgres, KindPgBouncer:
		config, err := pgx.ParseConfig(dsn)
		if err != nil {
			return nil, err
		}
		if kind == KindPgBouncer {
			// A prepared statement may meet another server connection.
			config.DefaultQueryExecMode = pgx.QueryExecModeExec
		}
		return stdlib.OpenDB(*config), nil
	case KindMySQL, KindMariaDB:
		config, err := mysqlConfig(dsn)
		if err != nil {
			return nil, err
		}
		connector, err := mysql.NewConnector(config)
		if err != nil {
			return nil, err
		}
		return sql.OpenDB(connector), nil
	default:
		return sql.Open("sqlserver", dsn)
	}
}

func mysqlConfig(dsn string) (*mysql.Config, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, err
	}
	config, err := mysql.ParseDSN("tcp(" + u.Host + ")" + u.Path + "?" + u.RawQuery)
	if err != nil {
		return nil, err
	}
	config.User = u.User.Username()
	config.Passwd, _ = u.User.Password()
	// Connections are cut on purpose here; the driver would write each to stderr.
	config.Logger = &mysql.NopLogger{}
	return config, nil
}

// Database creates an empty database for this test and returns the administrator's DSN on it.
// When the test ends, sessions on it are killed and it is dropped.
func (s *Server) Database(t testing.TB) string {
	t.Helper()
	name := objectName(t)
	if err := s.server().exec("", "CREATE DATABASE "+name); err != nil {
		t.Fatalf("create a database: %v", err)
	}
	s.server().cleanup(t, func() error { return s.server().dropDatabase(name) })
	return s.on(name)
}

// User creates a login that may connect to the database of dsn, and nothing else: on MySQL and
// MariaDB, where connecting takes a privilege, it has SELECT there. It returns the login's DSN;
// the test grants more to its name. Login and privileges are dropped when the test ends.
func (s *Server) User(t testing.TB, dsn string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	database := databaseOf(u)
	name, password := "u_"+random(), "Pw1-"+random()
	server := s.server()
	var create, drop []string
	on := "" // the database in which the statements run
	switch server.Kind {
	case KindPostgres:
		on = database
		create = []string{fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s'", name, password)}
		drop = []string{
			fmt.Sprintf("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '%s'", name),
			"DROP OWNED BY " + name,
			"DROP ROLE " + name,
		}
	case KindMySQL, KindMariaDB:
		create = []string{
			fmt.Sprintf("CREATE USER '%s'@'%%' IDENTIFIED BY '%s'", name, password),
			fmt.Sprintf("GRANT SELECT ON `%s`.* TO '%s'@'%%'", database, name),
		}
		drop = []string{fmt.Sprintf("DROP USER '%s'@'%%'", name)}
	case KindSQLServer:
		on = database
		create = []string{
			fmt.Sprintf("CREATE LOGIN %s WITH PASSWORD = '%s', CHECK_POLICY = OFF", name, password),
			fmt.Sprintf("CREATE USER %s FOR LOGIN %[1]s", name),
		}
		drop = []string{
			fmt.Sprintf("DECLARE @kill nvarchar(max) = ''; SELECT @kill += CONCAT('KILL ', session_id, ';') FROM sys.dm_exec_sessions WHERE login_name = '%s'; EXEC (@kill)", name),
			"DROP USER " + name,
			"DROP LOGIN " + name,
		}
	}
	if err := server.exec(on, create...); err != nil {
		t.Fatalf("create a login: %v", err)
	}
	server.cleanup(t, func() error { return server.exec(on, drop...) })
	u.User = url.UserPassword(name, password)
	return u.String()
}

// server returns the database server that takes writes: s, or the one behind it if s is a pooler
// or a standby.
func (s *Server) server() *Server {
	if s.target != nil {
		return s.target
	}
	return s
}

// cleanup undoes something when the test ends, unless the whole server goes then.
func (s *Server) cleanup(t testing.TB, undo func() error) {
	if s.private {
		return
	}
	t.Cleanup(func() {
		if err := undo(); err != nil {
			t.Errorf("clean up the %s server: %v", s.Kind, err)
		}
	})
}

// on returns the administrator's DSN on a database.
func (s *Server) on(database string) string {
	u := *s.dsn
	if s.Kind == KindSQLServer {
		q := u.Query()
		q.Set("database", database)
		u.RawQuery = q.Encode()
	} else {
		u.Path = "/" + database
	}
	return u.String()
}

func databaseOf(u *url.URL) string {
	if u.Scheme == string(KindSQLServer) {
		return u.Query().Get("database")
	}
	return strings.TrimPrefix(u.Path, "/")
}

// exec runs the administrator's statements on a database, "" for the default one.
func (s *Server) exec(database string, statements ...string) error {
	dsn := s.DSN()
	if database != "" {
		dsn = s.on(database)
	}
	db, err := open(s.Kind, dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), statementTimeout)
	defer cancel()
	for _, statement := range statements {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}

func (s *Server) dropDatabase(name string) error {
	switch s.Kind {
	case KindPostgres:
		return s.exec("", "DROP DATABASE "+name+" WITH (FORCE)")
	case KindSQLServer:
		return s.exec("", "ALTER DATABASE "+name+" SET SINGLE_USER WITH ROLLBACK IMMEDIATE", "DROP DATABASE "+name)
	default:
		// DROP DATABASE waits for the transactions of sessions that it does not end.
		if err := s.killSessions(name); err != nil {
			return err
		}
		return s.exec("", "DROP DATABASE "+name)
	}
}

// killSessions ends the sessions on a database of MySQL or MariaDB, and with them their locks,
// which belong to the whole server.
func (s *Server) killSessions(database string) error {
	db, err := open(s.Kind, s.DSN())
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), statementTimeout)
	defer cancel()
	var failure error
	err = poll(ctx, func() bool {
		ids, err := queryInts(ctx, db, "SELECT id FROM information_schema.processlist WHERE db = ?", database)
		if err != nil {
			failure = err
			return true
		}
		for _, id := range ids {
			_, err := db.ExecContext(ctx, fmt.Sprintf("KILL %d", id))
			const noSuchThread = 1094
			var refused *mysql.MySQLError
			if err != nil && !(errors.As(err, &refused) && refused.Number == noSuchThread) {
				failure = err
				return true
			}
		}
		return len(ids) == 0
	})
	return errors.Join(failure, err)
}

func queryInts(ctx context.Context, db *sql.DB, query string, args ...any) ([]int64, error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var values []int64
	for rows.Next() {
		var v int64
		if err := rows.Scan(&v); err != nil {
			return nil, err
		}
		values = append(values, v)
	}
	return values, rows.Err()
}

// objectName makes a name that is unique and tells the test that it comes from.
func objectName(t testing.TB) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		default:
			return '_'
		}
	}, strings.ToLower(t.Name()))
	return fmt.Sprintf("t_%.30s_%s", name, random())
}

// random returns an unguessable lower-case word.
func random() string { return strings.ToLower(rand.Text()[:13]) }
