package lookalikes_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
)

// mysqlStub is a server with GET_LOCK.
type mysqlStub struct {
	version, comment string
	variables        map[string]string
	// what differs from MySQL
	getLock  string                              // what GET_LOCK always returns: a number, NULL, or an error's number
	forgets  bool                                // a lock is gone at once
	stuck    bool                                // RELEASE_LOCK does nothing
	members  [][]string                          // of the replication group: this member's state, role, and the number of primaries
	hidden   bool                                // performance_schema is not for this user
	session  func(conn int) int                  // that answers; default: one for each connection
	server   func(conn int, query string) string // that runs the query, and whether it is read-only; default: db:3306:1
	readOnly func(query string) string

	*listener
	mu      sync.Mutex
	holders map[string]int
}

func (s *mysqlStub) start(t *testing.T) *mysqlStub {
	t.Helper()
	s.holders = map[string]int{}
	if s.session == nil {
		s.session = func(conn int) int { return conn }
	}
	if s.server == nil {
		s.server = func(int, string) string { return "db:3306:1" }
	}
	if s.readOnly == nil {
		s.readOnly = func(string) string { return "0" }
	}
	s.listener = serve(t, s.serve)
	return s
}

func (s *mysqlStub) open(ctx context.Context, allowUnsafe bool) (dialect.DB, error) {
	return mysql.Open(ctx, "mysql://me:secret@"+s.address+"/shop", &mysql.Options{AllowUnsafe: allowUnsafe})
}

const null = "NULL"

// mysqlError is an error packet's number and text.
type mysqlError struct {
	number  uint16
	message string
}

var lockCall = regexp.MustCompile(`^SELECT (\w+)\('([^']*)'`)

// answer is rows of text, or an error.
func (s *mysqlStub) answer(conn int, query string) ([][]string, *mysqlError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := strconv.Itoa(s.session(conn))
	switch {
	case query == "SELECT VERSION(), DATABASE()":
		return [][]string{{s.version, "shop"}}, nil
	case strings.HasPrefix(query, "SHOW GLOBAL VARIABLES"), strings.HasPrefix(query, "SHOW SESSION VARIABLES"):
		rows := [][]string{{"version_comment", s.comment}}
		for name, value := range s.variables {
			if strings.Contains(query, "'"+name+"'") {
				rows = append(rows, []string{name, value})
			}
		}
		return rows, nil
	case strings.Contains(query, "performance_schema.replication_group_members"):
		if s.hidden {
			return nil, &mysqlError{1142, "SELECT command denied to user"}
		}
		return s.members, nil
	case strings.HasPrefix(query, "SELECT CONNECTION_ID(), "):
		return [][]string{{id, s.server(conn, query)}}, nil
	}
	call := lockCall.FindStringSubmatch(query)
	if call == nil {
		return nil, &mysqlError{1105, "unknown to the stub: " + query}
	}
	holder, held := s.holders[call[2]]
	result := "0"
	switch call[1] {
	case "GET_LOCK":
		if number, err := strconv.Atoi(s.getLock); err == nil && number > 1 {
			return nil, &mysqlError{uint16(number), "no GET_LOCK here"}
		}
		if !held || holder == conn {
			s.holders[call[2]] = conn
			result = "1"
		}
		if s.getLock != "" {
			result = s.getLock
		}
		if s.forgets {
			delete(s.holders, call[2])
		}
	case "IS_USED_LOCK": // <=> CONNECTION_ID()
		if holder == conn {
			result = "1"
		}
	case "RELEASE_LOCK":
		if result = null; held && holder == conn {
			result = "1"
			if !s.stuck {
				delete(s.holders, call[2])
			}
		}
	}
	return [][]string{{result, id, s.server(conn, query), s.readOnly(query)}}, nil
}

// The protocol: https://dev.mysql.com/doc/dev/mysql-server/latest/PAGE_PROTOCOL.html.

const (
	capabilities = 0x1 | 0x8 | 0x200 | 0x2000 | 0x8000 | 0x80000 // passwords, a database, version 4.1, transactions, named ways to log in
	comQuit      = 0x01
	comQuery     = 0x03
	comPing      = 0x0e
	charset      = 45 // utf8mb4_general_ci
)

// wire is one connection's packets.
type wire struct {
	net.Conn
	in       *bufio.Reader
	sequence byte
}

func (w *wire) read() ([]byte, error) {
	var header [4]byte
	if _, err := io.ReadFull(w.in, header[:]); err != nil {
		return nil, err
	}
	w.sequence = header[3] + 1
	body := make([]byte, int(header[0])|int(header[1])<<8|int(header[2])<<16)
	_, err := io.ReadFull(w.in, body)
	return body, err
}

func (w *wire) write(body []byte) error {
	n := len(body)
	packet := append([]byte{byte(n), byte(n >> 8), byte(n >> 16), w.sequence}, body...)
	w.sequence++
	_, err := w.Write(packet)
	return err
}

func (w *wire) ok() error  { return w.write([]byte{0, 0, 0, 2, 0, 0, 0}) }
func (w *wire) eof() error { return w.write([]byte{0xfe, 0, 0, 2, 0}) }

func (w *wire) refuse(e *mysqlError) error {
	return w.write(append(binary.LittleEndian.AppendUint16([]byte{0xff}, e.number), "#HY000"+e.message...))
}

// text is a string with its length in front.
func text(b []byte, s string) []byte {
	b = append(b, 0xfc)
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...)
}

func (w *wire) rows(rows [][]string) error {
	columns := 1
	if len(rows) > 0 {
		columns = len(rows[0])
	}
	if err := w.write([]byte{byte(columns)}); err != nil {
		return err
	}
	for range columns {
		var b []byte
		for _, s := range []string{"def", "", "", "", "c", "c"} {
			b = text(b, s)
		}
		b = append(b, 0x0c, charset, 0, 0, 4, 0, 0, 0xfd, 0, 0, 0, 0, 0)
		if err := w.write(b); err != nil {
			return err
		}
	}
	if err := w.eof(); err != nil {
		return err
	}
	for _, row := range rows {
		var b []byte
		for _, value := range row {
			if value == null {
				b = append(b, 0xfb)
			} else {
				b = text(b, value)
			}
		}
		if err := w.write(b); err != nil {
			return err
		}
	}
	return w.eof()
}

func (s *mysqlStub) serve(id int, c net.Conn) {
	w := &wire{Conn: c, in: bufio.NewReader(c)}
	greeting := append([]byte{10}, s.version+"\x00"...)
	greeting = binary.LittleEndian.AppendUint32(greeting, uint32(id))
	greeting = append(greeting, "saltsalt\x00"...)
	greeting = binary.LittleEndian.AppendUint16(greeting, capabilities&0xffff)
	greeting = append(greeting, charset, 2, 0)
	greeting = binary.LittleEndian.AppendUint16(greeting, capabilities>>16)
	greeting = append(greeting, 21)
	greeting = append(greeting, make([]byte, 10)...)
	greeting = append(greeting, "saltsaltsalt\x00mysql_native_password\x00"...)
	if w.write(greeting) != nil {
		return
	}
	if _, err := w.read(); err != nil || w.ok() != nil { // everybody may come in
		return
	}
	for {
		command, err := w.read()
		if err != nil || len(command) == 0 || command[0] == comQuit {
			return
		}
		switch command[0] {
		case comPing:
			err = w.ok()
		case comQuery:
			query := string(command[1:])
			s.record(query)
			rows, refused := s.answer(id, query)
			if refused != nil {
				err = w.refuse(refused)
			} else {
				err = w.rows(rows)
			}
		default:
			err = w.refuse(&mysqlError{1295, "unknown to the stub"})
		}
		if err != nil {
			return
		}
	}
}

const realMySQL = "8.4.6"

func TestFaithfulMySQLIsAccepted(t *testing.T) {
	group := map[string]string{"group_replication_group_name": "a", "group_replication_single_primary_mode": "ON"}
	for name, s := range map[string]*mysqlStub{
		"MySQL":                           {version: realMySQL, comment: "MySQL Community Server - GPL"},
		"the oldest MySQL":                {version: "5.7.8"},
		"MariaDB":                         {version: "10.11.6-MariaDB"},
		"MariaDB that can do Galera":      {version: "10.11.6-MariaDB", variables: map[string]string{"wsrep_on": "OFF", "read_only": "OFF"}},
		"the primary of a group":          {version: realMySQL, variables: group, members: [][]string{{"ONLINE", "PRIMARY", "1"}}},
		"a primary that shows no group":   {version: realMySQL, variables: group, hidden: true},
		"a server that is in no group":    {version: realMySQL, variables: map[string]string{"group_replication_group_name": "", "group_replication_single_primary_mode": "OFF"}},
		"a server that knows of replicas": {version: realMySQL, variables: map[string]string{"read_only": "OFF", "super_read_only": "OFF", "innodb_read_only": "OFF", "log_bin": "ON"}},
	} {
		t.Run(name, func(t *testing.T) {
			s.start(t)
			wantAccepted(t, s.listener, s.open)
		})
	}
}

func TestMySQLLookAlikesAreRefused(t *testing.T) {
	single := map[string]string{"group_replication_group_name": "a", "group_replication_single_primary_mode": "ON"}
	multi := map[string]string{"group_replication_group_name": "a", "group_replication_single_primary_mode": "OFF"}
	queries := regexp.MustCompile(`^SELECT GET_LOCK`)
	for name, c := range map[string]struct {
		stub  *mysqlStub
		class dialect.Class
		names string
	}{
		"MySQL 5.6":                     {&mysqlStub{version: "5.6.51-log"}, dialect.Unsafe, "upgrade to 5.7.8"},
		"MySQL 5.7.4":                   {&mysqlStub{version: "5.7.4-m14"}, dialect.Unsafe, "upgrade to 5.7.8"},
		"MariaDB 5.5":                   {&mysqlStub{version: "5.5.68-MariaDB"}, dialect.Unsafe, "upgrade to 10.1.1"},
		"TiDB":                          {&mysqlStub{version: "8.0.11-TiDB-v8.5.0"}, dialect.Unsafe, "TiDB"},
		"TiDB with another version":     {&mysqlStub{version: "8.0.36", comment: "TiDB Server (Apache License 2.0) Community Edition, MySQL 8.0 compatible"}, dialect.Unsafe, "TiDB"},
		"Vitess":                        {&mysqlStub{version: "8.0.40-Vitess"}, dialect.Unsafe, "Vitess"},
		"PlanetScale":                   {&mysqlStub{version: "8.0.34", comment: "PlanetScale"}, dialect.Unsafe, "Vitess"},
		"Galera":                        {&mysqlStub{version: "10.11.6-MariaDB-log", variables: map[string]string{"wsrep_on": "ON"}}, dialect.Unsafe, "Galera"},
		"Galera whose GET_LOCK fails":   {&mysqlStub{version: "10.1.48-MariaDB", getLock: "1235"}, dialect.Unsupported, "Galera"},
		"Percona XtraDB Cluster":        {&mysqlStub{version: "8.0.35-27.1", variables: map[string]string{"pxc_strict_mode": "PERMISSIVE"}}, dialect.Unsafe, "Galera"},
		"a multi-primary group":         {&mysqlStub{version: realMySQL, variables: multi, members: [][]string{{"ONLINE", "PRIMARY", "3"}}}, dialect.Unsafe, "single-primary mode"},
		"a multi-primary group of one":  {&mysqlStub{version: realMySQL, variables: multi, members: [][]string{{"ONLINE", "PRIMARY", "1"}}}, dialect.Unsafe, "single-primary mode"},
		"a multi-primary group, hidden": {&mysqlStub{version: realMySQL, variables: multi, hidden: true}, dialect.Unsafe, "single-primary mode"},
		"a secondary of a group":        {&mysqlStub{version: realMySQL, variables: single, members: [][]string{{"ONLINE", "SECONDARY", "1"}}}, dialect.Unsafe, "connect to the primary"},
		"a member that recovers":        {&mysqlStub{version: realMySQL, variables: single, members: [][]string{{"RECOVERING", "SECONDARY", "1"}}}, dialect.Unsafe, "RECOVERING"},
		"a member that left its group":  {&mysqlStub{version: realMySQL, variables: single}, dialect.Unsafe, "OFFLINE"},
		"a read-only server":            {&mysqlStub{version: realMySQL, variables: map[string]string{"read_only": "ON"}}, dialect.Unsafe, "read_only"},
		"an Aurora reader":              {&mysqlStub{version: "8.0.39", variables: map[string]string{"innodb_read_only": "ON"}}, dialect.Unsafe, "innodb_read_only"},
		"a lock that everybody gets":    {&mysqlStub{version: realMySQL, getLock: "1"}, dialect.Unsafe, "returned 1 instead of 0"},
		"a lock that nobody gets":       {&mysqlStub{version: realMySQL, getLock: "0"}, dialect.Unsafe, "returned 0 instead of 1"},
		"GET_LOCK returns NULL":         {&mysqlStub{version: realMySQL, getLock: null}, dialect.Unsafe, "returned NULL"},
		"no GET_LOCK":                   {&mysqlStub{version: realMySQL, getLock: "1305"}, dialect.Unsafe, "no GET_LOCK here"},
		"a lock that is forgotten":      {&mysqlStub{version: realMySQL, forgets: true}, dialect.Unsafe, "does not exclude"},
		"a release that does nothing":   {&mysqlStub{version: realMySQL, stuck: true}, dialect.Unsafe, "returned 0 instead of 1"},
		"one session for all":           {&mysqlStub{version: realMySQL, session: func(int) int { return 7 }}, dialect.Unsafe, "share session 7"},
		"a proxy that sends queries to another server": {&mysqlStub{version: realMySQL, server: func(_ int, query string) string {
			if queries.MatchString(query) {
				return "replica:3306:2"
			}
			return "db:3306:1"
		}}, dialect.Unsafe, "of replica:3306:2 answered"},
		"a proxy that spreads connections over servers": {&mysqlStub{version: realMySQL, server: func(conn int, _ string) string {
			return "db:3306:" + strconv.Itoa(conn)
		}}, dialect.Unsafe, "two servers"},
		"a proxy that sends queries to a replica": {&mysqlStub{version: realMySQL, readOnly: func(query string) string {
			if queries.MatchString(query) {
				return "1"
			}
			return "0"
		}}, dialect.Unsafe, "read_only = 1"},
	} {
		t.Run(name, func(t *testing.T) {
			s := c.stub.start(t)
			wantRefused(t, s.listener, s.open, c.class, c.names)
		})
	}
}

// Each query may be answered by another session.
func TestMySQLSessionThatMovesIsRefused(t *testing.T) {
	n := 0
	s := &mysqlStub{version: realMySQL, session: func(int) int { n++; return n }}
	s.start(t)
	_, err := s.open(t.Context(), false)
	if dialect.ClassOf(err) != dialect.Unsafe || !strings.Contains(err.Error(), "answered instead of session") {
		t.Errorf("%v", err)
	}
	s.wantNothingChanged(t)
}
