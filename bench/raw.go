//go:build linux

package bench

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock/tests/servers"
)

// raw locks as an application does that has nothing but its driver. Each is the
// fastest way of its driver: cached prepared statements on PostgreSQL, text on
// MySQL and MariaDB.
type raw interface {
	lock(ctx context.Context, key int64) error
	unlock(ctx context.Context, key int64) error
	// done closes the connection, or gives it back to its pool.
	done() error
}

// rawPool hands out connections.
type rawPool func(ctx context.Context) (raw, error)

// rawKeys are numbers that no other scenario uses, by the same rule as keys.
func rawKeys(scenario string, n int) []int64 {
	var ids []int64
	for _, key := range keys("raw "+scenario, n) {
		ids = append(ids, key.ID())
	}
	return ids
}

// dial opens one connection.
func dial(ctx context.Context, kind servers.Kind, dsn string) (raw, error) {
	if kind == servers.KindPostgres {
		conn, err := pgx.Connect(ctx, dsn)
		if err != nil {
			return nil, err
		}
		return pgxRaw{conn, func() error { return conn.Close(context.Background()) }}, nil
	}
	pool, err := openMySQL(dsn)
	if err != nil {
		return nil, err
	}
	conn, err := pool.Conn(ctx)
	if err != nil {
		return nil, errors.Join(err, pool.Close())
	}
	return sqlRaw{conn, func() error { return errors.Join(conn.Close(), pool.Close()) }}, nil
}

// openMySQL lets the driver write arguments into the statement's text, which saves
// the round trips that prepare it.
func openMySQL(dsn string) (*sql.DB, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, err
	}
	config := mysql.NewConfig()
	config.Net, config.Addr, config.DBName = "tcp", u.Host, strings.TrimPrefix(u.Path, "/")
	config.User = u.User.Username()
	config.Passwd, _ = u.User.Password()
	config.InterpolateParams = true
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

func (d *database) dial(t testing.TB) raw {
	t.Helper()
	conn, err := dial(t.Context(), d.kind, d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.done(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// pool opens a pool with that many connections.
func (d *database) pool(t testing.TB, size int) rawPool {
	t.Helper()
	if d.kind == servers.KindPostgres {
		pool := d.pgxPool(t, size)
		return func(ctx context.Context) (raw, error) {
			conn, err := pool.Acquire(ctx)
			if err != nil {
				return nil, err
			}
			return pgxRaw{conn.Conn(), func() error { conn.Release(); return nil }}, nil
		}
	}
	pool, err := openMySQL(d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pool.Close() })
	pool.SetMaxOpenConns(size)
	pool.SetMaxIdleConns(size)
	return func(ctx context.Context) (raw, error) {
		conn, err := pool.Conn(ctx)
		if err != nil {
			return nil, err
		}
		return sqlRaw{conn, conn.Close}, nil
	}
}

func (d *database) pgxPool(t testing.TB, size int) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(d.dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = int32(size)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// rawPair locks and unlocks on one connection.
func rawPair(t testing.TB, d *database) op {
	conn, id := d.dial(t), rawKeys("pair", 1)[0]
	return func(ctx context.Context, _ int) error {
		if err := conn.lock(ctx, id); err != nil {
			return err
		}
		return conn.unlock(ctx, id)
	}
}

type pgxRaw struct {
	conn *pgx.Conn
	end  func() error
}

func (r pgxRaw) lock(ctx context.Context, key int64) error {
	_, err := r.conn.Exec(ctx, "SELECT pg_advisory_lock($1)", key)
	return err
}

func (r pgxRaw) unlock(ctx context.Context, key int64) error {
	var held bool
	if err := r.conn.QueryRow(ctx, "SELECT pg_advisory_unlock($1)", key).Scan(&held); err != nil {
		return err
	}
	return must("pg_advisory_unlock", held)
}

func (r pgxRaw) done() error { return r.end() }

type sqlRaw struct {
	conn *sql.Conn
	end  func() error
}

const forEver = 1_000_000 // seconds: MariaDB has no other name for it

func (r sqlRaw) lock(ctx context.Context, key int64) error {
	var got bool
	if err := r.conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, ?)", strconv.FormatInt(key, 10), forEver).Scan(&got); err != nil {
		return err
	}
	return must("GET_LOCK", got)
}

func (r sqlRaw) unlock(ctx context.Context, key int64) error {
	var held bool
	if err := r.conn.QueryRowContext(ctx, "SELECT RELEASE_LOCK(?)", strconv.FormatInt(key, 10)).Scan(&held); err != nil {
		return err
	}
	return must("RELEASE_LOCK", held)
}

func (r sqlRaw) done() error { return r.end() }

func must(function string, ok bool) error {
	if !ok {
		return fmt.Errorf("%s did not return true", function)
	}
	return nil
}
