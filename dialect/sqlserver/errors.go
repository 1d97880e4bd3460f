package sqlserver

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"

	mssql "github.com/microsoft/go-mssqldb"

	"github.com/dblock-go/dblock/dialect"
)

// Numbers that this package looks for itself.
const (
	errLockTimeout    = 1222 // Lock request time out period exceeded
	errDuplicateIndex = 2601 // Cannot insert duplicate key row in object with unique index
	errDuplicateKey   = 2627 // Violation of PRIMARY KEY or UNIQUE KEY constraint
)

const (
	hintSetup    = "run `dblock setup` or migrations.Setup, which create the lock table"
	hintShape    = "the lock table has another shape than this version of dblock needs"
	hintGrant    = "GRANT the permission that the server names"
	hintMember   = "the user must be a member of the role public of this database"
	hintUser     = "create a user for the login in the database"
	hintBegin    = "begin a transaction first"
	hintRetry    = "roll back, then start the whole transaction again"
	hintCapacity = "hold fewer locks and connections, or wait until the server is less busy"
	hintPrimary  = "connect to the primary"
	hintDatabase = "the database does not exist, or the login may not use it"
	hintLogin    = "check the user and the password, or ask for the access"
	hintMoment   = "try again in a moment"
)

// meaning is what an error of the server means.
type meaning struct {
	class   dialect.Class
	remains dialect.Remains
	hint    string
}

// meanings gives errors of the server their classes. The texts of the errors are
// listed by number in
// https://learn.microsoft.com/sql/relational-databases/errors-events/database-engine-events-and-errors
// where those marked * have pages of their own, called
// mssqlserver-<number>-database-engine-error.
var meanings = map[int32]meaning{
	207: {dialect.Setup, 0, hintShape},              // invalid column name *
	208: {dialect.Setup, 0, hintSetup},              // invalid object name *
	229: {dialect.Denied, 0, hintGrant},             // permission denied on an object *
	262: {dialect.Denied, 0, hintGrant},             // permission denied in a database
	297: {dialect.Denied, 0, hintGrant},             // no permission to perform this action
	300: {dialect.Denied, 0, hintGrant},             // VIEW SERVER STATE was denied
	601: {dialect.Serialization, 0, hintRetry},      // a NOLOCK scan met moving data: to be treated as a deadlock
	701: {dialect.Capacity, 0, hintCapacity},        // insufficient memory *
	916: {dialect.Denied, 0, hintUser},              // the login cannot access the database *
	596: {dialect.Lost, dialect.RemainsNothing, ""}, // the session is being killed

	// Application locks.
	1202: {dialect.Setup, 0, hintMember},      // unknown principal, or not a member
	1223: {dialect.NotHeld, 0, ""},            // the lock is not held
	1224: {dialect.InvalidKey, 0, ""},         // invalid resource
	1227: {dialect.InvalidOption, 0, ""},      // invalid timeout
	1230: {dialect.Setup, 0, hintMember},      // invalid principal
	3918: {dialect.Unsupported, 0, hintBegin}, // not in a transaction

	1204: {dialect.Capacity, 0, hintCapacity},                        // out of locks *
	1205: {dialect.Deadlock, dialect.RemainsNothing, hintRetry},      // deadlock victim *
	3906: {dialect.Unsafe, 0, hintPrimary},                           // the database is read-only
	3930: {dialect.Serialization, dialect.RemainsAborted, hintRetry}, // the transaction can only be rolled back
	// https://learn.microsoft.com/sql/relational-databases/sql-server-transaction-locking-and-row-versioning-guide
	3960: {dialect.Serialization, dialect.RemainsNothing, hintRetry}, // update conflict under SNAPSHOT

	// The statement alone fails, unless XACT_ABORT is on:
	// https://learn.microsoft.com/sql/t-sql/statements/set-lock-timeout-transact-sql
	errLockTimeout: {dialect.Timeout, dialect.RemainsUsable, ""},

	4060:  {dialect.Unavailable, 0, hintDatabase},     // cannot open database *
	6005:  {dialect.Lost, dialect.RemainsNothing, ""}, // shutdown is in progress
	17809: {dialect.Capacity, 0, hintCapacity},        // too many connections
	18452: {dialect.Unavailable, 0, hintLogin},        // login from an untrusted domain *
	18456: {dialect.Unavailable, 0, hintLogin},        // login failed *
	18486: {dialect.Unavailable, 0, hintLogin},        // the account is locked out

	// Azure SQL:
	// https://learn.microsoft.com/azure/azure-sql/database/troubleshoot-common-errors-issues
	10928: {dialect.Capacity, 0, hintCapacity},        // a resource's limit is reached
	10929: {dialect.Capacity, 0, hintCapacity},        // the server is too busy
	40197: {dialect.Lost, dialect.RemainsNothing, ""}, // the service moves
	40501: {dialect.Capacity, 0, hintCapacity},        // the service is busy
	40613: {dialect.Unavailable, 0, hintMoment},       // the database is not available now
}

// Classify gives an error of go-mssqldb or database/sql its meaning. An error of
// an unknown kind, nil, and what is classified already come back as they are.
func (*DB) Classify(err error) error { return Classify(err) }

// Classify is the method [DB.Classify] for those who have no DB.
func Classify(err error) error {
	if err == nil {
		return nil
	}
	var known *dialect.Error
	if errors.As(err, &known) {
		return err
	}
	for _, n := range numbers(err) {
		if m, ok := meanings[n]; ok {
			return &dialect.Error{Class: m.class, Code: strconv.Itoa(int(n)), Hint: m.hint, Remains: m.remains, Err: err}
		}
	}
	switch {
	case errors.Is(err, context.Canceled):
		return &dialect.Error{Class: dialect.Canceled, Err: err}
	case errors.Is(err, context.DeadlineExceeded):
		return &dialect.Error{Class: dialect.Timeout, Err: err}
	case errors.Is(err, sql.ErrTxDone):
		return &dialect.Error{Class: dialect.Closed, Err: err}
	case isLost(err):
		return &dialect.Error{Class: dialect.Lost, Remains: dialect.RemainsNothing, Err: err}
	}
	return err
}

// isLost: the driver gives the connection up after these.
func isLost(err error) bool {
	var network net.Error
	var fatal mssql.ServerError
	var stream mssql.StreamError
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.As(err, &network) || errors.As(err, &fatal) || errors.As(err, &stream)
}

// classify is Classify for a call that ends with ctx: a connection that breaks
// because the context ended is not what the caller wants to hear of.
func classify(ctx context.Context, err error) error {
	err = Classify(err)
	if err == nil || ctx.Err() == nil {
		return err
	}
	switch dialect.ClassOf(err) {
	case "", dialect.Lost, dialect.Closed:
		return Classify(fmt.Errorf("%w: %w", ctx.Err(), causeOf(err)))
	}
	return err
}

// connectError is classify for an attempt to get a connection, which was not
// there to be lost.
func connectError(ctx context.Context, err error) error {
	err = classify(ctx, err)
	if ctx.Err() != nil {
		return err
	}
	if class := dialect.ClassOf(err); class == "" || class == dialect.Lost || class == dialect.Timeout {
		return &dialect.Error{Class: dialect.Unavailable,
			Hint: "check that the server runs, its host and port, and its TLS settings", Err: causeOf(err)}
	}
	return err
}

// causeOf is the error without the class that Classify gave it.
func causeOf(err error) error {
	var e *dialect.Error
	if errors.As(err, &e) && e.Err != nil {
		return e.Err
	}
	return err
}

// notAcquired is for a lock timeout of a statement that should not wait.
func notAcquired(cause error) error {
	return &dialect.Error{Class: dialect.NotAcquired, Code: strconv.Itoa(errLockTimeout), Remains: dialect.RemainsUsable,
		Err: cause}
}

// numbers are those of all the errors that the server reported for one call, the
// first one first: the last is often just a consequence, as "login failed" after
// "cannot open database" is.
func numbers(err error) []int32 {
	var e mssql.Error
	if !errors.As(err, &e) {
		return nil
	}
	if len(e.All) == 0 {
		return []int32{e.Number}
	}
	all := make([]int32, len(e.All))
	for i, one := range e.All {
		all[i] = one.Number
	}
	return all
}

func hasNumber(err error, number int32) bool {
	for _, n := range numbers(err) {
		if n == number {
			return true
		}
	}
	return false
}
