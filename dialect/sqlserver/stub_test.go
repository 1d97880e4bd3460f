package sqlserver

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	mssql "github.com/microsoft/go-mssqldb"
)

// stub is a database/sql driver that records what it is asked and answers from a
// script. Like go-mssqldb it takes named and output parameters, fills output
// parameters only when the call succeeds, and reports errors of the server as
// mssql.Error.
type stub struct {
	mu     sync.Mutex
	script []answer
	calls  []call
	conns  int
	closed []int // sessions whose connections were closed
	spid   func(conn int) int32
}

// call is a statement as it arrived.
type call struct {
	session int
	query   string
	args    map[string]any // without output parameters
}

// answer is for one statement, in the order of the script.
type answer struct {
	outs    map[string]any
	columns []string
	rows    [][]driver.Value
	err     error
}

func newStub(t *testing.T, script ...answer) (*stub, *sql.DB) {
	t.Helper()
	s := &stub{script: script, spid: func(conn int) int32 { return int32(50 + conn) }}
	db := sql.OpenDB(s)
	t.Cleanup(func() {
		db.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.script) > 0 {
			t.Errorf("%d answers of the script were not asked for", len(s.script))
		}
	})
	return s, db
}

// sent is every call so far that contains the text.
func (s *stub) sent(text string) []call {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []call
	for _, c := range s.calls {
		if strings.Contains(c.query, text) {
			found = append(found, c)
		}
	}
	return found
}

func (s *stub) Driver() driver.Driver { return nil }

func (s *stub) Connect(context.Context) (driver.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns++
	return &stubConn{stub: s, id: s.conns}, nil
}

// next records a call and takes its answer. Asking for the session needs none.
func (s *stub) next(c *stubConn, query string, args []driver.NamedValue) (answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := call{session: c.id, query: query, args: map[string]any{}}
	outs := map[string]any{}
	for _, a := range args {
		if out, ok := a.Value.(sql.Out); ok {
			outs[a.Name] = out.Dest
		} else {
			seen.args[a.Name] = a.Value
		}
	}
	s.calls = append(s.calls, seen)
	if strings.HasSuffix(query, "SELECT CONVERT(int, @@SPID);") {
		return answer{columns: []string{""}, rows: [][]driver.Value{{int64(s.spid(c.id))}}}, nil
	}
	if len(s.script) == 0 {
		return answer{}, errors.New("stub: no answer left for: " + query)
	}
	a := s.script[0]
	s.script = s.script[1:]
	if a.err != nil {
		return answer{}, a.err
	}
	assign(outs, map[string]any{"session": s.spid(c.id), "transactions": c.transactions})
	for name := range a.outs {
		if _, ok := outs[name]; !ok {
			return answer{}, errors.New("stub: the call has no output parameter " + name)
		}
	}
	assign(outs, a.outs)
	return a, nil
}

func assign(outs, values map[string]any) {
	for name, value := range values {
		if dest, ok := outs[name]; ok {
			to := reflect.ValueOf(dest).Elem()
			to.Set(reflect.ValueOf(value).Convert(to.Type()))
		}
	}
}

type stubConn struct {
	stub         *stub
	id           int
	transactions int32
}

func (c *stubConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("stub: prepare") }

func (c *stubConn) Close() error {
	c.stub.mu.Lock()
	defer c.stub.mu.Unlock()
	if !slices.Contains(c.stub.closed, c.id) { // a second Close does nothing
		c.stub.closed = append(c.stub.closed, c.id)
	}
	return nil
}

func (c *stubConn) Begin() (driver.Tx, error) {
	c.transactions = 1
	return stubTx{c}, nil
}

func (c *stubConn) CheckNamedValue(v *driver.NamedValue) error {
	switch v.Value.(type) {
	case sql.Out, int32:
		return nil
	}
	var err error
	v.Value, err = driver.DefaultParameterConverter.ConvertValue(v.Value)
	return err
}

func (c *stubConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	_, err := c.stub.next(c, query, args)
	return driver.ResultNoRows, err
}

func (c *stubConn) QueryContext(_ context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	a, err := c.stub.next(c, query, args)
	if err != nil {
		return nil, err
	}
	return &stubRows{a}, nil
}

type stubTx struct{ conn *stubConn }

func (t stubTx) Commit() error   { t.conn.transactions = 0; return nil }
func (t stubTx) Rollback() error { t.conn.transactions = 0; return nil }

type stubRows struct{ answer }

func (r *stubRows) Columns() []string { return r.columns }
func (r *stubRows) Close() error      { return nil }

func (r *stubRows) Next(into []driver.Value) error {
	if len(r.rows) == 0 {
		return io.EOF
	}
	copy(into, r.rows[0])
	r.rows = r.rows[1:]
	return nil
}

// serverError is how go-mssqldb reports what the server raised in one call.
func serverError(numbers ...int32) error {
	all := make([]mssql.Error, len(numbers))
	for i, n := range numbers {
		all[i] = mssql.Error{Number: n, Class: 16, Message: "message"}
	}
	last := all[len(all)-1]
	last.All = slices.Clone(all)
	return last
}

// status is what sp_getapplock or sp_releaseapplock returned, after some keys
// had been granted.
func status(code, granted int) answer {
	return answer{outs: map[string]any{"status": code, "granted": granted}}
}

func released(code int) answer { return answer{outs: map[string]any{"status": code}} }
