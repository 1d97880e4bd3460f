package postgres_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/proxy"
	"github.com/dblock-go/dblock/tests/servers"
)

// silentProxy leads to a server until silence is called: from then on it accepts
// connections, but passes nothing on, like a network that went dead.
func silentProxy(t testing.TB, dsn string) (throughProxy string, silence func()) {
	t.Helper()
	p := proxy.New(t, dsn)
	return p.DSN, func() { must(t, p.Poison(proxy.Silence)) }
}

// lib/pq reads on after a context has ended. That nothing here returns is a test
// that times out.
func TestCallsEndWithTheirContextOnADeadNetwork(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			dsn, silence := silentProxy(t, servers.Postgres(t).Database(t))
			db := opened(t)(way.open(t, dsn))
			calls := map[string]func(ctx context.Context, s dialect.Session) error{
				"lock": func(ctx context.Context, s dialect.Session) error {
					_, err := s.Acquire(ctx, dialect.Request{Keys: keys(2)})
					return err
				},
				"try": func(ctx context.Context, s dialect.Session) error {
					_, err := s.Acquire(ctx, try(keys(1, 2)))
					return err
				},
				"release": func(ctx context.Context, s dialect.Session) error { return s.Release(ctx, keys(1)) },
				"held": func(ctx context.Context, s dialect.Session) error {
					_, err := dialect.HoldsAll(ctx, s, keys(1))
					return err
				},
				"ping":  func(ctx context.Context, s dialect.Session) error { return s.Ping(ctx) },
				"close": func(context.Context, dialect.Session) error { return nil },
			}
			open := map[string]dialect.Session{}
			for name := range calls {
				s, err := db.OpenSession(t.Context(), dialect.SessionOptions{})
				must(t, err)
				lock(t, s, shared(1))
				open[name] = s
			}
			silence()
			var ended sync.WaitGroup
			bounded := func(call func(ctx context.Context) error) error {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				return call(ctx)
			}
			for name, call := range calls {
				s := open[name]
				ended.Go(func() {
					err := bounded(func(ctx context.Context) error { return call(ctx, s) })
					if want := map[bool]dialect.Class{false: dialect.Timeout}[name == "close"]; dialect.ClassOf(err) != want {
						t.Errorf("%s: error %v, want class %q", name, err, want)
					}
					if name != "close" {
						for _, err := range []error{s.Ping(t.Context()), s.Idle(t.Context())} {
							if dialect.ClassOf(err) != dialect.Lost {
								t.Errorf("after %s: error %v, want a lost session", name, err)
							}
						}
					}
					if err := s.Close(); err != nil && dialect.ClassOf(err) != dialect.Lost {
						t.Errorf("close after %s: %v", name, err)
					}
				})
			}
			ended.Go(func() {
				err := bounded(func(ctx context.Context) error {
					_, err := db.OpenSession(ctx, dialect.SessionOptions{})
					return err
				})
				if dialect.ClassOf(err) != dialect.Timeout {
					t.Errorf("open: error %v, want a timeout", err)
				}
			})
			ended.Wait()
		})
	}
}

// So do constructors, of a pool that has a connection already and of one that has
// none.
func TestConstructorsEndWithTheirContextOnADeadNetwork(t *testing.T) {
	for name, connect := range map[string]func(dsn string) (driver.Connector, error){
		"stdlib": func(dsn string) (driver.Connector, error) {
			config, err := pgx.ParseConfig(dsn)
			return stdlib.GetConnector(*config), err
		},
		"pq": func(dsn string) (driver.Connector, error) { return pq.NewConnector(dsn) },
	} {
		for _, connected := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, connected %t", name, connected), func(t *testing.T) {
				dsn, silence := silentProxy(t, servers.Postgres(t).Database(t))
				connector, err := connect(dsn)
				must(t, err)
				pool := sql.OpenDB(connector)
				t.Cleanup(func() { pool.Close() })
				if connected {
					must(t, pool.PingContext(t.Context()))
				}
				silence()
				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				defer cancel()
				_, err = postgres.NewSQL(ctx, pool)
				wantClass(t, err, dialect.Timeout)
			})
		}
	}
}
