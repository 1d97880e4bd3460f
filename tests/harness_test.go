package tests

import (
	"database/sql"
	"errors"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/tests/servers"
)

func private(kind servers.Kind) func(testing.TB, ...string) *servers.Server {
	return func(t testing.TB, settings ...string) *servers.Server {
		return servers.Start(t, kind, settings...)
	}
}

// finds reports whether errors.As finds an error of type E.
func finds[E error](err error) bool {
	var e E
	return errors.As(err, &e)
}

// limit is a pool as an application sets it up, closed at the end of the test.
func limit(t testing.TB, pool *sql.DB, maxConns int) *sql.DB {
	pool.SetMaxOpenConns(maxConns)
	pool.SetMaxIdleConns(maxConns) // 0 keeps none: every use of the pool gets a fresh connection
	t.Cleanup(func() {
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	})
	return pool
}

// opened closes the DB that a constructor returned at the end of the test.
func opened[DB dblock.DB](t testing.TB) func(DB, error) (dblock.DB, error) {
	return func(db DB, err error) (dblock.DB, error) {
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() {
			if err := db.Close(); err != nil {
				t.Error(err)
			}
		})
		return db, nil
	}
}
