package lookalikes_test

import (
	"context"
	"maps"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
)

// postgresStub is a server with advisory locks for tries of one key.
type postgresStub struct {
	version string
	// what differs from PostgreSQL
	noLocks   bool // pg_try_advisory_lock always succeeds
	forgets   bool // a lock is gone at once
	stuck     bool // an unlock does nothing
	missing   string
	announced int                // the process that BackendKeyData names, in place of the server's
	process   func(conn int) int // that answers; default: one for each connection

	*listener
	mu      sync.Mutex
	holders map[string]int
}

const realPostgres = "PostgreSQL 16.4 on x86_64-pc-linux-gnu, compiled by gcc, 64-bit"

func (s *postgresStub) start(t *testing.T) *postgresStub {
	t.Helper()
	s.holders = map[string]int{}
	if s.process == nil {
		s.process = func(conn int) int { return conn }
	}
	s.listener = serve(t, s.serve)
	return s
}

func (s *postgresStub) open(ctx context.Context, allowUnsafe bool) (dialect.DB, error) {
	return postgres.Open(ctx, "postgres://me:secret@"+s.address+"/shop?sslmode=disable", &postgres.Options{AllowUnsafe: allowUnsafe})
}

// column is one value of an answer of one row, in text.
type column struct {
	oid   uint32
	value string
}

// noMark is that of a session on which nothing was set.
var noMark = column{pgtype.TextOID, ""}

type refusal struct{ code, message string }

// answer is that of a server to one query.
func (s *postgresStub) answer(conn int, query string, args [][]byte) ([]column, *refusal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pid := column{pgtype.Int8OID, strconv.Itoa(s.process(conn))}
	key := ""
	if len(args) > 0 {
		key = string(args[0])
	}
	holder, held := s.holders[key]
	switch {
	case s.missing != "" && strings.Contains(query, s.missing):
		return nil, &refusal{"42883", "function " + s.missing + "(bigint) does not exist"}
	case query == "SELECT version()":
		return []column{{pgtype.TextOID, s.version}}, nil
	case query == "SELECT pg_backend_pid()":
		return []column{pid}, nil
	case query == "SELECT pg_is_in_recovery()":
		return []column{{pgtype.BoolOID, "f"}}, nil
	case query == "BEGIN", query == "ROLLBACK", query == "-- ping":
		return nil, nil
	case strings.Contains(query, "pg_try_advisory_lock("):
		refused := "1" // the place of the key
		if !held || holder == conn || s.noLocks {
			refused = ""
			s.holders[key] = conn
			if s.forgets {
				delete(s.holders, key)
			}
		}
		return []column{pid, noMark, {pgtype.TextOID, refused}}, nil
	case strings.Contains(query, "pg_advisory_unlock("):
		lacks := "1"
		if held && holder == conn {
			lacks = ""
			if !s.stuck {
				delete(s.holders, key)
			}
		}
		return []column{pid, noMark, {pgtype.TextOID, lacks}}, nil
	case strings.Contains(query, "pg_locks") && strings.Contains(query, "string_agg"):
		positions := ""
		for _, by := range s.holders {
			if by == conn {
				positions = "1"
			}
		}
		return []column{pid, {pgtype.TextOID, positions}}, nil
	}
	return nil, &refusal{"0A000", "not supported: " + query}
}

func (s *postgresStub) end(conn int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.holders, func(_ string, holder int) bool { return holder == conn })
}

func (s *postgresStub) serve(id int, c net.Conn) {
	defer s.end(id)
	backend := pgproto3.NewBackend(c, c)
	if _, err := backend.ReceiveStartupMessage(); err != nil {
		return
	}
	announced := s.announced
	if announced == 0 {
		announced = s.process(id)
	}
	backend.Send(&pgproto3.AuthenticationOk{})
	backend.Send(&pgproto3.BackendKeyData{ProcessID: uint32(announced), SecretKey: []byte{1, 2, 3, 4}})
	backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	if backend.Flush() != nil {
		return
	}
	var query string
	var args [][]byte
	var row []column
	var failed *refusal
	send := func() {
		if failed != nil {
			backend.Send(&pgproto3.ErrorResponse{Severity: "ERROR", Code: failed.code, Message: failed.message})
			return
		}
		if row != nil {
			var values [][]byte
			for _, c := range row {
				values = append(values, []byte(c.value))
			}
			backend.Send(&pgproto3.DataRow{Values: values})
		}
		backend.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")})
	}
	describe := func() {
		if row == nil {
			backend.Send(&pgproto3.NoData{})
			return
		}
		var fields []pgproto3.FieldDescription
		for _, c := range row {
			fields = append(fields, pgproto3.FieldDescription{Name: []byte("c"), DataTypeOID: c.oid, DataTypeSize: -1, TypeModifier: -1})
		}
		backend.Send(&pgproto3.RowDescription{Fields: fields})
	}
	for {
		message, err := backend.Receive()
		if err != nil {
			return
		}
		switch m := message.(type) {
		case *pgproto3.Query:
			s.record(m.String)
			row, failed = s.answer(id, m.String, nil)
			if failed == nil && row != nil {
				describe()
			}
			send()
			backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		case *pgproto3.Parse:
			query = m.Query
			s.record(query)
			backend.Send(&pgproto3.ParseComplete{})
		case *pgproto3.Bind:
			args = m.Parameters
			row, failed = s.answer(id, query, args)
			backend.Send(&pgproto3.BindComplete{})
		case *pgproto3.Describe:
			if failed == nil {
				describe()
			}
		case *pgproto3.Execute:
			send()
		case *pgproto3.Sync:
			backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		case *pgproto3.Terminate:
			return
		}
		if backend.Flush() != nil {
			return
		}
	}
}

func TestFaithfulPostgresIsAccepted(t *testing.T) {
	for _, version := range []string{realPostgres, "PostgreSQL 15.2-YB-2025.1.0.0-b0 on x86_64-pc-linux-gnu"} {
		s := (&postgresStub{version: version}).start(t)
		wantAccepted(t, s.listener, s.open)
	}
}

func TestPostgresLookAlikesAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		stub  *postgresStub
		class dialect.Class
		names string
	}{
		"CockroachDB":                     {&postgresStub{version: "CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu)", noLocks: true}, dialect.Unsafe, "CockroachDB"},
		"Redshift":                        {&postgresStub{version: "PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC, Redshift 1.0.50468", missing: "pg_try_advisory_lock"}, dialect.Unsafe, "Redshift"},
		"YugabyteDB without locks":        {&postgresStub{version: "PostgreSQL 15.2-YB-2.25.0.0-b0 on x86_64", missing: "pg_try_advisory_lock"}, dialect.Unsafe, "does not exist"},
		"YugabyteDB of old":               {&postgresStub{version: "PostgreSQL 11.2-YB-2.20.0.0-b0 on x86_64", noLocks: true}, dialect.Unsupported, "PostgreSQL 12"},
		"PostgreSQL 11":                   {&postgresStub{version: "PostgreSQL 11.22 on x86_64-pc-linux-gnu"}, dialect.Unsupported, "PostgreSQL 12"},
		"a lock that everybody gets":      {&postgresStub{version: realPostgres, noLocks: true}, dialect.Unsafe, "two sessions could lock the same key"},
		"a lock that is forgotten":        {&postgresStub{version: realPostgres, forgets: true}, dialect.Unsafe, "two sessions could lock the same key"},
		"an unlock that does nothing":     {&postgresStub{version: realPostgres, stuck: true}, dialect.Unsafe, "a released key stayed locked"},
		"no lock functions":               {&postgresStub{version: realPostgres, missing: "pg_try_advisory_lock"}, dialect.Unsafe, "pg_try_advisory_lock(bigint) does not exist"},
		"no view of the locks":            {&postgresStub{version: realPostgres, missing: "pg_locks"}, dialect.Unsafe, "does not show who holds a key"},
		"no notion of a standby":          {&postgresStub{version: realPostgres, missing: "pg_is_in_recovery"}, dialect.Unsafe, "does not answer as PostgreSQL does"},
		"no notion of a server process":   {&postgresStub{version: realPostgres, missing: "pg_backend_pid"}, dialect.Unsafe, "does not answer as PostgreSQL does"},
		"one process for all connections": {&postgresStub{version: realPostgres, process: func(int) int { return 7 }}, dialect.Unsafe, "one server process, 7"},
		"a pooler with one for all":       {&postgresStub{version: realPostgres, announced: 3000, process: func(int) int { return 7 }}, dialect.Unsafe, "session mode"},
	} {
		t.Run(name, func(t *testing.T) {
			s := c.stub.start(t)
			wantRefused(t, s.listener, s.open, c.class, c.names)
		})
	}
}

// Each query may be answered by another process.
func TestConnectionThatMovesIsRefused(t *testing.T) {
	n := 0
	s := (&postgresStub{version: realPostgres, announced: 3000, process: func(int) int { n++; return 100 + n%7 }}).start(t)
	wantUnsafe := func() {
		_, err := s.open(t.Context(), false)
		if dialect.ClassOf(err) != dialect.Unsafe || !strings.Contains(err.Error(), "moved from server process") {
			t.Errorf("%v", err)
		}
	}
	wantUnsafe()
	wantUnsafe()
	s.wantNothingChanged(t)
}
