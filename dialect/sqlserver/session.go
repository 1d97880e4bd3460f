package sqlserver

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// session is a connection that holds application locks.
type session struct {
	conn    *sql.Conn
	destroy func() error
	id      int32
}

// OpenSession takes a connection out of the pool for good.
//
// The application's name goes into the session's CONTEXT_INFO, which
// sys.dm_exec_sessions shows to others, since program_name is fixed at login.
// KeepAlive changes nothing: SQL Server does not end idle sessions.
func (d *DB) OpenSession(ctx context.Context, o dialect.SessionOptions) (dialect.Session, error) {
	if o.KeepAlive < 0 {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "KeepAlive is negative"}
	}
	conn, err := d.pool.Take(ctx)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	s, err := newSession(ctx, conn.Conn, conn.Destroy, ownSettings+"SET CONTEXT_INFO "+contextInfo(o.Application)+";")
	if err != nil {
		return nil, errors.Join(connectError(ctx, err), conn.Destroy())
	}
	return s, nil
}

// OnConn changes no setting of the connection.
func (d *DB) OnConn(ctx context.Context, conn *sql.Conn) (dialect.Session, error) {
	if conn == nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the *sql.Conn is nil"}
	}
	s, err := newSession(ctx, conn, sync.OnceValue(func() error { return pinned.Destroy(conn) }), "")
	if err != nil {
		return nil, classify(ctx, err)
	}
	return s, nil
}

// ownSettings make a session independent of what the server's configuration or
// the pool's SessionInitSQL has set.
const ownSettings = "SET XACT_ABORT OFF; SET IMPLICIT_TRANSACTIONS OFF; SET LOCK_TIMEOUT -1; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "

// newSession learns the session's id. Its statement has no parameters: only then
// do settings outlive it.
func newSession(ctx context.Context, conn *sql.Conn, destroy func() error, settings string) (*session, error) {
	s := &session{conn: conn, destroy: destroy}
	rows, err := conn.QueryContext(ctx, settings+"SELECT CONVERT(int, @@SPID);")
	if err != nil {
		return nil, err
	}
	if err := readOne(rows, &s.id); err != nil {
		return nil, err
	}
	return s, nil
}

// readOne reads the one row of a result to its end: go-mssqldb interrupts a
// statement whose rows are closed earlier.
func readOne(rows *sql.Rows, into ...any) error {
	defer rows.Close()
	n := 0
	for ; rows.Next(); n++ {
		if err := rows.Scan(into...); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if n != 1 {
		return fmt.Errorf("%d rows instead of one", n)
	}
	return rows.Close()
}

// contextMark begins the CONTEXT_INFO of a session of dblock, so that the bytes
// of other software are not taken for a name.
const contextMark = "dblock:"

// contextInfo is a binary literal of at most 128 bytes.
func contextInfo(application string) string {
	if application == "" {
		application = "dblock"
	}
	info := contextMark + application
	if len(info) > 128 {
		info = info[:128]
		for !utf8.ValidString(info) && len(info) > len(contextMark) {
			info = info[:len(info)-1]
		}
	}
	return "0x" + hex.EncodeToString([]byte(info))
}

// applicationOf is the inverse of contextInfo; the server may pad with zeros.
func applicationOf(info []byte, program string) string {
	if name, ok := strings.CutPrefix(string(info), contextMark); ok {
		return strings.TrimRight(name, "\x00")
	}
	return program
}

// ID is @@SPID.
func (s *session) ID() int64 { return int64(s.id) }

func (s *session) locks() appLocks { return appLocks{on: s.conn, owner: ownedBySession} }

// Acquire needs one round trip for any number of keys, fencing numbers included,
// and one more to give back what a failed call was granted. The driver answers
// the end of ctx by interrupting the server's wait, for which it takes 5 s at
// most if the server does not confirm that.
func (s *session) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	fences, granted, err := s.acquire(ctx, r)
	if err != nil {
		return nil, s.undo(ctx, r.Keys[:granted], classify(ctx, err))
	}
	return fences, nil
}

// acquire returns how many of the keys it was, or after an error may have been,
// granted.
func (s *session) acquire(ctx context.Context, r dialect.Request) (fences []int64, granted int, err error) {
	keys := r.Keys
	if r.Fence != nil {
		keys = dialect.FenceRows(keys) // the locks go by name
	}
	p, err := pack(keys)
	if err != nil {
		return nil, 0, err
	}
	var rows *rowBatch
	if r.Fence != nil {
		rows = &rowBatch{table: *r.Fence, draw: true, try: r.Try}
	}
	g, err := s.locks().acquire(ctx, p, waitMillis(ctx, r.Try, 0), rows)
	if err != nil {
		return nil, len(keys), rowBusy(r, err)
	}
	if err := s.same(g.session); err != nil {
		return nil, 0, err
	}
	if err := g.failure(keys, r.Try); err != nil {
		return nil, int(g.granted), err
	}
	if rows == nil {
		return nil, len(keys), nil
	}
	fences, err = rows.finish(ctx, s.conn, s.conn, p, keys)
	if err == nil && rows.session != 0 {
		err = s.same(rows.session)
	}
	return fences, len(keys), rowBusy(r, err)
}

// undo gives back what a failed call was granted, if the server can still be
// asked: after the session's end it would free that a moment later. A try has
// failed for good only if that succeeds.
func (s *session) undo(ctx context.Context, granted []dialect.Key, err error) error {
	class := dialect.ClassOf(err)
	if class == dialect.Lost || class == dialect.Unsafe || (ctx.Err() != nil && class != dialect.NotAcquired) {
		return err
	}
	undoErr := s.locks().undo(ctx, granted)
	switch {
	case undoErr == nil:
		return err
	case class == dialect.NotAcquired:
		return classify(ctx, undoErr)
	}
	return fmt.Errorf("%w; %w", err, undoErr)
}

// rowBusy is for a try that got all keys but found the lock table's row of one
// locked by a transaction: that, too, is not acquired.
func rowBusy(r dialect.Request, err error) error {
	if r.Try && hasNumber(err, errLockTimeout) {
		return notAcquired(err)
	}
	return err
}

// Renew makes two calls.
func (s *session) Renew(ctx context.Context, key dialect.Key) error {
	keys := []dialect.Key{key}
	if err := s.Release(ctx, keys); err != nil {
		return err
	}
	_, err := s.Acquire(ctx, dialect.Request{Keys: keys})
	return err
}

// Release gives the last key back first.
func (s *session) Release(ctx context.Context, keys []dialect.Key) error {
	id, err := s.locks().release(ctx, keys, false)
	if err != nil {
		return classify(ctx, err)
	}
	return s.same(id)
}

// Exchange gives keys back first.
func (s *session) Exchange(deadline time.Time, tries, releases []dialect.Key) (granted, released []bool, err error) {
	if len(tries)+len(releases) == 0 {
		return nil, nil, nil
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	granted, released, id, err := s.locks().exchange(ctx, tries, releases)
	if err != nil {
		return nil, nil, classify(ctx, err)
	}
	if err := s.same(id); err != nil {
		return nil, nil, err
	}
	return granted, released, nil
}

// Held asks APPLOCK_MODE.
func (s *session) Held(ctx context.Context, keys []dialect.Key) ([]bool, error) {
	held, id, err := s.locks().held(ctx, keys)
	if err != nil {
		return nil, classify(ctx, err)
	}
	if err := s.same(id); err != nil {
		return nil, err
	}
	return held, nil
}

// room keeps a session's share of the server's lock memory at 1 MB, since a lock
// costs 96 bytes, and at 40 % of the server's memory it begins to escalate the row
// locks of everybody:
// https://learn.microsoft.com/sql/database-engine/configure-windows/configure-the-locks-server-configuration-option
const room = 10_000

// Room is a constant.
func (s *session) Room(context.Context) (int, error) { return room, nil }

// same is an error if another session answered than the one that holds the locks.
func (s *session) same(id int32) error {
	if id == s.id {
		return nil
	}
	return &dialect.Error{Class: dialect.Unsafe,
		Hint: "something between here and the server gives one connection several sessions: connect to the server directly",
		Err:  fmt.Errorf("session %d answered instead of session %d", id, s.id)}
}

// Idle only waits: the server says nothing until it is asked.
func (s *session) Idle(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Alive asks the server: the driver does not look at what has arrived.
func (s *session) Alive(deadline time.Time) error {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	return s.Ping(ctx)
}

// Ping runs the driver's SELECT 1.
func (s *session) Ping(ctx context.Context) error { return classify(ctx, s.conn.PingContext(ctx)) }

// AllowSilence has nothing to lift: SQL Server does not end idle sessions.
func (s *session) AllowSilence(context.Context) (restore func(ctx context.Context) error, err error) {
	return func(context.Context) error { return nil }, nil
}

// Statements has a [dialect.Conn].
func (s *session) Statements() dialect.Statements { return pinned.Statements(s.conn) }

func (s *session) EndStatements(ctx context.Context) error {
	_, err := pinned.Within(ctx, func() error {
		_, err := s.conn.ExecContext(ctx, "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;")
		return err
	})
	return classify(ctx, err)
}

func (s *session) Begin(ctx context.Context, o *sql.TxOptions) (dialect.OwnedTx, error) {
	return beginOn(ctx, s.conn.BeginTx, o)
}

// Close closes the connection; the server then ends the session.
func (s *session) Close() error { return s.destroy() }
