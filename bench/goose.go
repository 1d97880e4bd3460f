//go:build linux

package bench

import (
	"context"
	"errors"
	"testing"

	"github.com/pressly/goose/v3/lock"
)

// goosePairs are goose's session locker, which is for PostgreSQL only, in each goroutine on a connection that the
// pool gives it for its lock.
func goosePairs(goroutines int) func(testing.TB, *database) op {
	return func(t testing.TB, d *database) op {
		pool := d.server.Open(t, d.dsn)
		pool.SetMaxOpenConns(goroutines)
		pool.SetMaxIdleConns(goroutines)
		var lockers []lock.SessionLocker
		for _, id := range rawKeys("goose", goroutines) {
			locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(id))
			if err != nil {
				t.Fatal(err)
			}
			lockers = append(lockers, locker)
		}
		return func(ctx context.Context, goroutine int) error {
			conn, err := pool.Conn(ctx)
			if err != nil {
				return err
			}
			err = lockers[goroutine].SessionLock(ctx, conn)
			if err == nil {
				err = lockers[goroutine].SessionUnlock(ctx, conn)
			}
			return errors.Join(err, conn.Close())
		}
	}
}
