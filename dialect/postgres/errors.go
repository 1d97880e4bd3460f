package postgres

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dblock-go/dblock/dialect"
)

type meaning struct {
	class dialect.Class
	hint  string
}

// meaningOf knows the codes of
// https://www.postgresql.org/docs/current/errcodes-appendix.html that say
// something about locks, sessions and the set-up.
func meaningOf(code string) (meaning, bool) {
	switch code {
	case "55P03": // lock_not_available: NOWAIT or lock_timeout, https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-LOCK-TIMEOUT
		return meaning{dialect.Timeout, ""}, true
	case "57014": // query_canceled: pg_cancel_backend or statement_timeout, https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADMIN-SIGNAL
		return meaning{dialect.Canceled, ""}, true
	case "40P01": // deadlock_detected, https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-DEADLOCKS
		return meaning{dialect.Deadlock, "release everything, then try again"}, true
	case "40001": // serialization_failure, https://www.postgresql.org/docs/current/mvcc-serialization-failure-handling.html
		return meaning{dialect.Serialization, "start the transaction again"}, true
	case "25P01": // no_active_sql_transaction, https://www.postgresql.org/docs/current/sql-savepoint.html
		return meaning{dialect.Unsupported, "the lock belongs to a transaction: begin one and pass it"}, true
	case "25P02": // in_failed_sql_transaction
		return meaning{dialect.Unsupported, "an earlier statement of the transaction failed: roll it back"}, true
	case "25006": // read_only_sql_transaction, https://www.postgresql.org/docs/current/hot-standby.html#HOT-STANDBY-USERS
		return meaning{dialect.Unsupported, "rows are locked by writing: use a read-write transaction on the primary"}, true
	case "25P03": // idle_in_transaction_session_timeout, https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-IDLE-IN-TRANSACTION-SESSION-TIMEOUT
		return meaning{dialect.Lost, "idle_in_transaction_session_timeout is shorter than the pause between two statements"}, true
	case "25P04": // transaction_timeout, https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-TRANSACTION-TIMEOUT
		return meaning{dialect.Lost, "transaction_timeout is shorter than the transaction"}, true
	case "57P05": // idle_session_timeout, https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-IDLE-SESSION-TIMEOUT
		return meaning{dialect.Lost, "the server heard nothing of the session for longer than idle_session_timeout"}, true
	case "57P01", // admin_shutdown: pg_terminate_backend, a fast shutdown
		"57P02", // crash_shutdown
		"57P04": // database_dropped
		return meaning{dialect.Lost, ""}, true
	case "57P03": // cannot_connect_now
		return meaning{dialect.Unavailable, "the server is starting up, shutting down or recovering"}, true
	case "28P01": // invalid_password
		return meaning{dialect.Unavailable, "check user name and password"}, true
	case "28000": // invalid_authorization_specification, https://www.postgresql.org/docs/current/client-authentication-problems.html
		return meaning{dialect.Unavailable, "check the user name, sslmode and the server's pg_hba.conf"}, true
	case "3D000": // invalid_catalog_name
		return meaning{dialect.Unavailable, "create the database or correct its name"}, true
	case "53200": // out_of_memory: the lock table too, https://www.postgresql.org/docs/current/runtime-config-locks.html#GUC-MAX-LOCKS-PER-TRANSACTION
		return meaning{dialect.Capacity, "hold fewer keys, or raise max_locks_per_transaction"}, true
	case "53300": // too_many_connections, https://www.postgresql.org/docs/current/runtime-config-connection.html#GUC-MAX-CONNECTIONS
		return meaning{dialect.Capacity, "use fewer connections, or raise max_connections or the role's limit"}, true
	case "42501": // insufficient_privilege, https://www.postgresql.org/docs/current/sql-grant.html
		return meaning{dialect.Denied, "row locks and fencing need USAGE on the lock table's schema and SELECT, INSERT, UPDATE on the table; setup and migrations need CREATE on the schema, and all on their version table"}, true
	case "42P01": // undefined_table
		return meaning{dialect.Setup, setupHint}, true
	case "42703": // undefined_column
		return meaning{dialect.Setup, "if the table is dblock's, it has another shape: choose another name or schema for the lock table"}, true
	case "3F000": // invalid_schema_name
		return meaning{dialect.Setup, "create the schema"}, true
	}
	if strings.HasPrefix(code, "08") { // connection exceptions
		return meaning{dialect.Lost, ""}, true
	}
	return meaning{}, false
}

const (
	setupHint  = "create the lock table with `dblock setup` or migrations.Setup"
	callerHint = "the transaction prepares every statement, which PostgreSQL allows for single ones only: pass the *sql.Tx or pgx.Tx itself; " +
		"with gorm begin it in a session whose PrepareStmt is false"
	brokenHint = "the server ended the session, as its log then says, or the network did"
	poolerHint = "a pooler in transaction mode hands one server session to several clients: connect to the server directly, or to the pooler in session mode; " +
		"with Options.AllowUnsafe row locks and transaction locks work here, session locks do not"
)

var (
	errNoKeys  = &dialect.Error{Class: dialect.InvalidKey, Hint: "name at least one key"}
	errStandby = &dialect.Error{Class: dialect.Unsafe, Err: errors.New("the server is a standby"),
		Hint: "its locks are not the primary's: connect to the primary, for instance with target_session_attrs=read-write"}
	errPooler = &dialect.Error{Class: dialect.Unsafe, Err: errors.New("a connection pooler is in between"), Hint: poolerHint}
	errTooOld = &dialect.Error{Class: dialect.Unsupported, Hint: "dblock needs PostgreSQL 12 or newer"}
)

// Classify says what an error of pgx, lib/pq or the network means. An error of
// no class of dblock's comes back as it is.
func (d *DB) Classify(err error) error { return explain(err) }

func explain(err error) error {
	var known *dialect.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	e := &dialect.Error{Code: sqlState(err), Err: readable(err)}
	var connect *pgconn.ConnectError
	m, ok := meaningOf(e.Code)
	switch {
	case errors.Is(err, context.Canceled):
		e.Class = dialect.Canceled
	case errors.As(err, &connect) && !ok:
		return unavailable(err)
	case errors.Is(err, context.DeadlineExceeded):
		e.Class = dialect.Timeout
	case e.Code == "08P01" && strings.Contains(err.Error(), "query_wait_timeout"):
		// https://www.pgbouncer.org/config.html#query_wait_timeout
		e.Class, e.Remains = dialect.Capacity, dialect.RemainsNothing
		e.Hint = "PgBouncer had no server connection free: every session with locks takes one, so raise default_pool_size"
	case ok:
		e.Class, e.Hint, e.Remains = m.class, m.hint, dialect.RemainsAborted
	case errors.Is(err, sql.ErrTxDone), errors.Is(err, pgx.ErrTxClosed):
		e.Class, e.Remains = dialect.Closed, dialect.RemainsNothing
	case connectionBroke(err):
		e.Class, e.Hint = dialect.Lost, brokenHint
	default:
		return err
	}
	if e.Class == dialect.Lost {
		e.Remains = dialect.RemainsNothing
	}
	return e
}

// sessionEnded reports that the server or the network ended the connection,
// without an error that a pooler or the statement could be the cause of.
func sessionEnded(err error) bool {
	switch sqlState(err) {
	case "":
		return connectionBroke(err)
	case "57P01", "57P02", "57P04":
		return true
	}
	return false
}

func connectionBroke(err error) bool {
	for _, broken := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, driver.ErrBadConn, sql.ErrConnDone, pgconn.ErrConnClosed} {
		if errors.Is(err, broken) {
			return true
		}
	}
	var netErr net.Error
	return errors.As(err, &netErr)
}

// classify prefers the end of the caller's context as the cause of what follows
// from it: a broken connection, a statement that the driver had cancelled.
func classify(ctx context.Context, err error) error {
	e := explain(err)
	ended := ctx.Err()
	if e == nil || ended == nil {
		return e
	}
	cause := err
	if !errors.Is(err, ended) {
		cause = fmt.Errorf("%w: %w", ended, err)
	}
	switch dialect.ClassOf(e) {
	case "", dialect.Lost, dialect.Canceled, dialect.Closed:
	case dialect.Unavailable:
		if cause != err {
			return e
		}
	default:
		return e
	}
	if errors.Is(ended, context.DeadlineExceeded) {
		return &dialect.Error{Class: dialect.Timeout, Code: sqlState(err), Err: readable(cause)}
	}
	return &dialect.Error{Class: dialect.Canceled, Code: sqlState(err), Err: readable(cause)}
}

// connectError is classify for an error of opening a connection.
func connectError(ctx context.Context, err error) error {
	e := classify(ctx, err)
	switch dialect.ClassOf(e) {
	case "", dialect.Lost:
		return unavailable(err)
	}
	return e
}

func unavailable(err error) error {
	return &dialect.Error{Class: dialect.Unavailable, Code: sqlState(err), Err: readable(err),
		Hint: "is the server running, and do host, port and TLS mode lead to it?"}
}

// readable shows an error in one line, where pgx takes one for each host, and
// without the prefix with which pgx says once more that it is a timeout.
func readable(err error) error {
	lines := strings.Split(strings.TrimPrefix(err.Error(), "timeout: "), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	text := strings.ReplaceAll(strings.Join(lines, "; "), ":; ", ": ")
	if text == err.Error() {
		return err
	}
	return shown{err, text}
}

// shown is an error with another text.
type shown struct {
	error
	text string
}

func (s shown) Error() string { return s.text }
func (s shown) Unwrap() error { return s.error }

// join is errors.Join in one line.
func join(errs ...error) (joined error) {
	for _, err := range errs {
		switch {
		case joined == nil:
			joined = err
		case err != nil:
			joined = fmt.Errorf("%w; %w", joined, err)
		}
	}
	return joined
}

// sqlState is the server's code in an error of pgx or lib/pq, or in one that was
// classified, else empty.
func sqlState(err error) string {
	var state interface{ SQLState() string }
	if errors.As(err, &state) {
		return state.SQLState()
	}
	return ""
}

// asClass and withRemains change a copy: errors without details are shared.

func asClass(err error, class dialect.Class) error {
	return changed(err, func(e *dialect.Error) { e.Class = class })
}

func withRemains(err error, r dialect.Remains) error {
	return changed(err, func(e *dialect.Error) { e.Remains = r })
}

func changed(err error, change func(*dialect.Error)) error {
	var e *dialect.Error
	if !errors.As(err, &e) {
		return err
	}
	c := *e
	change(&c)
	return &c
}
