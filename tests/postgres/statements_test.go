package postgres_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// The holder's statements have the types that go with what the application opened.
func TestHoldersGetTheTypesOfTheirDriver(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		s, err := db.OpenSession(t.Context(), dialect.SessionOptions{StatementGap: time.Minute})
		must(t, err)
		lock(t, s, keys(1))
		var pid int64
		conn := s.Statements().Native()
		switch c := conn.(type) {
		case *pgx.Conn:
			must(t, c.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		case dialect.Conn:
			must(t, c.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		}
		tx, err := s.Begin(t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
		must(t, err)
		var level string
		native := tx.Native()
		switch tx := native.(type) {
		case pgx.Tx:
			must(t, tx.QueryRow(t.Context(), "SHOW transaction_isolation").Scan(&level))
		case *sql.Tx:
			must(t, tx.QueryRowContext(t.Context(), "SHOW transaction_isolation").Scan(&level))
		}
		must(t, tx.Commit(t.Context()))
		if pid != s.ID() || level != "serializable" {
			t.Errorf("the statement ran on process %d instead of %d, the transaction was %s", pid, s.ID(), level)
		}
		_, isPgx := conn.(*pgx.Conn)
		_, isPgxTx := native.(pgx.Tx)
		if want := strings.HasSuffix(t.Name(), "/pgx"); isPgx != want || isPgxTx != want {
			t.Errorf("got %T and %T", conn, native)
		}
		must(t, s.Close())
		eventually(t, "the session's end", func() bool {
			return value[int](t, db.SQL(), "SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid) == 0
		})
	})
}

func TestHoldersStatementsRunAsThePoolSetsThemUp(t *testing.T) {
	config, err := pgxpool.ParseConfig(servers.Postgres(t).Database(t))
	must(t, err)
	config.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, "SET search_path = app; SET lock_timeout = '1s'")
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	db := opened(t)(postgres.New(t.Context(), pool))
	s, err := db.OpenSession(t.Context(), dialect.SessionOptions{StatementGap: time.Minute})
	must(t, err)
	defer s.Close()
	var path, timeout string
	must(t, s.Statements().Native().(*pgx.Conn).QueryRow(t.Context(), "SELECT current_setting('search_path'), current_setting('lock_timeout')").Scan(&path, &timeout))
	if path != "app" || timeout != "0" {
		t.Errorf("search_path %s and lock_timeout %s; the former is the pool's, the latter would end waits for keys", path, timeout)
	}
}

func TestSilenceOfABorrowedConnectionIsAllowedForAWhile(t *testing.T) {
	server := servers.Start(t, servers.KindPostgres, "idle_session_timeout=1000", "idle_in_transaction_session_timeout=1500")
	dsn := server.Database(t)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			db := opened(t)(way.open(t, dsn))
			conn, err := db.SQL().Conn(t.Context())
			must(t, err)
			defer conn.Close()
			limits := func() (idle, inTransaction string) {
				must(t, conn.QueryRowContext(t.Context(), "SELECT current_setting('idle_session_timeout'), current_setting('idle_in_transaction_session_timeout')").
					Scan(&idle, &inTransaction))
				return idle, inTransaction
			}
			s, err := db.OnConn(t.Context(), conn)
			must(t, err)
			restore, err := s.AllowSilence(t.Context())
			must(t, err)
			if idle, inTransaction := limits(); idle != "0" || inTransaction != "0" {
				t.Errorf("limits %s and %s are left", idle, inTransaction)
			}
			<-time.After(2500 * time.Millisecond)
			must(t, s.Ping(t.Context()))
			must(t, restore(context.Background()))
			if idle, inTransaction := limits(); idle != "1s" || inTransaction != "1500ms" {
				t.Errorf("limits %s and %s instead of those before", idle, inTransaction)
			}
		})
	}
}
