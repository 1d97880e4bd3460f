package sqlserver

import (
	"context"
	"database/sql"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	"github.com/dblock-go/dblock/dialect"
)

// These tests run the real go-mssqldb against a server that speaks just enough
// of its protocol (MS-TDS) to answer one batch in a scripted way. They pin what
// the stub of the other tests assumes of the driver.

// Types of messages and tokens:
// https://learn.microsoft.com/openspecs/windows_protocols/ms-tds
const (
	tdsBatch     = 0x01
	tdsRPC       = 0x03
	tdsReply     = 0x04
	tdsAttention = 0x06
	tdsLogin     = 0x10
	tdsPrelogin  = 0x12

	tokenReturnStatus = 0x79
	tokenColumns      = 0x81
	tokenError        = 0xAA
	tokenReturnValue  = 0xAC
	tokenLoginAck     = 0xAD
	tokenRow          = 0xD1
	tokenDone         = 0xFD
	tokenDoneProc     = 0xFE

	doneError     = 0x02
	doneCount     = 0x10
	doneAttention = 0x20
)

type tdsServer struct {
	listener net.Listener
	answer   []byte      // to an RPC; none: the server goes on working
	working  chan string // gets the text of each RPC
	attended chan struct{}
	clients  chan net.Conn
}

func newTDSServer(t *testing.T, answer []byte) (*tdsServer, *DB) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &tdsServer{listener, answer, make(chan string, 1), make(chan struct{}, 1), make(chan net.Conn, 1)}
	go s.accept()
	db, err := sql.Open("sqlserver", "sqlserver://sa:secret@"+listener.Addr().String()+"?encrypt=disable")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		db.Close()
		listener.Close()
	})
	return s, newDB(db)
}

// accept ends with the listener, serve with its client.
func (s *tdsServer) accept() {
	for {
		conn, err := s.listener.Accept()
		if err != nil {
			return
		}
		select {
		case s.clients <- conn:
		default:
		}
		go s.serve(conn)
	}
}

func (s *tdsServer) serve(conn net.Conn) {
	defer conn.Close()
	for {
		kind, body, err := readMessage(conn)
		if err != nil {
			return
		}
		var reply []byte
		switch kind {
		case tdsPrelogin: // version, and no encryption
			reply = []byte{0, 0, 11, 0, 6, 1, 0, 17, 0, 1, 0xFF, 16, 0, 0, 0, 0, 0, 2}
		case tdsLogin:
			ack := slices.Concat([]byte{1, 0x74, 0, 0, 4}, short("SQL"), []byte{16, 0, 0, 0})
			reply = slices.Concat([]byte{tokenLoginAck}, le16(len(ack)), ack, done(tokenDone, 0))
		case tdsBatch: // one row with the session's id
			reply = slices.Concat([]byte{tokenColumns, 1, 0, 0, 0, 0, 0, 0, 0, 0x26, 4, 0, tokenRow, 4, 55, 0, 0, 0}, done(tokenDone, doneCount))
		case tdsRPC:
			s.working <- text(body)
			reply = s.answer
		case tdsAttention:
			s.attended <- struct{}{}
			reply = done(tokenDone, doneAttention)
		}
		if reply != nil {
			header := []byte{tdsReply, 1, 0, 0, 0, 0, 1, 0}
			binary.BigEndian.PutUint16(header[2:], uint16(len(reply)+len(header)))
			if _, err := conn.Write(append(header, reply...)); err != nil {
				return
			}
		}
	}
}

// readMessage joins the packets of a message.
func readMessage(conn net.Conn) (kind byte, body []byte, err error) {
	for {
		var header [8]byte
		if _, err := io.ReadFull(conn, header[:]); err != nil {
			return 0, nil, err
		}
		packet := make([]byte, int(binary.BigEndian.Uint16(header[2:]))-len(header))
		if _, err := io.ReadFull(conn, packet); err != nil {
			return 0, nil, err
		}
		body = append(body, packet...)
		if header[1]&1 == 1 {
			return header[0], body, nil
		}
	}
}

// text is what is readable in a message.
func text(body []byte) string {
	var b strings.Builder
	for i := 0; i+1 < len(body); i++ {
		if body[i] >= ' ' && body[i] < 0x7F && body[i+1] == 0 {
			b.WriteByte(body[i])
		}
	}
	return b.String()
}

func le16(n int) []byte { return binary.LittleEndian.AppendUint16(nil, uint16(n)) }
func le32(n int) []byte { return binary.LittleEndian.AppendUint32(nil, uint32(n)) }

func ucs2(s string) []byte {
	var b []byte
	for _, unit := range utf16.Encode([]rune(s)) {
		b = binary.LittleEndian.AppendUint16(b, unit)
	}
	return b
}

func short(s string) []byte { return append([]byte{byte(len(s))}, ucs2(s)...) }

func done(token byte, status int) []byte {
	return slices.Concat([]byte{token}, le16(status), make([]byte, 10))
}

func returnValue(name string, typeInfo, value []byte) []byte {
	return slices.Concat([]byte{tokenReturnValue, 0, 0}, short(name), []byte{1, 0, 0, 0, 0, 0, 0}, typeInfo, value)
}

func intValue(name string, n int) []byte {
	return returnValue(name, []byte{0x26, 4}, append([]byte{4}, le32(n)...))
}

// textValue is an nvarchar(max): its length, its chunks, an empty chunk.
func textValue(name, s string) []byte {
	data := ucs2(s)
	value := slices.Concat(le32(len(data)), le32(0))
	if len(data) > 0 {
		value = slices.Concat(value, le32(len(data)), data)
	}
	return returnValue(name, []byte{0xE7, 0xFF, 0xFF, 9, 4, 0xD0, 0, 0x34}, append(value, le32(0)...))
}

func errorToken(number int) []byte {
	body := slices.Concat(le32(number), []byte{1, 16}, le16(4), ucs2("busy"), short(""), short(""), le32(1))
	return slices.Concat([]byte{tokenError}, le16(len(body)), body)
}

// Output parameters of a batch reach their variables; the return status of the
// batch itself, which is not that of sp_getapplock, is not mistaken for it.
func TestDriverFillsOutputParameters(t *testing.T) {
	server, d := newTDSServer(t, slices.Concat(
		[]byte{tokenReturnStatus}, le32(0),
		intValue("@status", 1), intValue("@granted", 2), intValue("@session", 55), intValue("@transactions", 0),
		textValue("@missing", ""), textValue("@fences", "5,6,"), done(tokenDoneProc, 0)))
	s := open(t, d)
	fences, err := s.Acquire(t.Context(), dialect.Request{Keys: keys, Fence: &dialect.Table{}})
	if err != nil || !slices.Equal(fences, []int64{5, 6}) || s.ID() != 55 {
		t.Errorf("session %d got %v, %v", s.ID(), fences, err)
	}
	sent := <-server.working
	for _, want := range []string{"@status int output", "@fences nvarchar(max) output", "@names nvarchar(128)", "@wait int"} {
		if !strings.Contains(sent, want) {
			t.Errorf("the driver did not declare %q", want)
		}
	}
}

func TestDriverFillsAnswersOfExchange(t *testing.T) {
	server, d := newTDSServer(t, slices.Concat([]byte{tokenReturnStatus}, le32(0),
		intValue("@status", -1), textValue("@done", "10"), intValue("@session", 55), done(tokenDoneProc, 0)))
	s := open(t, d)
	granted, released, err := s.Exchange(time.Now().Add(time.Minute), keys[:1], keys[1:])
	if err != nil || !slices.Equal(granted, []bool{false}) || !slices.Equal(released, []bool{true}) {
		t.Errorf("granted %t, released %t, %v", granted, released, err)
	}
	sent := <-server.working
	for _, want := range []string{"@done nvarchar(max) output", "@modes nvarchar(2)"} {
		if !strings.Contains(sent, want) {
			t.Errorf("the driver did not declare %q", want)
		}
	}
}

// The driver sees the end of a connection only when it is used.
func TestAliveAsksTheServer(t *testing.T) {
	server, d := newTDSServer(t, nil)
	s := open(t, d)
	if err := s.Alive(time.Now().Add(10 * time.Second)); err != nil {
		t.Errorf("alive: %v", err)
	}
	(<-server.clients).Close()
	wantError(t, s.Alive(time.Now().Add(10*time.Second)), dialect.Lost, "")
}

// An error of the server wins over output parameters that look like a success.
func TestDriverReportsErrorOfBatch(t *testing.T) {
	_, d := newTDSServer(t, slices.Concat(errorToken(1205),
		intValue("@status", 0), intValue("@granted", 2), intValue("@session", 55), done(tokenDoneProc, doneError)))
	_, err := open(t, d).Acquire(t.Context(), dialect.Request{Keys: keys})
	wantError(t, err, dialect.Deadlock, "1205")
}

// The end of the context, by cancellation or by its deadline, interrupts the
// server's wait, and the connection of the session ends with it.
func TestDriverInterruptsWait(t *testing.T) {
	for _, c := range []struct {
		name  string
		end   func(server *tdsServer, ctx context.Context) context.Context
		class dialect.Class
	}{
		{"cancel", func(server *tdsServer, ctx context.Context) context.Context {
			ctx, cancel := context.WithCancel(ctx)
			go func() {
				<-server.working
				cancel()
			}()
			return ctx
		}, dialect.Canceled},
		{"deadline", func(_ *tdsServer, ctx context.Context) context.Context {
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			t.Cleanup(cancel)
			return ctx
		}, dialect.Timeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			server, d := newTDSServer(t, nil)
			s := open(t, d)
			_, err := s.Acquire(c.end(server, t.Context()), dialect.Request{Keys: keys})
			wantError(t, err, c.class, "")
			<-server.attended
			for range 2 {
				if err := s.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			}
			if got := d.db.Stats().OpenConnections; got != 0 {
				t.Errorf("%d connections are left", got)
			}
		})
	}
}

func open(t *testing.T, d *DB) dialect.Session {
	t.Helper()
	s, err := d.OpenSession(t.Context(), dialect.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}
