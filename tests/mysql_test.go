package tests

import (
	"context"
	"database/sql"
	"testing"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/tests/conformance"
	"github.com/dblock-go/dblock/tests/servers"
)

// mysqlHarness serves MySQL and MariaDB, which share a dialect and differ in
// many facts.
func mysqlHarness(server func(testing.TB) *servers.Server, kind servers.Kind) *conformance.Harness {
	return &conformance.Harness{
		Server:  server,
		Private: private(kind),
		Open: func(t testing.TB, dsn string, maxConns int) (dblock.DB, error) {
			if maxConns == 0 {
				return opened[*mysql.DB](t)(mysql.Open(t.Context(), dsn))
			}
			pool := limit(t, server(t).Open(t, dsn), maxConns)
			return opened[*mysql.DB](t)(mysql.New(t.Context(), pool))
		},
		Kill:      "KILL %d",
		Interrupt: "KILL QUERY %d",
		OfDriver:  finds[*driver.MySQLError],
		SessionOf: func(ctx context.Context, native any) (id int64, err error) {
			err = native.(*sql.Tx).QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id)
			return id, err
		},
	}
}

func TestMySQL(t *testing.T) {
	conformance.Run(t, mysqlHarness(servers.MySQL, servers.KindMySQL))
}
