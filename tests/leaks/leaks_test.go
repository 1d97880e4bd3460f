// Package leaks shows that what is closed leaves no goroutine behind.
package leaks

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/dialect/sqlserver"
	"github.com/dblock-go/dblock/rowlock"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m) }

func TestPostgreSQL(t *testing.T) {
	leavesNothing(t, servers.Postgres(t), "SELECT pg_terminate_backend(%d)",
		func(ctx context.Context, dsn string) (dblock.DB, error) { return postgres.Open(ctx, dsn) })
}

func TestMySQL(t *testing.T) {
	leavesNothing(t, servers.MySQL(t), "KILL %d",
		func(ctx context.Context, dsn string) (dblock.DB, error) { return mysql.Open(ctx, dsn) })
}

func TestMariaDB(t *testing.T) {
	leavesNothing(t, servers.MariaDB(t), "KILL %d",
		func(ctx context.Context, dsn string) (dblock.DB, error) { return mysql.Open(ctx, dsn) })
}

func TestSQLServer(t *testing.T) {
	leavesNothing(t, servers.SQLServer(t), "KILL %d",
		func(ctx context.Context, dsn string) (dblock.DB, error) { return sqlserver.Open(ctx, dsn) })
}

// leavesNothing goes through what starts goroutines: holds, waits that end in
// every way, losses, transactions.
func leavesNothing(t *testing.T, server *servers.Server, kill string, open func(context.Context, string) (dblock.DB, error)) {
	dsn := server.Database(t)
	admin := server.Open(t, dsn)
	if err := admin.PingContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := goleak.IgnoreCurrent()

	db, err := open(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	use(t, db, admin, kill)
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
}

func use(t *testing.T, db dblock.DB, admin *sql.DB, kill string) {
	ctx, key := t.Context(), dblock.NewKey("job")
	locks, err := advisory.New(db, &advisory.Options{
		WaitLimit: 300 * time.Millisecond,
		Observer:  dblock.ObserverFunc(func(context.Context, dblock.Event) {}),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close()
	lock, err := locks.Lock(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := locks.TryLock(ctx, key); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("try: %v", err)
	}
	if _, err := locks.Lock(ctx, key); !errors.Is(err, dblock.ErrTimeout) {
		t.Errorf("wait: %v", err)
	}
	if err := lock.Check(ctx); err != nil {
		t.Error(err)
	}
	holders, err := db.Inspect(ctx, key.Resolve(db.Features().Scope))
	if err != nil || len(holders) == 0 {
		t.Fatalf("holders %v: %v", holders, err)
	}
	if _, err := admin.ExecContext(ctx, fmt.Sprintf(kill, holders[0].Session)); err != nil {
		t.Fatal(err)
	}
	<-lock.Done()
	if _, err := locks.Lock(ctx, key); err != nil { // held when the locker is closed
		t.Error(err)
	}
	err = rowlock.InTx(ctx, rowlock.New(db), func(context.Context, dblock.Tx) error { return nil }, key)
	if !errors.Is(err, dblock.ErrSetup) {
		t.Errorf("rows without a table: %v", err)
	}
}
