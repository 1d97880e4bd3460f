package deadlock

import (
	"errors"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// IsDeadlock reports whether the server chose this transaction or call as the
// victim of a deadlock. Like all functions of this file it understands errors of
// dblock and errors that come straight from the driver of db, wrapped or not.
func IsDeadlock(db dblock.DB, err error) bool { return is(db, err, dblock.ErrDeadlock) }

// IsSerialization reports whether the transaction met a change that its snapshot
// does not allow it to see.
func IsSerialization(db dblock.DB, err error) bool { return is(db, err, dblock.ErrSerialization) }

// IsTimeout reports whether a wait reached its limit, on the server or by the
// deadline of a context.
func IsTimeout(db dblock.DB, err error) bool { return is(db, err, dblock.ErrTimeout) }

// IsLost reports whether the session is gone, and with it its transaction and
// all of its locks.
func IsLost(db dblock.DB, err error) bool { return is(db, err, dblock.ErrLost) }

// IsRetryable reports whether the transaction is known not to have been
// committed and may succeed if all of it runs again: after a deadlock or a
// serialization failure.
func IsRetryable(db dblock.DB, err error) bool {
	return IsDeadlock(db, err) || IsSerialization(db, err)
}

// Remains says what is left of a transaction in which err happened; see the table
// in the documentation of the package.
func Remains(db dblock.DB, err error) dialect.Remains {
	if err == nil {
		return dialect.RemainsUsable
	}
	var e *dialect.Error
	if errors.As(classify(db, err), &e) {
		return e.Remains
	}
	return dialect.RemainsUnknown
}

func is(db dblock.DB, err error, class dialect.Class) bool {
	return errors.Is(classify(db, err), class)
}

// classify leaves the error alone where dblock has said already what it means:
// MySQL and MariaDB use one code for cases which their dialect tells apart.
func classify(db dblock.DB, err error) error {
	if dialect.IsNil(db) || dialect.ClassOf(err) != "" {
		return err
	}
	return db.Classify(err)
}
