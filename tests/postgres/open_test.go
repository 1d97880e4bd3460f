package postgres_test

import (
	"context"
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// unused is an address of this machine at which nobody listens.
func unused(t testing.TB) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().String()
}

func TestOpenNamesWhyItCannotConnect(t *testing.T) {
	const password = "Tr0ub4dor&3"
	dsn := servers.Postgres(t).Database(t)
	change := func(f func(*url.URL)) string {
		u, err := url.Parse(dsn)
		must(t, err)
		f(u)
		return u.String()
	}
	for _, test := range []struct{ name, dsn, text string }{
		{"wrong password", change(func(u *url.URL) { u.User = url.UserPassword(u.User.Username(), password) }), "28P01"},
		{"unknown user", change(func(u *url.URL) { u.User = url.UserPassword("nobody", password) }), "user"},
		{"unknown database", change(func(u *url.URL) { u.Path = "/nowhere" }), "create the database"},
		{"nobody listens", change(func(u *url.URL) { u.Host = unused(t); u.User = url.UserPassword("x", password) }), "is the server running"},
		{"unknown host", "postgres://x:Tr0ub4dor%263@nowhere.invalid/x", "nowhere.invalid"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := postgres.Open(t.Context(), test.dsn)
			wantClass(t, err, dialect.Unavailable)
			wantText(t, err, test.text)
			if strings.Contains(err.Error(), password) {
				t.Errorf("%v tells the password", err)
			}
			for _, way := range ways {
				_, err := way.open(t, test.dsn)
				wantClass(t, err, dialect.Unavailable)
				if strings.Contains(err.Error(), password) {
					t.Errorf("%s: %v tells the password", way.name, err)
				}
			}
		})
	}
}

func TestOpenTellsNoPasswordOfADSNThatItDoesNotUnderstand(t *testing.T) {
	const secret = "s3cr"
	for _, dsn := range []string{
		"postgres://user:s3cr@host:port/db",
		"postgres://user:s3cr@host/db?sslmode=wrong",
		"postgres://user:s3cr/et@host:5432/db",
		"postgres://user:a%zzs3cr@host/db",
		"postgres://user:a?b#s3cr@host:x/db",
		"host=h password='a\\'s3cr' port=x",
		"host=h password = s3cr port=x",
		"postgres://user:a@s3cr/b@127.0.0.1:1/db",
		"postgres://user:a@s3cr@127.0.0.1:1/db",
		"postgresql://user:1/s3cr@127.0.0.1:1/db",
		"mysql://user:s3cr@host/db",
		"s3cr",
	} {
		_, err := postgres.Open(t.Context(), dsn)
		wantClass(t, err, dialect.InvalidOption)
		wantText(t, err, "postgres://")
		for err := range tree(err) {
			if strings.Contains(err.Error(), secret) {
				t.Errorf("%s: %v tells the password", dsn, err)
			}
			var parse *pgconn.ParseConfigError
			if errors.As(err, &parse) {
				t.Errorf("%s: %T keeps the password", dsn, parse)
			}
		}
	}
}

func TestOpenTakesAnAtSignWhereItHidesNothing(t *testing.T) {
	dsn := servers.Postgres(t).Database(t)
	opened(t)(postgres.Open(t.Context(), dsn+"&application_name=me@here"))
	for _, dsn := range []string{
		"postgres://user:p%40ss%2Fword@" + unused(t) + "/db",
		"host=127.0.0.1 port=1 password=postgres://a@b@c",
	} {
		_, err := postgres.Open(t.Context(), dsn)
		wantClass(t, err, dialect.Unavailable)
	}
}

func TestErrorOfSeveralHostsIsOneLine(t *testing.T) {
	_, err := postgres.Open(t.Context(), "postgres://x:y@"+unused(t)+","+unused(t)+"/x")
	wantClass(t, err, dialect.Unavailable)
	wantOneLine(t, err)
	var connect *pgconn.ConnectError
	if !errors.As(err, &connect) || strings.Count(err.Error(), "refused") < 2 {
		t.Errorf("%v hides its causes", err)
	}
}

func TestClosedPoolIsRefused(t *testing.T) {
	dsn := servers.Postgres(t).Database(t)
	pool, err := pgxpool.New(t.Context(), dsn)
	must(t, err)
	pool.Close()
	_, err = postgres.New(t.Context(), pool)
	wantClass(t, err, dialect.Unavailable)
	wantText(t, err, "closed pool")

	sqlPool := servers.Postgres(t).Open(t, dsn)
	must(t, sqlPool.Close())
	_, err = postgres.NewSQL(t.Context(), sqlPool)
	wantClass(t, err, dialect.Unavailable)
}

func TestPoolOfAnotherDatabaseIsRefused(t *testing.T) {
	server := servers.MariaDB(t)
	_, err := postgres.NewSQL(t.Context(), server.Open(t, server.Database(t)))
	wantClass(t, err, dialect.Unsupported)
	wantText(t, err, "no PostgreSQL")
}

// tree walks an error and its causes.
func tree(err error) func(yield func(error) bool) {
	return func(yield func(error) bool) { walk(err, yield) }
}

func walk(err error, yield func(error) bool) bool {
	if err == nil {
		return true
	}
	if !yield(err) {
		return false
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return walk(e.Unwrap(), yield)
	case interface{ Unwrap() []error }:
		for _, cause := range e.Unwrap() {
			if !walk(cause, yield) {
				return false
			}
		}
	}
	return true
}

func TestOpenWithEndedContext(t *testing.T) {
	dsn := servers.Postgres(t).Database(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := postgres.Open(ctx, dsn)
	wantClass(t, err, dialect.Canceled)
	past, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	_, err = postgres.Open(past, dsn)
	wantClass(t, err, dialect.Timeout)
	if strings.Contains(err.Error(), "timed out: timeout") {
		t.Errorf("%v says it twice", err)
	}

	db := opened(t)(postgres.Open(t.Context(), dsn))
	_, err = db.OpenSession(ctx, dialect.SessionOptions{})
	wantClass(t, err, dialect.Canceled)
	_, err = db.Begin(past, nil)
	wantClass(t, err, dialect.Timeout)
}

func TestConstructorsRefuseWhatCannotBeMeant(t *testing.T) {
	_, err := postgres.New(t.Context(), nil)
	wantClass(t, err, dialect.InvalidOption)
	_, err = postgres.NewSQL(t.Context(), nil)
	wantClass(t, err, dialect.InvalidOption)
	dsn := servers.Postgres(t).Database(t)
	_, err = postgres.Open(t.Context(), dsn, nil, &postgres.Options{})
	wantClass(t, err, dialect.InvalidOption)
	opened(t)(postgres.Open(t.Context(), dsn, nil))
}

func TestSessionsUseTheHookOfThePool(t *testing.T) {
	dsn := servers.Postgres(t).Database(t)
	config, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	password := config.ConnConfig.Password
	config.ConnConfig.Password = "expired"
	config.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
		c.Password = password
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	session(t, opened(t)(postgres.New(t.Context(), pool)))
}

func TestTransactionPoolerIsRefused(t *testing.T) {
	for _, mode := range []string{"transaction", "statement"} {
		pooler := servers.PgBouncer(t, servers.Postgres(t), mode)
		dsn := pooler.Database(t)
		for _, way := range ways {
			t.Run(mode+" idle/"+way.name, func(t *testing.T) {
				for range 20 {
					_, err := way.open(t, dsn)
					wantClass(t, err, dialect.Unsafe)
					wantText(t, err, "session mode")
				}
			})
		}
		if mode == "statement" {
			continue
		}
		for _, way := range ways {
			t.Run(mode+"/"+way.name+" where allowed", func(t *testing.T) {
				dsn := dsn
				if way.name != "pq" { // it prepares nothing by name
					dsn += "&default_query_exec_mode=exec"
				}
				db := opened(t)(way.open(t, dsn, &postgres.Options{AllowUnsafe: true}))
				tx := begin(t, db, nil)
				must(t, db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: keys(1, 2)}))
				other := begin(t, db, nil)
				wantClass(t, db.AcquireTx(t.Context(), other, dialect.TxRequest{Keys: keys(1), Try: true}), dialect.NotAcquired)
				must(t, other.Rollback(t.Context()))
				must(t, tx.Commit(t.Context()))
			})
		}
	}
}

// Other clients of the pooler move server processes around, which can make a
// connection look as if it kept its own.
func TestPoolerIsRefusedUnderLoad(t *testing.T) {
	for mode, busy := range map[string]string{"transaction": "BEGIN; SELECT pg_sleep(0.0005); COMMIT", "statement": "SELECT pg_sleep(0.0005)"} {
		for _, size := range []string{"1", "2", "20"} {
			t.Run(mode+" pool of "+size, func(t *testing.T) {
				pooler := servers.PgBouncer(t, servers.Postgres(t), mode, "default_pool_size="+size)
				dsn := pooler.Database(t)
				stop := trafficThrough(t, pooler, dsn, 8, busy)
				for _, way := range ways {
					for range 20 {
						_, err := way.open(t, dsn)
						if dialect.ClassOf(err) != dialect.Unsafe || !strings.Contains(err.Error(), "session mode") {
							t.Fatalf("over %s: %v", way.name, err)
						}
					}
				}
				if n := stop(); n < 100 {
					t.Errorf("only %d statements went through the pooler meanwhile", n)
				}
			})
		}
	}
}

// trafficThrough keeps clients busy with a statement until stop, which returns how
// often it ran.
func trafficThrough(t *testing.T, pooler *servers.Server, dsn string, clients int, statement string) (stop func() int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var n atomic.Int64
	var running sync.WaitGroup
	for range clients {
		pool := pooler.Open(t, dsn)
		pool.SetMaxOpenConns(1)
		running.Go(func() {
			for ctx.Err() == nil {
				if _, err := pool.ExecContext(ctx, statement); err == nil {
					n.Add(1)
				}
			}
		})
	}
	stop = func() int64 {
		cancel()
		running.Wait()
		return n.Load()
	}
	t.Cleanup(func() { stop() })
	return stop
}

// What the probe finds out, it finds out without leaving a trace on the server
// connections, which the pooler hands on to others.
func TestProbeSetsNothingBehindAPooler(t *testing.T) {
	const settings = `SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings
		WHERE source = 'session' OR name IN ('application_name', 'lock_timeout', 'statement_timeout', 'idle_session_timeout',
			'tcp_keepalives_idle', 'tcp_user_timeout', 'client_connection_check_interval', 'synchronous_commit', 'default_transaction_isolation')`
	for _, mode := range []string{"transaction", "statement"} {
		t.Run(mode, func(t *testing.T) {
			pooler := servers.PgBouncer(t, servers.Postgres(t), mode, "default_pool_size=2")
			dsn := pooler.Database(t)
			other := pooler.Open(t, dsn+"&application_name=other")
			other.SetMaxOpenConns(1)
			before := value[string](t, other, settings)
			wantText(t, errors.New(before), "application_name=other")
			for _, way := range ways {
				_, err := way.open(t, dsn)
				wantClass(t, err, dialect.Unsafe)
			}
			// As many clients at once as there are server connections see all of them.
			processes := map[int64]bool{}
			for range 50 {
				if after := value[string](t, other, settings); after != before {
					t.Fatalf("before: %s\nafter:  %s", before, after)
				}
				processes[value[int64](t, other, "SELECT pg_backend_pid()")] = true
			}
			admin := servers.Postgres(t).Open(t, servers.Postgres(t).DSN())
			locks := value[int64](t, admin, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = ANY($1::int[])", pids(processes))
			if locks != 0 {
				t.Errorf("%d locks are left on the server connections", locks)
			}
		})
	}
}

func pids(set map[int64]bool) string {
	var list []string
	for pid := range set {
		list = append(list, strconv.FormatInt(pid, 10))
	}
	return "{" + strings.Join(list, ",") + "}"
}

func TestSessionThatMovedToAnotherServerProcessIsLost(t *testing.T) {
	pooler := servers.PgBouncer(t, servers.Postgres(t), "transaction")
	db := opened(t)(overPgx(t, pooler.Database(t)+"&default_query_exec_mode=exec", &postgres.Options{AllowUnsafe: true}))
	s := session(t, db)
	tx := begin(t, db, nil)
	if pid := pidOf(t, tx); pid != s.ID() {
		t.Fatalf("the pooler gave process %d and not %d, which was free", pid, s.ID())
	}
	_, err := s.Acquire(t.Context(), try(keys(1)))
	wantClass(t, err, dialect.Lost)
	wantText(t, err, "pooler in transaction mode")
	wantClass(t, s.Ping(t.Context()), dialect.Lost)
}

func TestSessionPoolerIsAccepted(t *testing.T) {
	pooler := servers.PgBouncer(t, servers.Postgres(t), "session", "ignore_startup_parameters=extra_float_digits,options", "default_pool_size=100")
	dsn := pooler.Database(t)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			for range 20 {
				db, err := way.open(t, dsn)
				must(t, err)
				must(t, db.Close())
			}
			db := opened(t)(way.open(t, dsn))
			s := session(t, db)
			lock(t, s, keys(1))
			ok, err := dialect.HoldsAll(t.Context(), s, keys(1))
			must(t, err)
			if !ok {
				t.Error("the lock is gone")
			}
			must(t, s.Close())
			eventually(t, "the key is free", func() bool { return len(held(t, db, s.ID(), false)) == 0 })
		})
	}
}

func TestSessionPoolerThatIsTooSmallIsNamed(t *testing.T) {
	pooler := servers.PgBouncer(t, servers.Postgres(t), "session", "default_pool_size=1", "query_wait_timeout=1")
	_, err := overPgx(t, pooler.Database(t))
	wantClass(t, err, dialect.Capacity)
	wantText(t, err, "default_pool_size")
}

func TestStandbyIsRefusedUntilItIsPromoted(t *testing.T) {
	standby := servers.Standby(t, servers.Postgres(t))
	dsn := standby.DSN()
	for _, way := range ways {
		_, err := way.open(t, dsn)
		wantClass(t, err, dialect.Unsafe)
		wantText(t, err, "the server is a standby")
		wantText(t, err, "connect to the primary")
	}
	allowed := opened(t)(overPgx(t, dsn, &postgres.Options{AllowUnsafe: true}))
	lock(t, session(t, allowed), keys(1))

	if !value[bool](t, standby.Open(t, dsn), "SELECT pg_promote()") {
		t.Fatal("the standby was not promoted")
	}
	for _, way := range ways {
		lock(t, session(t, opened(t)(way.open(t, dsn))), keys(2+int64(len(way.name))))
	}
}

// An application that has a single connection opens with its configuration.
func TestOpenWithTheConfigurationOfAConnection(t *testing.T) {
	conn, err := pgx.Connect(t.Context(), servers.Postgres(t).Database(t))
	must(t, err)
	defer conn.Close(t.Context())
	db, err := postgres.NewConfig(t.Context(), conn.Config())
	must(t, err)
	defer db.Close()
	s, err := db.OpenSession(t.Context(), dialect.SessionOptions{})
	must(t, err)
	defer s.Close()
	if s.ID() == int64(conn.PgConn().PID()) {
		t.Error("the session runs on the application's connection")
	}

	_, err = postgres.NewConfig(t.Context(), nil)
	wantClass(t, err, dialect.InvalidOption)
}
