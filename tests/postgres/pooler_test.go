package postgres_test

import (
	"context"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// console is an administrator's command to a PgBouncer.
func console(t testing.TB, pooler *servers.Server, command string) {
	t.Helper()
	u, err := url.Parse(pooler.DSN())
	must(t, err)
	u.Path = "/pgbouncer"
	config, err := pgx.ParseConfig(u.String())
	must(t, err)
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	c, err := pgx.ConnectConfig(t.Context(), config)
	must(t, err)
	defer c.Close(context.Background())
	_, err = c.Exec(t.Context(), command)
	must(t, err)
}

// Each session leaves a mark on its server process, since two sessions on one would
// both be granted a key.
func TestPoolerThatChangesItsModeGivesNoKeyTwice(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			pooler := servers.PgBouncer(t, servers.Postgres(t), "session", "default_pool_size=6")
			dsn := pooler.Database(t)
			if way.name != "pq" {
				dsn += "&default_query_exec_mode=exec" // else the names of prepared statements collide
			}
			a, b := opened(t)(way.open(t, dsn)), opened(t)(way.open(t, dsn))
			before := session(t, a)
			lock(t, before, keys(1))
			console(t, pooler, "SET pool_mode=transaction")
			granted := func(db *postgres.DB, id int64) dialect.Session {
				s, err := db.OpenSession(t.Context(), dialect.SessionOptions{})
				if err == nil {
					t.Cleanup(func() { must(t, s.Close()) })
					_, err = s.Acquire(t.Context(), try(keys(id)))
				}
				if err != nil {
					return nil
				}
				return s
			}
			stillHeld := func(s dialect.Session, id int64) bool {
				ok, err := dialect.HoldsAll(t.Context(), s, keys(id))
				return ok && err == nil
			}
			for id := range int64(20) {
				first, second := granted(a, id+1), granted(b, id+1)
				if first != nil && second != nil && stillHeld(first, id+1) && stillHeld(second, id+1) {
					t.Fatalf("key %d was granted twice", id+1)
				}
				if second != nil && id == 0 && stillHeld(before, 1) {
					t.Fatal("the key of a holder from before was granted again")
				}
			}
		})
	}
}

func TestPoolerThatKeepsTheLocksOfClientsThatAreGoneIsRefused(t *testing.T) {
	for i, reset := range []string{"", "RESET ALL", "DEALLOCATE ALL"} {
		t.Run(reset+"/"+ways[i].name, func(t *testing.T) {
			t.Parallel()
			server := servers.Postgres(t)
			dsn := servers.PgBouncer(t, server, "session", "server_reset_query="+reset).Database(t)
			_, err := ways[i].open(t, dsn)
			wantClass(t, err, dialect.Unsafe)
			wantText(t, err, "server_reset_query")
			u, err := url.Parse(dsn)
			must(t, err)
			direct, err := url.Parse(server.DSN())
			must(t, err)
			u.Host = direct.Host
			admin := server.Open(t, u.String())
			eventually(t, "no lock of the probe is left", func() bool {
				return value[int](t, admin, "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database() WHERE locktype = 'advisory'") == 0
			})
		})
	}
}
