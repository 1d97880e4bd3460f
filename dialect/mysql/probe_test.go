package mysql

import (
	"cmp"
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"io"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dblock-go/dblock/dialect"
)

func TestServersAreToldApart(t *testing.T) {
	for version, want := range map[string]*flavor{
		"9.7.4-2":                    &mysqlFlavor,
		"8.0.35-27":                  &mysqlFlavor,
		"10.11.19-MariaDB-0+deb12u1": &mariadbFlavor,
		"11.8.2-MariaDB-log":         &mariadbFlavor,
	} {
		if got := flavorOf(version, "Source distribution"); got != want || refusal(version, "", nil) != nil {
			t.Errorf("%s is %s: %v", version, got.name, refusal(version, "", nil))
		}
	}
	if got := flavorOf("11.4.2-custom", "mariadb.org binary distribution"); got != &mariadbFlavor {
		t.Errorf("by its comment: %s", got.name)
	}
}

// refusal is why the probe refuses a server that answers so.
func refusal(version, comment string, variables map[string]string) error {
	return cmp.Or(
		refuseLookAlike(version, comment),
		flavorOf(version, comment).refuseOld(version),
		refuseGalera(variables),
		refuseReadOnly(variables),
	)
}

func TestUnsafeServersAreNamed(t *testing.T) {
	for _, c := range []struct {
		version, comment, variable, value, names string
	}{
		{version: "5.7.4", names: "upgrade to 5.7.8"},
		{version: "5.5.62-log", names: "upgrade"},
		{version: "10.0.38-MariaDB", names: "upgrade to 10.1.1"},
		{version: "unknown", names: "upgrade"},
		{version: "8.0.11-TiDB-v8.5.0", names: "TiDB"},
		{version: "8.0.40-Vitess", names: "Vitess"},
		{version: "10.11.6-MariaDB", variable: "wsrep_on", value: "ON", names: "Galera"},
		{version: "8.0.35-27", variable: "pxc_strict_mode", value: "ENFORCING", names: "Galera"},
		{version: "8.0.11", comment: "TiDB Server (Apache License 2.0) Community Edition", names: "TiDB"},
		{version: "9.0.0", variable: "read_only", value: "ON", names: "read_only"},
		{version: "9.0.0", variable: "super_read_only", value: "ON", names: "super_read_only"},
		{version: "8.0.28", variable: "innodb_read_only", value: "ON", names: "primary"},
		{version: "12.1.0-MariaDB", variable: "read_only", value: "NO_LOCK_NO_ADMIN", names: "NO_LOCK_NO_ADMIN"},
	} {
		err := refusal(c.version, c.comment, map[string]string{c.variable: c.value})
		if dialect.ClassOf(err) != dialect.Unsafe || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	calm := map[string]string{"wsrep_on": "OFF", "read_only": "OFF", "super_read_only": "0", "innodb_read_only": "OFF", "group_replication_single_primary_mode": "ON"}
	if err := refusal("8.4.0", "", calm); err != nil {
		t.Errorf("an ordinary server: %v", err)
	}
}

// fakeServer answers the probe as a server does whose GET_LOCK is what grant says.
type fakeServer struct {
	mu    sync.Mutex
	held  map[string]int // name: connection
	conns int
	grant func(held bool) int64
	moves atomic.Bool // a pooler gives the client another session
}

func (s *fakeServer) Connect(context.Context) (sqldriver.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns++
	return &fakeConn{server: s, id: s.conns}, nil
}

func (s *fakeServer) Driver() sqldriver.Driver { return nil }

type fakeConn struct {
	server *fakeServer
	id     int
}

func (c *fakeConn) Prepare(string) (sqldriver.Stmt, error) { return nil, errors.New("not prepared") }
func (c *fakeConn) Begin() (sqldriver.Tx, error)           { return nil, errors.New("not begun") }
func (c *fakeConn) Close() error                           { return nil }

var call = regexp.MustCompile(`^SELECT (\w+)\('(.*?)'`)

func (c *fakeConn) QueryContext(_ context.Context, query string, _ []sqldriver.NamedValue) (sqldriver.Rows, error) {
	switch {
	case strings.HasPrefix(query, "SELECT VERSION()"):
		return &fakeRows{"8.4.0", "shop"}, nil
	case strings.HasPrefix(query, "SHOW"):
		return &fakeRows{}, nil
	case strings.HasPrefix(query, "SELECT CONNECTION_ID()"):
		return &fakeRows{int64(c.id), "server"}, nil
	case strings.HasSuffix(query, ", @@GLOBAL.read_only"):
		answer, err := c.call(query)
		return &fakeRows{answer, int64(c.id), "server", "0"}, err
	}
	answer, err := c.call(query)
	switch {
	case err != nil:
		return nil, err
	case !strings.HasSuffix(query, ", CONNECTION_ID()"):
		return &fakeRows{answer}, nil
	case c.server.moves.Load():
		return &fakeRows{answer, int64(c.id + 1)}, nil
	}
	return &fakeRows{answer, int64(c.id)}, nil
}

// call runs a lock function.
func (c *fakeConn) call(query string) (answer int64, err error) {
	match := call.FindStringSubmatch(query)
	if match == nil {
		return 0, errors.New("unexpected: " + query)
	}
	s, name := c.server, match[2]
	s.mu.Lock()
	defer s.mu.Unlock()
	holder, held := s.held[name]
	switch match[1] {
	case "GET_LOCK":
		if answer = s.grant(held); answer == 1 && !held {
			s.held[name] = c.id
		}
	case "RELEASE_LOCK":
		if holder == c.id {
			delete(s.held, name)
			answer = 1
		}
	case "IS_USED_LOCK":
		if holder == c.id {
			answer = 1
		}
	}
	return answer, nil
}

type fakeRows []any

func (r *fakeRows) Columns() []string { return make([]string, len(*r)) }
func (r *fakeRows) Close() error      { return nil }
func (r *fakeRows) Next(dest []sqldriver.Value) error {
	if len(dest) == 0 || len(*r) == 0 {
		return io.EOF
	}
	for i := range dest {
		dest[i] = (*r)[i]
	}
	*r = nil
	return nil
}

func TestProbeShowsWhetherGetLockExcludes(t *testing.T) {
	for name, c := range map[string]struct {
		grant func(held bool) int64
		safe  bool
	}{
		"it excludes":            {grant: func(held bool) int64 { return map[bool]int64{false: 1}[held] }, safe: true},
		"it grants to everybody": {grant: func(bool) int64 { return 1 }},
		"it never grants":        {grant: func(bool) int64 { return 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			server := &fakeServer{held: map[string]int{}, grant: c.grant}
			pool := sql.OpenDB(server)
			defer pool.Close()
			db, err := New(t.Context(), pool)
			if c.safe && err != nil || !c.safe && (!errors.Is(err, dialect.Unsafe) || !strings.Contains(err.Error(), "AllowUnsafe")) {
				t.Fatal(err)
			}
			if open := pool.Stats().OpenConnections; !c.safe && open != 0 {
				t.Errorf("%d doubtful connections are in the pool", open)
			}
			if !c.safe {
				if db, err = New(t.Context(), pool, &Options{AllowUnsafe: true}); err != nil {
					t.Fatalf("allowed: %v", err)
				}
			}
			if db.Name() != "mysql" || db.Features().Scope != "shop" {
				t.Errorf("opened as %s, %+v", db.Name(), db.Features())
			}
		})
	}
}

func TestGrantToAnotherSessionIsUnsafe(t *testing.T) {
	server := &fakeServer{held: map[string]int{}, grant: func(held bool) int64 { return map[bool]int64{false: 1}[held] }}
	pool := sql.OpenDB(server)
	defer pool.Close()
	db, err := New(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pool.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s, err := db.OnConn(t.Context(), conn)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	request := dialect.Request{Keys: []dialect.Key{{Name: "a"}}}
	if _, err := s.Acquire(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	server.moves.Store(true)
	request.Keys[0].Name = "b"
	if _, err := s.Acquire(t.Context(), request); !errors.Is(err, dialect.Unsafe) {
		t.Errorf("a grant to another session: %v", err)
	}
}

func TestAPoolOfOneHasNoSession(t *testing.T) {
	pool := sql.OpenDB(&fakeServer{held: map[string]int{}, grant: func(held bool) int64 { return map[bool]int64{false: 1}[held] }})
	defer pool.Close()
	pool.SetMaxOpenConns(1)
	db, err := New(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.OpenSession(t.Context(), dialect.SessionOptions{}); !errors.Is(err, dialect.Capacity) || !strings.Contains(err.Error(), "SetMaxOpenConns") {
		t.Errorf("a session from a pool of one: %v", err)
	}
}

func TestTableNamesAreQuoted(t *testing.T) {
	db := &DB{database: "sh`op"}
	if got := db.quoted(dialect.Table{}); got != "`sh``op`.`locks`" {
		t.Errorf("default: %s", got)
	}
	if got := db.Migrations(dialect.Table{Schema: "s", Name: "n"}); len(got) == 0 || !strings.Contains(got[0].Up[0], "`s`.`n`") || !strings.Contains(got[0].Down[0], "`s`.`n`") {
		t.Errorf("migrations: %q", got)
	}
}

func TestKnownRowsAreBounded(t *testing.T) {
	var k knownRows
	key := func(id int64) []dialect.Key { return []dialect.Key{{ID: id}} }
	k.add("a", key(1))
	if len(k.unknown("a", key(1))) != 0 || len(k.unknown("b", key(1))) != 1 {
		t.Error("rows of two tables are mixed up")
	}
	k.forget("a", key(1)...)
	if len(k.unknown("a", key(1))) != 1 {
		t.Error("a forgotten row is known")
	}
	for id := range int64(maxKnown + 10) {
		k.add("a", key(id))
	}
	if n := len(k.rows); n > maxKnown {
		t.Errorf("%d rows are kept", n)
	}
	if len(k.unknown("a", key(maxKnown+9))) != 0 {
		t.Error("the latest row is unknown")
	}
}
