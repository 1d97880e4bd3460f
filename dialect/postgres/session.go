package postgres

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
	"github.com/dblock-go/dblock/dialect/internal/tcp"
)

const pidQuery = "SELECT pg_backend_pid()"

// answering tells which session answers: the server's process and the mark that a
// session of dblock leaves there, in one number. Behind a pooler several clients
// may get the same process.
const answering = "pg_backend_pid()::bigint # coalesce(nullif(current_setting('" + markSetting + "', true), ''), '0')::bigint"

const markSetting = "dblock.session"

// session implements [dialect.Session].
type session struct {
	conn  conn
	close func() error // once
	id    int64
	mark  int64 // 0: none was left

	exchanged exchange // the latest
}

func newSession(c conn) *session { return &session{conn: c, close: sync.OnceValue(c.close)} }

// OpenSession opens a connection of dblock's own, and refuses it before
// anything is set where it does not lead to a session of a primary: the server
// may have changed since New.
func (d *DB) OpenSession(ctx context.Context, o dialect.SessionOptions) (dialect.Session, error) {
	if o.KeepAlive < 0 {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "KeepAlive is negative"}
	}
	c, announced, err := d.connect(ctx, o)
	if err != nil {
		return nil, err
	}
	s, behind, err := start(ctx, c, announced)
	if err == nil && !d.unsafe {
		switch {
		case behind.standby:
			err = errStandby
		case behind.pooler && !d.pooler, behind.marked:
			err = errPooler
		}
	}
	if err == nil {
		err = s.configure(ctx, o)
	}
	if err != nil {
		return nil, join(err, c.close())
	}
	return s, nil
}

// OnConn makes a session of a connection that the caller has checked out.
// Nothing is set on it.
func (d *DB) OnConn(ctx context.Context, c *sql.Conn) (dialect.Session, error) {
	if c == nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the connection is nil"}
	}
	s := newSession(&sqlConn{Conn: c, pgx: underPgx(c), destroy: func() error { return pinned.Destroy(c) }})
	if err := s.conn.queryRow(ctx, pidQuery, nil, &s.id); err != nil {
		return nil, classify(ctx, err)
	}
	return s, nil
}

// behind is what a connection leads to.
type behind struct{ standby, pooler, marked bool }

// start makes a session of a connection. A pooler shows by announcing itself as
// the process instead of the server's, and by the mark of a session before this one,
// which is still there or was not cleaned away.
func start(ctx context.Context, c conn, announced int64) (*session, behind, error) {
	s := newSession(c)
	var b behind
	err := c.queryRow(ctx, "SELECT pg_backend_pid(), pg_is_in_recovery(), coalesce(current_setting('"+markSetting+"', true), '') <> ''",
		nil, &s.id, &b.standby, &b.marked)
	b.pooler = announced != 0 && announced != s.id
	return s, b, classify(ctx, err)
}

// https://www.postgresql.org/docs/current/runtime-config-client.html
const (
	idleTimeout              = "idle_session_timeout" // since 14
	idleInTransactionTimeout = "idle_in_transaction_session_timeout"
)

// configure sets what a session needs. A setting that the server does not know
// yet is left out.
func (s *session) configure(ctx context.Context, o dialect.SessionOptions) error {
	application := o.Application
	if application == "" {
		application = "dblock"
	}
	unreachable := unreachableFor(o)
	interval, count := probes(unreachable - tcp.Idle)
	required := [][2]string{
		{"application_name", application},
		{"lock_timeout", "0"},
		{"statement_timeout", "0"},
		{"transaction_timeout", "0"}, // since 17
		{idleInTransactionTimeout, milliseconds(o.Silence())},
		{idleTimeout, milliseconds(o.Silence())},
		{"default_transaction_isolation", "read committed"},
		// A fencing number that a crash takes back would be given twice.
		{"synchronous_commit", "on"},
		// Free the locks of a client that vanished without a word; on Linux the last
		// of these settings overrides the count:
		// https://www.postgresql.org/docs/current/runtime-config-connection.html#RUNTIME-CONFIG-TCP
		{"tcp_keepalives_idle", strconv.Itoa(int(tcp.Idle / time.Second))},
		{"tcp_keepalives_interval", strconv.Itoa(interval)},
		{"tcp_keepalives_count", strconv.Itoa(count)},
		{"tcp_user_timeout", milliseconds(unreachable)},
	}
	// Ends the wait of a client that is gone; since 14, and refused on platforms
	// whose kernel cannot tell.
	optional := [2]string{"client_connection_check_interval", "1000"}

	mark := rand.Int64()
	required = append(required, [2]string{markSetting, strconv.FormatInt(mark, 10)})
	err := s.set(ctx, append(required, optional))
	if state := sqlState(err); state == "22023" || state == "42501" {
		err = s.set(ctx, required)
	}
	if err == nil {
		s.mark = mark
	}
	return err
}

func (s *session) set(ctx context.Context, settings [][2]string) error {
	names, values := make([]string, len(settings)), make([]string, len(settings))
	for i, setting := range settings {
		names[i], values[i] = setting[0], setting[1]
	}
	var answer, n int64
	return s.row(ctx, "SELECT answer, n FROM (SELECT "+answering+` AS answer OFFSET 0) AS before, LATERAL (
		SELECT count(set_config(name, value, false)) AS n FROM unnest($1::text[], $2::text[]) AS s (name, value)
		WHERE (current_setting(name, true) IS NOT NULL OR name = '`+markSetting+`')
		AND (name <> 'synchronous_commit' OR current_setting(name, true) = 'off')) AS done`,
		[]any{textArray(names), textArray(values)}, &answer, &n)
}

// unreachableFor is how long the server must not have heard from the client's
// machine before it frees the locks: longer than the session's owner needs to take
// them for lost. In the middle of a long statement the owner knows by its own end
// of the connection, whose last answer may be younger than the server's by as
// much as the server's probes are apart.
func unreachableFor(o dialect.SessionOptions) time.Duration {
	const margin = 2 * time.Second
	return min(max(o.LostWithin(), tcp.Unanswered+tcp.Idle), maxTimeout-margin) + margin
}

// probes spreads the probes of a connection over a time, as often as once a
// second: a kernel counts no more than 127.
func probes(over time.Duration) (interval, count int) {
	const most = 127
	seconds := int((over + time.Second - 1) / time.Second)
	interval = (seconds + most - 1) / most
	return interval, (seconds + interval - 1) / interval
}

// maxTimeout is the longest that PostgreSQL's settings in milliseconds take: 24 days.
const maxTimeout = math.MaxInt32 * time.Millisecond

// milliseconds rounds up: rounded to zero, a limit would be none.
func milliseconds(d time.Duration) string {
	d = min(d, maxTimeout)
	return strconv.FormatInt(int64((d+time.Millisecond-1)/time.Millisecond), 10)
}

// row runs a query whose first column is answering into dest, whose first element
// receives it.
func (s *session) row(ctx context.Context, query string, args []any, answer *int64, dest ...any) error {
	if err := s.conn.queryRow(ctx, query, args, append([]any{answer}, dest...)...); err != nil {
		return failed(ctx, err)
	}
	if *answer != s.id^s.mark {
		return s.moved()
	}
	return nil
}

// failed is what an error means on a session of dblock's own, whose prepared statements
// nobody else removes: without one it is another session's.
func failed(ctx context.Context, err error) error {
	if sqlState(err) == "26000" { // invalid_sql_statement_name
		return &dialect.Error{Class: dialect.Lost, Code: "26000", Remains: dialect.RemainsNothing, Err: err, Hint: poolerHint}
	}
	return classify(ctx, err)
}

// moved is for an answer that is another session's.
func (s *session) moved() error {
	return &dialect.Error{Class: dialect.Lost,
		Err:  fmt.Errorf("the connection does not lead to its own session of server process %d any more", s.id),
		Hint: poolerHint}
}

// ID is the server process's pid, as in pg_stat_activity.
func (s *session) ID() int64 { return s.id }

// Idle reads what the server sends unasked: the reason when it ends the session.
func (s *session) Idle(ctx context.Context) error {
	err := explain(s.conn.idle(ctx))
	if err == nil || dialect.ClassOf(err) == dialect.Lost {
		return err
	}
	return &dialect.Error{Class: dialect.Lost, Code: sqlState(err), Remains: dialect.RemainsNothing, Err: err}
}

func (s *session) Ping(ctx context.Context) error {
	var answer int64
	return s.row(ctx, "SELECT "+answering, nil, &answer)
}

// Alive asks the server if anything has arrived unasked, or if the driver hides
// whether it has.
func (s *session) Alive(deadline time.Time) error {
	if s.conn.quiet() {
		return nil
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	return s.Ping(ctx)
}

// AllowSilence looks first: mostly there is no limit to lift.
func (s *session) AllowSilence(ctx context.Context) (restore func(ctx context.Context) error, err error) {
	var answer int64
	var idle, inTransaction string
	err = s.row(ctx, "SELECT "+answering+", coalesce(current_setting($1, true), '0'), current_setting($2)",
		[]any{idleTimeout, idleInTransactionTimeout}, &answer, &idle, &inTransaction)
	if err != nil || (idle == "0" && inTransaction == "0") {
		return func(context.Context) error { return nil }, err
	}
	limits := func(idle, inTransaction string) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			return s.set(ctx, [][2]string{{idleTimeout, idle}, {idleInTransactionTimeout, inTransaction}})
		}
	}
	return limits(idle, inTransaction), limits("0", "0")(ctx)
}

// Statements has a *pgx.Conn where the DB was made of a pgx pool or configuration,
// else a [dialect.Conn].
func (s *session) Statements() dialect.Statements { return s.conn.statements() }

func (s *session) Begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	return s.conn.begin(ctx, o)
}

// EndStatements is a warning of the server's where nothing is open.
func (s *session) EndStatements(ctx context.Context) error {
	return classify(ctx, s.conn.exec(ctx, "ROLLBACK"))
}

// Close waits neither for a transaction nor for long for a statement that
// somebody else has under way on a connection of theirs.
func (s *session) Close() error { return s.close() }
