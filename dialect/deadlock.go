package dialect

import (
	"context"
	"fmt"
	"time"
)

// DeadlockSettings say how a transaction fares in a deadlock. The zero value leaves that
// to the server.
type DeadlockSettings struct {
	// Priority, from -10 to 10, is that of the transaction on SQL Server, which rolls back
	// the one with the lowest of those that deadlock. Default: 0.
	// https://learn.microsoft.com/sql/t-sql/statements/set-deadlock-priority-transact-sql
	Priority int
	// Timeout, at least 1 ms, is how long the transaction waits on PostgreSQL before it
	// looks, once, whether it waits in a deadlock, and fails if so. The one that looks later
	// is spared; but a deadlock that comes about after the others have looked lasts until it
	// does. It takes a superuser, or from PostgreSQL 15 on GRANT SET ON PARAMETER
	// deadlock_timeout. Default: the server's, 1 s.
	// https://www.postgresql.org/docs/current/runtime-config-locks.html#GUC-DEADLOCK-TIMEOUT
	Timeout time.Duration
}

// DeadlockSetter is implemented by databases with DeadlockSettings; see Features.
type DeadlockSetter interface {
	// SetDeadlock makes the settings those of a transaction that has just begun.
	SetDeadlock(ctx context.Context, tx Tx, s DeadlockSettings) error
}

// Check returns an error of class InvalidOption for values that cannot be meant, of
// class Unsupported for what the database does not have.
func (s DeadlockSettings) Check(db DB) error {
	const lowest, highest = -10, 10
	f := db.Features()
	switch {
	case s.Priority < lowest || s.Priority > highest:
		return Invalidf("a deadlock priority of %d: from %d to %d", s.Priority, lowest, highest)
	case s.Timeout != 0 && s.Timeout < time.Millisecond:
		return Invalidf("a deadlock timeout of %v: at least 1ms, or 0 for the server's", s.Timeout)
	case s.Priority != 0 && !f.DeadlockPriority:
		return unsupportedSetting("priority", db, f)
	case s.Timeout != 0 && !f.DeadlockTimeout:
		return unsupportedSetting("timeout", db, f)
	}
	return nil
}

func unsupportedSetting(name string, db DB, f Features) error {
	alternative := "the server chooses the victim: let it start again, with deadlock.Retry"
	switch {
	case f.DeadlockPriority:
		alternative = "use the priority"
	case f.DeadlockTimeout:
		alternative = "use the timeout"
	}
	return &Error{Class: Unsupported, Err: fmt.Errorf("deadlock %s on %s", name, db.Name()), Hint: alternative}
}
