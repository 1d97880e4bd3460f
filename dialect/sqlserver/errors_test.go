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
	"strings"
	"testing"

	mssql "github.com/microsoft/go-mssqldb"

	"github.com/dblock-go/dblock/dialect"
)

func TestClassifyNumbers(t *testing.T) {
	for number, want := range map[int32]struct {
		class   dialect.Class
		remains dialect.Remains
	}{
		208:   {dialect.Setup, dialect.RemainsUnknown},
		229:   {dialect.Denied, dialect.RemainsUnknown},
		300:   {dialect.Denied, dialect.RemainsUnknown},
		596:   {dialect.Lost, dialect.RemainsNothing},
		1202:  {dialect.Setup, dialect.RemainsUnknown},
		1204:  {dialect.Capacity, dialect.RemainsUnknown},
		1205:  {dialect.Deadlock, dialect.RemainsNothing},
		1222:  {dialect.Timeout, dialect.RemainsUsable},
		1223:  {dialect.NotHeld, dialect.RemainsUnknown},
		1224:  {dialect.InvalidKey, dialect.RemainsUnknown},
		1227:  {dialect.InvalidOption, dialect.RemainsUnknown},
		1230:  {dialect.Setup, dialect.RemainsUnknown},
		3918:  {dialect.Unsupported, dialect.RemainsUnknown},
		3960:  {dialect.Serialization, dialect.RemainsNothing},
		4060:  {dialect.Unavailable, dialect.RemainsUnknown},
		17809: {dialect.Capacity, dialect.RemainsUnknown},
		18456: {dialect.Unavailable, dialect.RemainsUnknown},
	} {
		wantError(t, Classify(fmt.Errorf("wrapped: %w", serverError(number))), want.class, strconv.Itoa(int(number)), want.remains)
	}
}

func TestClassifyOthers(t *testing.T) {
	for _, c := range []struct {
		err   error
		class dialect.Class
	}{
		{context.Canceled, dialect.Canceled},
		{context.DeadlineExceeded, dialect.Timeout}, // a net.Error too, but nothing is lost
		{driver.ErrBadConn, dialect.Lost},
		{sql.ErrConnDone, dialect.Lost},
		{sql.ErrTxDone, dialect.Closed},
		{io.EOF, dialect.Lost},
		{&net.OpError{Op: "read", Err: errors.New("connection reset by peer")}, dialect.Lost},
		{mssql.ServerError{}, dialect.Lost},
		{mssql.StreamError{InnerError: errors.New("no confirmation")}, dialect.Lost},
		{serverError(50000), ""},
		{errors.New("something else"), ""},
	} {
		got := Classify(c.err)
		if dialect.ClassOf(got) != c.class || !strings.HasSuffix(got.Error(), c.err.Error()) {
			t.Errorf("%v gave %v, want class %q", c.err, got, c.class)
		}
		var e *dialect.Error
		if c.class == dialect.Closed && errors.As(got, &e) && e.Remains != dialect.RemainsUnknown {
			t.Errorf("%v leaves %d of a transaction that its owner may have committed", got, e.Remains)
		}
		if again := Classify(got); again.Error() != got.Error() {
			t.Errorf("%v changed when classified again: %v", got, again)
		}
	}
	if Classify(nil) != nil {
		t.Error("nil is an error")
	}
}

// The last error of a call is often only a consequence of the first.
func TestFirstErrorCounts(t *testing.T) {
	wantError(t, Classify(serverError(4060, 18456)), dialect.Unavailable, "4060")
	wantError(t, Classify(serverError(1205, 3998)), dialect.Deadlock, "1205")
	wantError(t, Classify(serverError(50000, 1222)), dialect.Timeout, "1222")
}

func TestConnectErrors(t *testing.T) {
	refused := fmt.Errorf("unable to open tcp connection with host 'h:1433': %w", &net.OpError{Op: "dial", Err: errors.New("connection refused")})
	wantError(t, connectError(t.Context(), refused), dialect.Unavailable, "")
	wantError(t, connectError(t.Context(), context.DeadlineExceeded), dialect.Unavailable, "")
	wantError(t, connectError(t.Context(), errors.New("TLS Handshake failed")), dialect.Unavailable, "")
	wantError(t, connectError(t.Context(), serverError(18456)), dialect.Unavailable, "18456")
	wantError(t, connectError(t.Context(), &dialect.Error{Class: dialect.Capacity}), dialect.Capacity, "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantError(t, connectError(ctx, refused), dialect.Canceled, "")
}

func TestOpenKeepsPasswordToItself(t *testing.T) {
	for _, dsn := range []string{
		"", "postgres://sa:geheim@h", "server=h;user id=sa;password=geheim", "sqlserver://sa:geheim@h:port",
		"sqlserver://sa:geheim%zz@h", "sqlserver://sa:geheim@127.0.0.1:1?dial+timeout=1&disableretry=true",
	} {
		_, err := Open(t.Context(), dsn)
		class := dialect.ClassOf(err)
		if class != dialect.InvalidOption && class != dialect.Unavailable {
			t.Errorf("%q gave %v", dsn, err)
		}
		if strings.Contains(fmt.Sprint(err), "geheim") {
			t.Errorf("the error repeats the password: %v", err)
		}
	}
}

// A password that is not escaped splits the DSN elsewhere than its author meant.
func TestOpenRefusesSplitPassword(t *testing.T) {
	for _, dsn := range []string{
		"sqlserver://sa:sec@geheim/x@127.0.0.1:1", "sqlserver://sa:sec@geheim/@127.0.0.1:1", "sqlserver://sa:sec/geheim@127.0.0.1:1",
		"sqlserver://sa:12/geheim@127.0.0.1:1", "sqlserver://sa:sec@geheim#x@127.0.0.1:1", "sqlserver://sa:sec@geheim?x@127.0.0.1:1?database=a",
		"sqlserver://sa:sec/geheim/x@127.0.0.1:1",
	} {
		_, err := Open(t.Context(), dsn)
		if dialect.ClassOf(err) != dialect.InvalidOption || !strings.Contains(err.Error(), "@ as %40") || strings.Contains(err.Error(), "geheim") {
			t.Errorf("%s gave %v", dsn, err)
		}
	}
	for _, dsn := range []string{
		"sqlserver://sa:a%40b%2Fc@h:1433/instance?database=x", "sqlserver://sa:a@b@h", "sqlserver://h?database=x&user+id=me@tenant&app+name=a/b",
	} {
		if !isWholeURL(dsn) {
			t.Errorf("%s is refused", dsn)
		}
	}
}

func TestNilTransactions(t *testing.T) {
	_, d := openDB(t)
	for _, tx := range []dialect.Tx{nil, (*sql.Tx)(nil), (*sql.Conn)(nil), (*ownedTx)(nil)} {
		for what, err := range map[string]error{
			"AcquireTx": d.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: keys}),
			"LockRows":  func() error { _, err := d.LockRows(t.Context(), tx, dialect.RowRequest{Keys: keys[:1]}); return err }(),
		} {
			if dialect.ClassOf(err) != dialect.InvalidOption || !strings.Contains(err.Error(), "the transaction is nil") {
				t.Errorf("%s on %T gave %v", what, tx, err)
			}
		}
	}
}
