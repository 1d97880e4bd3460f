package tests

import (
	"context"
	"database/sql"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/sqlserver"
	"github.com/dblock-go/dblock/tests/conformance"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestSQLServer(t *testing.T) {
	conformance.Run(t, &conformance.Harness{
		Server:  servers.SQLServer,
		Private: private(servers.KindSQLServer),
		Open: func(t testing.TB, dsn string, maxConns int) (dblock.DB, error) {
			if maxConns == 0 {
				return opened[*sqlserver.DB](t)(sqlserver.Open(t.Context(), dsn))
			}
			pool := limit(t, servers.SQLServer(t).Open(t, dsn), maxConns)
			return opened[*sqlserver.DB](t)(sqlserver.New(t.Context(), pool))
		},
		Kill: "KILL %d", // there is nothing gentler, so no Interrupt
		SessionOf: func(ctx context.Context, native any) (id int64, err error) {
			err = native.(*sql.Tx).QueryRowContext(ctx, "SELECT @@SPID").Scan(&id)
			return id, err
		},
	})
}
