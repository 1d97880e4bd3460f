package tests

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/conformance"
	"github.com/dblock-go/dblock/tests/servers"
)

func postgresHarness(open func(t testing.TB, dsn string, maxConns int) (dblock.DB, error)) *conformance.Harness {
	return &conformance.Harness{
		Server:    servers.Postgres,
		Private:   private(servers.KindPostgres),
		Open:      open,
		Kill:      "SELECT pg_terminate_backend(%d)",
		Interrupt: "SELECT pg_cancel_backend(%d)",
		OfDriver:  func(err error) bool { return finds[*pgconn.PgError](err) || finds[*pq.Error](err) },
		SessionOf: func(ctx context.Context, native any) (id int64, err error) {
			switch tx := native.(type) {
			case pgx.Tx:
				err = tx.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&id)
			case *sql.Tx:
				err = tx.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&id)
			}
			return id, err
		},
	}
}

func TestPostgreSQLThroughPgx(t *testing.T) {
	conformance.Run(t, postgresHarness(func(t testing.TB, dsn string, maxConns int) (dblock.DB, error) {
		config, err := pgxpool.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		if maxConns > 0 {
			config.MaxConns = int32(maxConns)
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		return opened[*postgres.DB](t)(postgres.New(t.Context(), pool))
	}))
}

func TestPostgreSQLThroughDatabaseSQL(t *testing.T) {
	conformance.Run(t, postgresHarness(func(t testing.TB, dsn string, maxConns int) (dblock.DB, error) {
		config, err := pgx.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		return opened[*postgres.DB](t)(postgres.NewSQL(t.Context(), limit(t, stdlib.OpenDB(*config), maxConns)))
	}))
}

func TestPostgreSQLThroughPq(t *testing.T) {
	conformance.Run(t, postgresHarness(func(t testing.TB, dsn string, maxConns int) (dblock.DB, error) {
		connector, err := pq.NewConnector(dsn)
		if err != nil {
			t.Fatal(err)
		}
		return opened[*postgres.DB](t)(postgres.NewSQL(t.Context(), limit(t, sql.OpenDB(connector), maxConns)))
	}))
}
