//go:build linux

package bench

import (
	"context"
	"testing"

	migrate "github.com/golang-migrate/migrate/v4/database"
	migratemysql "github.com/golang-migrate/migrate/v4/database/mysql"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"

	"github.com/dblock-go/dblock/tests/servers"
)

// migratePair is golang-migrate's own Lock and Unlock, over a database/sql handle
// with the driver's defaults. Its lock belongs to the database: there is one key.
func migratePair(t testing.TB, d *database) op {
	pool := d.server.Open(t, d.dsn)
	var driver migrate.Driver
	var err error
	if d.kind == servers.KindPostgres {
		driver, err = migratepgx.WithInstance(pool, &migratepgx.Config{})
	} else {
		driver, err = migratemysql.WithInstance(pool, &migratemysql.Config{})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := driver.Close(); err != nil {
			t.Error(err)
		}
	})
	return func(context.Context, int) error {
		if err := driver.Lock(); err != nil {
			return err
		}
		return driver.Unlock()
	}
}
