package postgres

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dblock-go/dblock/dialect"
)

func details(t *testing.T, err error) *dialect.Error {
	t.Helper()
	var e *dialect.Error
	if !errors.As(err, &e) {
		t.Fatalf("%v (%T) has no class", err, err)
	}
	return e
}

func TestClassifyCodes(t *testing.T) {
	for code, want := range map[string]struct {
		class   dialect.Class
		remains dialect.Remains
	}{
		"55P03": {dialect.Timeout, dialect.RemainsAborted},
		"57014": {dialect.Canceled, dialect.RemainsAborted},
		"40P01": {dialect.Deadlock, dialect.RemainsAborted},
		"40001": {dialect.Serialization, dialect.RemainsAborted},
		"25P01": {dialect.Unsupported, dialect.RemainsAborted},
		"25P02": {dialect.Unsupported, dialect.RemainsAborted},
		"25006": {dialect.Unsupported, dialect.RemainsAborted},
		"25P03": {dialect.Lost, dialect.RemainsNothing},
		"25P04": {dialect.Lost, dialect.RemainsNothing},
		"57P01": {dialect.Lost, dialect.RemainsNothing},
		"57P02": {dialect.Lost, dialect.RemainsNothing},
		"57P03": {dialect.Unavailable, dialect.RemainsAborted},
		"57P04": {dialect.Lost, dialect.RemainsNothing},
		"57P05": {dialect.Lost, dialect.RemainsNothing},
		"08000": {dialect.Lost, dialect.RemainsNothing},
		"08006": {dialect.Lost, dialect.RemainsNothing},
		"08P01": {dialect.Lost, dialect.RemainsNothing},
		"28P01": {dialect.Unavailable, dialect.RemainsAborted},
		"28000": {dialect.Unavailable, dialect.RemainsAborted},
		"3D000": {dialect.Unavailable, dialect.RemainsAborted},
		"53200": {dialect.Capacity, dialect.RemainsAborted},
		"53300": {dialect.Capacity, dialect.RemainsAborted},
		"42501": {dialect.Denied, dialect.RemainsAborted},
		"42P01": {dialect.Setup, dialect.RemainsAborted},
		"42703": {dialect.Setup, dialect.RemainsAborted},
		"3F000": {dialect.Setup, dialect.RemainsAborted},
	} {
		cause := &pgconn.PgError{Code: code, Message: "as the server says"}
		err := explain(fmt.Errorf("wrapped: %w", cause))
		e := details(t, err)
		if e.Class != want.class || e.Remains != want.remains || e.Code != code {
			t.Errorf("%s: %+v, want %+v", code, e, want)
		}
		if !errors.Is(err, want.class) || !errors.Is(err, cause) || !strings.Contains(err.Error(), cause.Message) {
			t.Errorf("%s: %v hides class or cause", code, err)
		}
	}
}

func TestClassifyWithoutCode(t *testing.T) {
	for _, test := range []struct {
		err     error
		class   dialect.Class
		remains dialect.Remains
	}{
		{context.Canceled, dialect.Canceled, dialect.RemainsUnknown},
		{context.DeadlineExceeded, dialect.Timeout, dialect.RemainsUnknown},
		{io.EOF, dialect.Lost, dialect.RemainsNothing},
		{io.ErrUnexpectedEOF, dialect.Lost, dialect.RemainsNothing},
		{net.ErrClosed, dialect.Lost, dialect.RemainsNothing},
		{&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}, dialect.Lost, dialect.RemainsNothing},
		{driver.ErrBadConn, dialect.Lost, dialect.RemainsNothing},
		{sql.ErrConnDone, dialect.Lost, dialect.RemainsNothing},
		{pgconn.ErrConnClosed, dialect.Lost, dialect.RemainsNothing},
		{sql.ErrTxDone, dialect.Closed, dialect.RemainsNothing},
		{pgx.ErrTxClosed, dialect.Closed, dialect.RemainsNothing},
	} {
		e := details(t, explain(fmt.Errorf("wrapped: %w", test.err)))
		if e.Class != test.class || e.Remains != test.remains || !errors.Is(e, test.err) {
			t.Errorf("%v: %+v", test.err, e)
		}
	}
}

func TestClassifyKeepsWhatHasNoMeaning(t *testing.T) {
	known := &dialect.Error{Class: dialect.NotHeld}
	for _, err := range []error{nil, known, fmt.Errorf("wrapped: %w", known), errors.New("anything"), &pgconn.PgError{Code: "42601"}} {
		if got := explain(err); got != err {
			t.Errorf("%v became %v", err, got)
		}
	}
}

func TestEndOfTheContextIsTheCauseOfWhatFollowsFromIt(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	for _, test := range []struct {
		ctx   context.Context
		err   error
		class dialect.Class
	}{
		{t.Context(), driver.ErrBadConn, dialect.Lost},
		{canceled, driver.ErrBadConn, dialect.Canceled},
		{expired, driver.ErrBadConn, dialect.Timeout},
		{expired, &pgconn.PgError{Code: "57014"}, dialect.Timeout},
		{expired, sql.ErrTxDone, dialect.Timeout},
		{expired, errors.New("anything"), dialect.Timeout},
		{canceled, &pgconn.PgError{Code: "40P01"}, dialect.Deadlock},
		{canceled, &pgconn.PgError{Code: "55P03"}, dialect.Timeout},
		{canceled, &pgconn.PgError{Code: "28P01"}, dialect.Unavailable},
	} {
		err := classify(test.ctx, test.err)
		if e := details(t, err); e.Class != test.class || !errors.Is(err, test.err) || e.Code != sqlState(test.err) {
			t.Errorf("%v: %+v", test.err, e)
		}
	}
	if err := classify(expired, driver.ErrBadConn); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v does not wrap the context's error", err)
	}
}

func TestMillisecondsNeverRoundToNoLimit(t *testing.T) {
	for d, want := range map[time.Duration]string{
		1:                       "1",
		400 * time.Microsecond:  "1",
		time.Millisecond:        "1",
		time.Millisecond + 1:    "2",
		1500 * time.Millisecond: "1500",
		1<<63 - 1:               "2147483647",
	} {
		if got := milliseconds(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

func TestLookAlikesAreRefusedByName(t *testing.T) {
	for version, class := range map[string]dialect.Class{
		"PostgreSQL 15.18 (Debian 15.18-0+deb12u1) on x86_64-pc-linux-gnu":                           "",
		"PostgreSQL 15.2-YB-2025.1.0.0-b0 on x86_64-pc-linux-gnu":                                    "",
		"PostgreSQL 12.22, compiled by Visual C++ build 1914, 64-bit":                                "",
		"PostgreSQL 18beta1 on x86_64-pc-linux-gnu":                                                  "",
		"PostgreSQL 11.2-YB-2.20.0.0-b0 on x86_64-pc-linux-gnu":                                      dialect.Unsupported,
		"PostgreSQL 9.6.24 on x86_64-pc-linux-gnu":                                                   dialect.Unsupported,
		"CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu, built 2024/05/15 21:28:29, go1.22.2)":         dialect.Unsafe,
		"PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC gcc (GCC) 3.4.2, Redshift 1.0.50468": dialect.Unsafe,
	} {
		if err := refuseLookAlike(version, "localhost"); dialect.ClassOf(err) != class {
			t.Errorf("%s: %v", version, err)
		}
	}
	err := refuseLookAlike("PostgreSQL 16", "abc123.dsql.us-east-1.on.aws")
	if dialect.ClassOf(err) != dialect.Unsafe || !strings.Contains(err.Error(), "DSQL") {
		t.Errorf("Aurora DSQL: %v", err)
	}
}

func TestTheWayPastAPoolerIsNamedWhereHostAndPortTell(t *testing.T) {
	for _, test := range []struct {
		host string
		port uint16
		way  string
	}{
		{"ep-cool-name-123-pooler.eu-central-1.aws.neon.tech", 5432, "ep-cool-name-123.eu-central-1.aws.neon.tech"},
		{"aws-0-eu-central-1.pooler.supabase.com", 6543, "5432"},
		{"db.abcdefgh.supabase.co", 6543, "5432"},
		{"shop.postgres.database.azure.com", 6432, "5432"},
		{"db-1.b.db.ondigitalocean.com", 25061, "25060"},
		{"shop.proxy-abc123.eu-west-1.rds.amazonaws.com", 5432, "the endpoint of the instance"},
		{"shop.postgres.database.azure.com", 5432, ""},
		{"pgbouncer.internal", 6432, ""},
		{"", 0, ""},
	} {
		if way := pastPooler(test.host, test.port); !strings.Contains(way, test.way) || (way == "") != (test.way == "") {
			t.Errorf("%s:%d: %q", test.host, test.port, way)
		}
	}
}

func TestTheWayToAnAuroraPrimaryIsNamed(t *testing.T) {
	err := standbyError("shop.cluster-ro-abc.eu-west-1.rds.amazonaws.com")
	if !strings.Contains(err.Error(), "shop.cluster-abc.eu-west-1.rds.amazonaws.com") {
		t.Error(err)
	}
	if strings.Contains(standbyError("localhost").Error(), "Aurora") || strings.Contains(errStandby.Error(), "Aurora") {
		t.Error("Aurora is named for other servers")
	}
}

func TestAProbeThatLosesItsConnectionDoesNotBlameTheLocks(t *testing.T) {
	const what = "a lock could not be released"
	for _, c := range []struct {
		err  error
		want dialect.Class
	}{
		{explain(io.ErrUnexpectedEOF), dialect.Unavailable},
		{explain(&pgconn.PgError{Code: "57P01"}), dialect.Unavailable}, // pg_terminate_backend
		{explain(&pgconn.PgError{Code: "42883"}), dialect.Unsafe},      // no such function
		{&dialect.Error{Class: dialect.NotHeld}, dialect.Unsafe},
		{&dialect.Error{Class: dialect.Lost, Hint: poolerHint}, dialect.Unsafe}, // another process answers
		{nil, dialect.Unsafe},
	} {
		if err := brokenPromise(t.Context(), what, c.err); dialect.ClassOf(err) != c.want {
			t.Errorf("%v: %v, want class %q", c.err, err, c.want)
		}
	}
}
