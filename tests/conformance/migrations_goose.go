package conformance

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/pressly/goose/v3/lock/locktesting"

	"github.com/dblock-go/dblock/migrations"
)

func gooseDialect(d *Database) goose.Dialect {
	switch d.DB.Name() {
	case "postgres":
		return goose.DialectPostgres
	case "sqlserver":
		return goose.DialectMSSQL
	}
	return goose.DialectMySQL
}

func sessionLocker(t testing.TB, d *Database) lock.SessionLocker {
	t.Helper()
	l, err := migrations.SessionLocker(d.DB)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// The providers share one locker, as those of one process may.
func migrationsGooseProviders(t *testing.T, h *Harness) {
	d := h.Database(t)
	locker := sessionLocker(t, d)
	fsys := files(createEntries, insertEntry)
	locktesting.TestProviderLocking(t, func(t *testing.T) *goose.Provider {
		p, err := goose.NewProvider(gooseDialect(d), d.DB.SQL(), fsys, goose.WithSessionLocker(locker))
		if err != nil {
			t.Fatal(err)
		}
		// Goose by itself creates the version table without the locker.
		if _, err := p.HasPending(testContext(t)); err != nil {
			t.Fatal(err)
		}
		return p
	})
	d.recorded(t, versionTable, 0, 1, 2)
	d.nothingLeft(t)
}

func migrationsGooseLockers(t *testing.T, h *Harness) {
	d := h.Database(t)
	locktesting.TestConcurrentLocking(t, d.DB.SQL(), func(t *testing.T) lock.Locker {
		return &connLocker{SessionLocker: sessionLocker(t, d)}
	}, time.Second)
	d.nothingLeft(t)
}

// connLocker makes a Locker of a SessionLocker: goose tests only the former alone.
type connLocker struct {
	lock.SessionLocker
	mu   sync.Mutex
	conn *sql.Conn
}

func (l *connLocker) Lock(ctx context.Context, db *sql.DB) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	if err := l.SessionLock(ctx, conn); err != nil {
		if closeErr := conn.Close(); !errors.Is(closeErr, sql.ErrConnDone) {
			err = errors.Join(err, closeErr)
		}
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn = conn
	return nil
}

func (l *connLocker) Unlock(ctx context.Context, _ *sql.DB) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Join(l.SessionUnlock(ctx, l.conn), l.conn.Close())
}
