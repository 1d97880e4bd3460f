package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/lib/pq"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// Where the driver is not pgx, the connection for fencing numbers is one of the pool's.
// Once they are known to be needed, transactions leave it one.
func TestTransactionsLeaveAConnectionForFencingNumbers(t *testing.T) {
	connector, err := pq.NewConnector(servers.Postgres(t).Database(t))
	must(t, err)
	pool := sql.OpenDB(connector)
	t.Cleanup(func() { must(t, pool.Close()) })
	pool.SetMaxOpenConns(2)
	db := opened(t)(postgres.NewSQL(t.Context(), pool))
	table(t, db, dialect.Table{})
	fence := func(tx dialect.Tx) error {
		_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys(1), Fence: true})
		return err
	}

	first, err := db.Begin(t.Context(), nil)
	must(t, err)
	second, err := db.Begin(t.Context(), nil)
	must(t, err)
	wantClass(t, fence(first), dialect.Capacity)
	must(t, errors.Join(first.Rollback(t.Context()), second.Rollback(t.Context())))

	first = begin(t, db, nil)
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = db.Begin(short, nil)
	wantClass(t, err, dialect.Timeout)
	must(t, fence(first))
}

// What the server refuses on the connection beside the transaction is no trouble of
// connecting.
func TestARefusalBesideTheTransactionIsTheServers(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		exec(t, db.SQL(), "ALTER TABLE locks ADD COLUMN owner text NOT NULL")
		_, err := db.LockRows(t.Context(), begin(t, db, nil), dialect.RowRequest{Keys: shared(1)})
		wantText(t, err, "23502")
		wantClass(t, err, "")
	})
}
