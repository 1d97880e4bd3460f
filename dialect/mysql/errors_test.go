package mysql

import (
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
)

func TestClassifyNumbers(t *testing.T) {
	type want struct {
		class   dialect.Class
		remains dialect.Remains
	}
	both := map[uint16]want{
		1205: {dialect.Timeout, dialect.RemainsUsable},
		1213: {dialect.Deadlock, dialect.RemainsNothing},
		3058: {dialect.Deadlock, dialect.RemainsUsable},
		3572: {dialect.NotAcquired, dialect.RemainsUsable},
		1317: {dialect.Canceled, dialect.RemainsUsable},
		3024: {dialect.Timeout, dialect.RemainsUsable},
		1969: {dialect.Timeout, dialect.RemainsUsable},
		1146: {dialect.Setup, dialect.RemainsUsable},
		1142: {dialect.Denied, dialect.RemainsUsable},
		1044: {dialect.Denied, dialect.RemainsUsable},
		1227: {dialect.Denied, dialect.RemainsUsable},
		1045: {dialect.Unavailable, dialect.RemainsUnknown},
		1049: {dialect.Unavailable, dialect.RemainsUnknown},
		1040: {dialect.Capacity, dialect.RemainsUnknown},
		1203: {dialect.Capacity, dialect.RemainsUnknown},
		1226: {dialect.Capacity, dialect.RemainsUnknown},
		1290: {dialect.Unsafe, dialect.RemainsUsable},
		1836: {dialect.Unsafe, dialect.RemainsUsable},
		1792: {dialect.Unsupported, dialect.RemainsUsable},
		3057: {dialect.InvalidKey, dialect.RemainsUsable},
		1059: {dialect.InvalidKey, dialect.RemainsUsable},
		1235: {dialect.Unsupported, dialect.RemainsUsable},
		1053: {dialect.Lost, dialect.RemainsNothing},
		1927: {dialect.Lost, dialect.RemainsNothing},
	}
	only := map[*flavor]map[uint16]want{
		&mysqlFlavor:   {4031: {dialect.Lost, dialect.RemainsNothing}, 4163: {dialect.InvalidKey, dialect.RemainsUsable}, 4079: {}},
		&mariadbFlavor: {4079: {dialect.InvalidKey, dialect.RemainsUsable}, 4031: {}, 4163: {}},
	}
	for f, numbers := range only {
		db := &DB{flavor: f}
		check := func(number uint16, want want) {
			cause := &driver.MySQLError{Number: number, Message: "message"}
			err := db.Classify(fmt.Errorf("wrapped: %w", cause))
			var e *dialect.Error
			switch {
			case !errors.Is(err, cause):
				t.Errorf("%s %d: the cause is gone: %v", f.name, number, err)
			case want.class == "":
				if errors.As(err, &e) {
					t.Errorf("%s %d: %v, which is the other server's", f.name, number, err)
				}
			case !errors.As(err, &e) || e.Class != want.class || e.Remains != want.remains || e.Code != fmt.Sprint(number):
				t.Errorf("%s %d: %v, %+v", f.name, number, err, e)
			}
		}
		for number, want := range both {
			check(number, want)
		}
		for number, want := range numbers {
			check(number, want)
		}
	}
	timeout := &driver.MySQLError{Number: 1205}
	var e *dialect.Error
	db := &DB{flavor: &mysqlFlavor, rollbackOnTimeout: true}
	if !errors.As(db.Classify(timeout), &e) || e.Remains != dialect.RemainsNothing {
		t.Errorf("under innodb_rollback_on_timeout: %+v", e)
	}
	if hint := db.Classify(&driver.MySQLError{Number: 1146}).Error(); !strings.Contains(hint, "dblock setup") {
		t.Errorf("a missing table: %s", hint)
	}
}

func TestClassifyOthers(t *testing.T) {
	db := &DB{flavor: &mariadbFlavor}
	for want, causes := range map[dialect.Class][]error{
		dialect.Canceled:    {context.Canceled, fmt.Errorf("%w: %w", context.Canceled, driver.ErrInvalidConn)},
		dialect.Timeout:     {context.DeadlineExceeded},
		dialect.Unavailable: {&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}},
		dialect.Closed:      {sql.ErrTxDone},
		dialect.Lost: {driver.ErrInvalidConn, sqldriver.ErrBadConn, sql.ErrConnDone, io.EOF, io.ErrUnexpectedEOF,
			&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}},
	} {
		for _, cause := range causes {
			err := db.Classify(cause)
			if dialect.ClassOf(err) != want || !errors.Is(err, cause) {
				t.Errorf("%v: %v, want %v", cause, err, want)
			}
			if again := db.Classify(err); again != err {
				t.Errorf("%v was classified twice: %v", cause, again)
			}
		}
	}
	unknown := errors.New("unknown")
	if err := db.Classify(unknown); err != unknown {
		t.Errorf("what is unknown became %v", err)
	}
	if err := db.Classify(nil); err != nil {
		t.Errorf("nil became %v", err)
	}
}

// The driver may report the connection that it closed instead of why.
func TestFailureNamesTheEndOfTheContext(t *testing.T) {
	db := &DB{flavor: &mysqlFlavor}
	ctx, cancel := context.WithCancel(t.Context())
	if err := db.failure(ctx, driver.ErrInvalidConn); dialect.ClassOf(err) != dialect.Lost {
		t.Errorf("with a live context: %v", err)
	}
	cancel()
	if err := db.failure(ctx, driver.ErrInvalidConn); dialect.ClassOf(err) != dialect.Canceled || !errors.Is(err, driver.ErrInvalidConn) {
		t.Errorf("after a cancel: %v", err)
	}
	if err := db.failure(ctx, &driver.MySQLError{Number: 1213}); dialect.ClassOf(err) != dialect.Deadlock {
		t.Errorf("a deadlock that crosses the cancel: %v", err)
	}
	if err := db.failure(ctx, nil); err != nil {
		t.Errorf("success that crosses the cancel: %v", err)
	}
}

func TestAConnectionThatBreaksWhileItIsMadeIsUnavailable(t *testing.T) {
	db := &DB{flavor: &mysqlFlavor}
	if err := db.connectFailure(t.Context(), driver.ErrInvalidConn); dialect.ClassOf(err) != dialect.Unavailable || errors.Is(err, dialect.Lost) {
		t.Errorf("%v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := db.connectFailure(ended, driver.ErrInvalidConn); dialect.ClassOf(err) != dialect.Canceled {
		t.Errorf("after the end of the context: %v", err)
	}
}
