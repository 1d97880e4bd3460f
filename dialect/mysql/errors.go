package mysql

import (
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
)

// meaning is what a number of the server means for the caller.
type meaning struct {
	class   dialect.Class
	remains dialect.Remains
	hint    string
}

const (
	errDatabaseAccessDenied = 1044
	errUnknownDatabase      = 1049
	errUnknownColumn        = 1054
	errParse                = 1064
	errUnknownTable         = 1109
	errTableAccessDenied    = 1142
	errColumnAccessDenied   = 1143
	errNoSuchTable          = 1146
	errLockWaitTimeout      = 1205
	errDeadlock             = 1213
	errSpecificAccessDenied = 1227
	errNotPreparable        = 1295
	errDoesNotExist         = 1305 // a savepoint, a function
	errQueryInterrupted     = 1317
	errInTransaction        = 1568
	errStatementTimeout     = 1969
	errQueryTimeout         = 3024
	errLockNowait           = 3572
)

// The texts behind the numbers: https://dev.mysql.com/doc/mysql-errors/9.4/en/server-error-reference.html,
// with #error_ and the symbol in lower case for one of them, and
// https://mariadb.com/docs/server/reference/error-codes/mariadb-error-code-reference.
var commonErrors = map[uint16]meaning{
	errLockWaitTimeout:  {dialect.Timeout, dialect.RemainsUsable, ""},                                       // ER_LOCK_WAIT_TIMEOUT; on MariaDB NOWAIT too. See also DB.meaning
	errDeadlock:         {dialect.Deadlock, dialect.RemainsNothing, ""},                                     // ER_LOCK_DEADLOCK; on MariaDB of GET_LOCK too, which rolls nothing back
	3058:                {dialect.Deadlock, dialect.RemainsUsable, ""},                                      // ER_USER_LOCK_DEADLOCK: of GET_LOCK
	errLockNowait:       {dialect.NotAcquired, dialect.RemainsUsable, ""},                                   // ER_LOCK_NOWAIT
	errQueryInterrupted: {dialect.Canceled, dialect.RemainsUsable, ""},                                      // ER_QUERY_INTERRUPTED: KILL QUERY
	errQueryTimeout:     {dialect.Timeout, dialect.RemainsUsable, "max_execution_time ended the statement"}, // ER_QUERY_TIMEOUT
	errStatementTimeout: {dialect.Timeout, dialect.RemainsUsable, "max_statement_time ended the statement"}, // ER_STATEMENT_TIMEOUT

	errNoSuchTable:   {dialect.Setup, dialect.RemainsUsable, "if it is dblock's, run `dblock setup` or migrations.Setup"},                              // ER_NO_SUCH_TABLE
	errUnknownColumn: {dialect.Setup, dialect.RemainsUsable, "if the table is dblock's, it has another shape: run `dblock setup` or migrations.Setup"}, // ER_BAD_FIELD_ERROR
	errUnknownTable:  {dialect.Setup, dialect.RemainsUsable, ""},                                                                                       // ER_UNKNOWN_TABLE: of information_schema

	errDatabaseAccessDenied: {dialect.Denied, dialect.RemainsUsable, "GRANT privileges on the database to this user"},  // ER_DBACCESS_DENIED_ERROR
	errTableAccessDenied:    {dialect.Denied, dialect.RemainsUsable, "GRANT the privilege on the table to this user"},  // ER_TABLEACCESS_DENIED_ERROR
	errColumnAccessDenied:   {dialect.Denied, dialect.RemainsUsable, "GRANT the privilege on the column to this user"}, // ER_COLUMNACCESS_DENIED_ERROR
	errSpecificAccessDenied: {dialect.Denied, dialect.RemainsUsable, "GRANT the privilege to this user"},               // ER_SPECIFIC_ACCESS_DENIED_ERROR
	1095:                    {dialect.Denied, dialect.RemainsUsable, ""},                                               // ER_KILL_DENIED_ERROR

	1045:               {dialect.Unavailable, dialect.RemainsUnknown, "check the user's name and password, and the host that the server lets the user in from"}, // ER_ACCESS_DENIED_ERROR
	1698:               {dialect.Unavailable, dialect.RemainsUnknown, "this user may only use the server's own socket: use ?socket=… or another user"},          // ER_ACCESS_DENIED_NO_PASSWORD_ERROR
	1130:               {dialect.Unavailable, dialect.RemainsUnknown, "the server lets nobody in from this host: create the user for it"},                       // ER_HOST_NOT_PRIVILEGED
	1129:               {dialect.Unavailable, dialect.RemainsUnknown, "FLUSH HOSTS on the server"},                                                              // ER_HOST_IS_BLOCKED
	errUnknownDatabase: {dialect.Unavailable, dialect.RemainsUnknown, "create the database, or correct its name"},                                               // ER_BAD_DB_ERROR
	1862:               {dialect.Unavailable, dialect.RemainsUnknown, "change the user's password"},                                                             // ER_MUST_CHANGE_PASSWORD_LOGIN
	3118:               {dialect.Unavailable, dialect.RemainsUnknown, "unlock the user"},                                                                        // ER_ACCOUNT_HAS_BEEN_LOCKED

	1040: {dialect.Capacity, dialect.RemainsUnknown, "raise max_connections, or close connections"},       // ER_CON_COUNT_ERROR
	1203: {dialect.Capacity, dialect.RemainsUnknown, "raise max_user_connections, or close connections"},  // ER_TOO_MANY_USER_CONNECTIONS
	1226: {dialect.Capacity, dialect.RemainsUnknown, "raise the user's limit, or close connections"},      // ER_USER_LIMIT_REACHED
	1206: {dialect.Capacity, dialect.RemainsNothing, "raise innodb_buffer_pool_size, or lock fewer rows"}, // ER_LOCK_TABLE_FULL
	1037: {dialect.Capacity, dialect.RemainsUnknown, "the server is out of memory"},                       // ER_OUTOFMEMORY
	1038: {dialect.Capacity, dialect.RemainsUnknown, "raise sort_buffer_size"},                            // ER_OUT_OF_SORTMEMORY
	1041: {dialect.Capacity, dialect.RemainsUnknown, "the server is out of memory"},                       // ER_OUT_OF_RESOURCES

	1290: {dialect.Unsafe, dialect.RemainsUsable, "the server is read-only, a replica perhaps: connect to the primary"}, // ER_OPTION_PREVENTS_STATEMENT
	1836: {dialect.Unsafe, dialect.RemainsUsable, "the server is read-only, a replica perhaps: connect to the primary"}, // ER_READ_ONLY_MODE

	3057: {dialect.InvalidKey, dialect.RemainsUsable, ""}, // ER_USER_LOCK_WRONG_NAME
	1059: {dialect.InvalidKey, dialect.RemainsUsable, ""}, // ER_TOO_LONG_IDENT

	1193:     {dialect.InvalidOption, dialect.RemainsUsable, "unknown parameters of a DSN become settings of the server: correct its name"},                // ER_UNKNOWN_SYSTEM_VARIABLE
	1231:     {dialect.InvalidOption, dialect.RemainsUsable, ""},                                                                                           // ER_WRONG_VALUE_FOR_VAR
	errParse: {dialect.Unsupported, dialect.RemainsUsable, "row locks need MySQL 8.0.1 or MariaDB 10.3, claims MySQL 8.0.19 or MariaDB 10.6"},              // ER_PARSE_ERROR
	1235:     {dialect.Unsupported, dialect.RemainsUsable, "GET_LOCK does not work across a Galera cluster: connect to a single server, or use row locks"}, // ER_NOT_SUPPORTED_YET
	1792:     {dialect.Unsupported, dialect.RemainsUsable, "a read-only transaction cannot lock rows: begin it without ReadOnly"},                          // ER_CANT_EXECUTE_IN_READ_ONLY_TRANSACTION

	1053: {dialect.Lost, dialect.RemainsNothing, "the server shuts down"},       // ER_SERVER_SHUTDOWN
	1152: {dialect.Lost, dialect.RemainsNothing, ""},                            // ER_ABORTING_CONNECTION
	1158: {dialect.Lost, dialect.RemainsNothing, ""},                            // ER_NET_READ_ERROR
	1159: {dialect.Lost, dialect.RemainsNothing, ""},                            // ER_NET_READ_INTERRUPTED
	1160: {dialect.Lost, dialect.RemainsNothing, ""},                            // ER_NET_ERROR_ON_WRITE
	1161: {dialect.Lost, dialect.RemainsNothing, ""},                            // ER_NET_WRITE_INTERRUPTED
	1927: {dialect.Lost, dialect.RemainsNothing, "somebody killed the session"}, // ER_CONNECTION_KILLED
	3169: {dialect.Lost, dialect.RemainsNothing, "somebody killed the session"}, // ER_SESSION_WAS_KILLED
	2006: {dialect.Lost, dialect.RemainsNothing, ""},                            // CR_SERVER_GONE_ERROR, from proxies
	2013: {dialect.Lost, dialect.RemainsNothing, ""},                            // CR_SERVER_LOST, from proxies
}

var mysqlErrors = map[uint16]meaning{
	4031: {dialect.Lost, dialect.RemainsNothing, "the session was idle for longer than wait_timeout"}, // ER_CLIENT_INTERACTION_TIMEOUT
	4163: {dialect.InvalidKey, dialect.RemainsUsable, ""},                                             // ER_USER_LOCK_OVERLONG_NAME
}

var mariadbErrors = map[uint16]meaning{
	4079: {dialect.InvalidKey, dialect.RemainsUsable, ""}, // ER_ILLEGAL_PARAMETER_DATA_TYPE_FOR_OPERATION
}

// Classify says what an error of the driver, of database/sql, of the network or
// of a context means. What it does not know comes back as it is.
func (db *DB) Classify(err error) error {
	var known *dialect.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	var refused *driver.MySQLError
	var network net.Error
	var dial *net.OpError
	switch {
	case errors.As(err, &refused):
		m, ok := db.meaning(refused.Number)
		if !ok {
			return err
		}
		return &dialect.Error{Class: m.class, Code: strconv.Itoa(int(refused.Number)), Hint: m.hint, Remains: m.remains, Err: err}
	case errors.Is(err, context.Canceled):
		return &dialect.Error{Class: dialect.Canceled, Err: err}
	case errors.Is(err, context.DeadlineExceeded):
		return &dialect.Error{Class: dialect.Timeout, Err: err}
	case errors.As(err, &dial) && dial.Op == "dial":
		return &dialect.Error{Class: dialect.Unavailable, Err: err, Hint: "check the host and the port, and that the server runs"}
	case errors.Is(err, sql.ErrTxDone):
		// By a commit perhaps, so it is not for the caller to start it again.
		return &dialect.Error{Class: dialect.Closed, Err: err, Hint: "the transaction has ended already"}
	case errors.Is(err, driver.ErrInvalidConn), errors.Is(err, sqldriver.ErrBadConn), errors.Is(err, sql.ErrConnDone),
		errors.Is(err, driver.ErrMalformPkt), errors.Is(err, driver.ErrPktSync), errors.Is(err, driver.ErrPktSyncMul), errors.Is(err, driver.ErrBusyBuffer),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &network):
		return &dialect.Error{Class: dialect.Lost, Err: err, Remains: dialect.RemainsNothing,
			Hint: "the server ended the session, by KILL or wait_timeout for instance, or the network did"}
	}
	return err
}

func (db *DB) meaning(number uint16) (meaning, bool) {
	m, ok := db.flavor.errors[number]
	if !ok {
		m, ok = commonErrors[number]
	}
	// https://dev.mysql.com/doc/refman/en/innodb-parameters.html#sysvar_innodb_rollback_on_timeout
	if number == errLockWaitTimeout && db.rollbackOnTimeout {
		m.remains = dialect.RemainsNothing
	}
	return m, ok
}

// failure classifies the error of a call that its context may have ended; the
// driver then reports the connection that it closed, at times.
func (db *DB) failure(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return db.Classify(err)
	}
	if !errors.Is(err, ctx.Err()) {
		err = fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	// Even if the server has answered, the driver may have closed the connection.
	return doubtful(db.Classify(err))
}

// doubtful is for what an error of the server alone would leave usable.
func doubtful(err error) error {
	var e *dialect.Error
	if errors.As(err, &e) && e.Remains == dialect.RemainsUsable {
		return remains(err, dialect.RemainsUnknown)
	}
	return err
}

// tableFailure is failure for statements that use the lock table: where that is
// missing, MySQL may miss its database and MariaDB the table only.
func (db *DB) tableFailure(ctx context.Context, t dialect.Table, err error) error {
	for _, number := range []uint16{errUnknownDatabase, errNoSuchTable} {
		if isNumber(err, number) {
			return &dialect.Error{Class: dialect.Setup, Code: strconv.Itoa(int(number)), Err: err, Remains: dialect.RemainsUsable, Hint: db.runSetup(t)}
		}
	}
	return db.failure(ctx, err)
}

// connectFailure is failure for a connection that is not there yet: one that breaks
// while it is made, as behind a proxy or while the server starts, loses nothing.
func (db *DB) connectFailure(ctx context.Context, err error) error {
	classified := db.failure(ctx, err)
	if dialect.ClassOf(classified) == dialect.Lost {
		return &dialect.Error{Class: dialect.Unavailable, Err: err, Hint: "check that the server runs and is what answers at its address"}
	}
	return classified
}

// whileOpening is for errors of a server that is not known to work at all yet.
func (db *DB) whileOpening(err error) error {
	err = db.Classify(err)
	switch dialect.ClassOf(err) {
	case "", dialect.Lost:
		return &dialect.Error{Class: dialect.Unavailable, Err: err}
	case dialect.Timeout:
		return &dialect.Error{Class: dialect.Unavailable, Err: err, Hint: "check the host and the port, and that the server answers"}
	}
	return err
}

func isContextEnd(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// answered is true of an error by which the server ended a statement.
func answered(err error) bool {
	var refused *driver.MySQLError
	return errors.As(err, &refused)
}

func isNumber(err error, number uint16) bool {
	var refused *driver.MySQLError
	return errors.As(err, &refused) && refused.Number == number
}

// join is errors.Join on one line.
func join(err, other error) error {
	switch {
	case other == nil:
		return err
	case err == nil:
		return other
	}
	return fmt.Errorf("%w; %w", err, other)
}
