package dblock

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// The closed set of sentinels. Test with errors.Is; errors.As with [*Error]
// gives the details and with the driver's type its own error.
const (
	// ErrNotAcquired: a try found a key held by somebody else. Nothing is held.
	ErrNotAcquired = dialect.NotAcquired
	// ErrTimeout: a wait reached its limit or the deadline of its context.
	ErrTimeout = dialect.Timeout
	// ErrCanceled: the context was cancelled, or an administrator cancelled the
	// statement.
	ErrCanceled = dialect.Canceled
	// ErrDeadlock: the server chose this call as the victim of a deadlock. Give
	// everything back, then try again; package deadlock does that.
	ErrDeadlock = dialect.Deadlock
	// ErrSerialization: the transaction must be started again.
	ErrSerialization = dialect.Serialization
	// ErrLost: the session that held the lock is gone, and the lock with it.
	ErrLost = dialect.Lost
	// ErrNotHeld: the server says that what should be released was not held any
	// more, so the work ran without its lock.
	ErrNotHeld = dialect.NotHeld
	// ErrNotFound: a row that should be locked does not exist; the text names its key.
	ErrNotFound = dialect.NotFound
	// ErrInvalidKey: a key is empty, or there are none or more than MaxKeys.
	ErrInvalidKey = dialect.InvalidKey
	// ErrInvalidOption: an option has a value that cannot be meant.
	ErrInvalidOption = dialect.InvalidOption
	// ErrUnsupported: this database cannot do that; the text names what can.
	ErrUnsupported = dialect.Unsupported
	// ErrUnsafe: a lock would promise here what it cannot keep, for instance
	// behind a pooler that hands one session to several clients, or on a replica.
	ErrUnsafe = dialect.Unsafe
	// ErrCapacity: the server's lock table, its connections, or the pool that
	// locks draw connections from are used up.
	ErrCapacity = dialect.Capacity
	// ErrSetup: the lock table is missing or has another shape, or there is
	// nothing to migrate.
	ErrSetup = dialect.Setup
	// ErrDenied: a privilege is missing.
	ErrDenied = dialect.Denied
	// ErrUnavailable: the server cannot be reached or refuses the login.
	ErrUnavailable = dialect.Unavailable
	// ErrClosed: the locker was closed, or the lock was released.
	ErrClosed = dialect.Closed
)

// Blocker is who holds, or waits for, a key, as far as the server tells.
type Blocker = dialect.Holding

// Error is what the calls of the features return when they fail. The dialects'
// constructors return a *dialect.Error, which matches the sentinels too.
type Error struct {
	Op      string   // what was tried: "lock", "try", "release", "migrate up", …
	Dialect string   // postgres, mysql, mariadb or sqlserver
	Keys    []string // the keys of the call, for people to read; very long ones shortened
	Code    string   // the server's own code, if it gave one
	Blocker *Blocker // who is in the way, where the server tells
	Err     error    // the cause; matches one of the sentinels
}

// NewError wraps the cause of a failed call; nil if there is none. The code is
// taken from the cause.
func NewError(op string, db DB, keys []Key, err error) error {
	if err == nil {
		return nil
	}
	e := &Error{Op: op, Dialect: db.Name(), Err: err}
	var cause *dialect.Error
	if errors.As(err, &cause) {
		e.Code = cause.Code
	}
	for _, k := range keys {
		e.Keys = append(e.Keys, k.label())
	}
	return e
}

// Error names what was tried, on which keys and database, the cause, who is in
// the way, and the way out.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "dblock: %s", e.Op)
	if names := e.keyNames(); names != "" {
		fmt.Fprintf(&b, " %s", names)
	}
	fmt.Fprintf(&b, " on %s: %v", e.Dialect, e.Err)
	if e.Blocker != nil {
		fmt.Fprintf(&b, "; %s", DescribeBlocker(*e.Blocker))
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// keyNames keeps a text about very many keys readable.
func (e *Error) keyNames() string {
	const most = 5
	if len(e.Keys) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(e.Keys[:most], ", "), len(e.Keys)-most)
	}
	return strings.Join(e.Keys, ", ")
}

// DescribeBlocker says in words who is in the way.
func DescribeBlocker(b Blocker) string {
	verb := "held"
	if b.Waiting {
		verb = "waited for"
	}
	text := fmt.Sprintf("%s by session %d", verb, b.Session)
	var details []string
	if b.Application != "" {
		details = append(details, fmt.Sprintf("%q", b.Application))
	}
	if b.User != "" {
		details = append(details, "user "+b.User)
	}
	if b.State != "" {
		details = append(details, b.State)
	}
	if !b.Since.IsZero() {
		details = append(details, "since "+b.Since.UTC().Format(time.RFC3339))
	}
	if len(details) > 0 {
		text += " (" + strings.Join(details, ", ") + ")"
	}
	return text
}
