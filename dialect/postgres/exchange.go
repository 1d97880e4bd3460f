package postgres

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dblock-go/dblock/dialect"
)

// Exchange is one statement for all keys. What it was granted before it failed stays
// granted: session locks do not end with a transaction.
func (s *session) Exchange(deadline time.Time, tries, releases []dialect.Key) (granted, released []bool, err error) {
	if len(tries)+len(releases) == 0 {
		return nil, nil, errNoKeys
	}
	x := s.exchanged.reset(false)
	x.add(tries, tryLock, tryLockShared)
	x.add(releases, unlock, unlockShared)
	if err := s.exchange(context.Background(), deadline, x); err != nil {
		return nil, nil, err
	}
	x.done = x.done[:0]
	for _, digit := range x.result {
		x.done = append(x.done, digit == '1')
	}
	if len(x.done) != len(x.ids) {
		return nil, nil, &dialect.Error{Class: dialect.Lost, Err: errors.New("the server's answer is not one for each key")}
	}
	return x.done[:len(tries)], x.done[len(tries):], nil
}

// untilFailure calls one function for each key, in their order, until it fails for one,
// and returns that one's place; 0 if there is none.
func (s *session) untilFailure(ctx context.Context, keys []dialect.Key, call, callShared byte) (int, error) {
	x := s.exchanged.reset(true)
	x.add(keys, call, callShared)
	deadline := time.Now() // ctx ends it before, if it ends
	if until, bounded := ctx.Deadline(); bounded {
		deadline = until
	}
	deadline = deadline.Add(closeTimeout)
	if err := s.exchange(ctx, deadline, x); err != nil || len(x.result) == 0 {
		return 0, err
	}
	return strconv.Atoi(string(x.result))
}

func (s *session) exchange(ctx context.Context, deadline time.Time, x *exchange) error {
	if err := s.conn.exchange(ctx, deadline, x); err != nil {
		return failed(ctx, err)
	}
	if x.pid != s.id || x.mark != s.mark {
		return s.moved()
	}
	return nil
}

// exchange is what is asked of the server for several keys, and its answer. A session
// uses the same one again: nothing is allocated in the run of things.
type exchange struct {
	ids   []int64
	calls []byte // tryLock, … for each of them
	until bool   // until one fails

	params [2][]byte

	pid, mark int64  // of the session that answered; see answering
	result    []byte // a digit for each call, 1 for true; or the place of the one that failed, if any
	done      []bool // the digits
}

// reset forgets the answer too: it must not be taken for that of a statement without one.
func (x *exchange) reset(until bool) *exchange {
	x.ids, x.calls, x.until = x.ids[:0], x.calls[:0], until
	x.pid, x.mark, x.result = 0, 0, x.result[:0]
	return x
}

func (x *exchange) answer(pid int64, mark, result []byte) {
	x.pid, x.mark = pid, 0
	for i, c := range mark { // a number that dblock wrote
		if c == '-' && i == 0 {
			continue
		}
		x.mark = x.mark*10 + int64(c-'0')
	}
	if len(mark) > 0 && mark[0] == '-' {
		x.mark = -x.mark
	}
	x.result = append(x.result[:0], result...)
}

// answeringParts are answering, for the client to put together, in half the time.
const answeringParts = "pg_backend_pid(), coalesce(current_setting('" + markSetting + "', true), '')"

// The functions of an exchange.
const (
	tryLock       = 't'
	tryLockShared = 'T'
	unlock        = 'u'
	unlockShared  = 'U'
)

func (x *exchange) add(keys []dialect.Key, call, callShared byte) {
	for _, k := range keys {
		c := call
		if k.Mode == dialect.Shared {
			c = callShared
		}
		x.ids, x.calls = append(x.ids, k.ID), append(x.calls, c)
	}
}

// shape is what the statement of an exchange depends on.
type shape struct {
	call  byte // for every key; 0 where they differ
	one   bool // key, which is a parameter by itself
	until bool // see exchange
}

func (x *exchange) shape() shape {
	sh := shape{call: x.calls[0], one: len(x.ids) == 1 && !x.until, until: x.until}
	if slices.ContainsFunc(x.calls, func(c byte) bool { return c != sh.call }) {
		sh.call = 0
	}
	return sh
}

// query relies on the scan of a function, which has the order of its arrays and ends at
// the limit.
func (sh shape) query() string {
	const query = "SELECT " + answeringParts + ", "
	if sh.one {
		return query + "CASE WHEN " + function(sh.call) + "($1::bigint) THEN '1' ELSE '0' END"
	}
	arrays, columns, call := "$1::bigint[]", "id", function(sh.call)+"(id)"
	if sh.call == 0 {
		arrays, columns = arrays+`, $2::"char"[]`, columns+", call"
		call = "CASE call"
		for _, c := range [...]byte{tryLock, unlock, tryLockShared, unlockShared} {
			call += " WHEN '" + string(c) + "' THEN " + function(c) + "(id)"
		}
		call += " END"
	}
	if sh.until {
		return query + "coalesce((SELECT n::text FROM unnest(" + arrays + ") WITH ORDINALITY AS k (" + columns + ", n) WHERE NOT " + call + " LIMIT 1), '')"
	}
	return query + "(SELECT string_agg(CASE WHEN " + call + " THEN '1' ELSE '0' END, '') FROM unnest(" + arrays + ") AS k (" + columns + "))"
}

func function(call byte) string {
	switch call {
	case tryLock:
		return "pg_try_advisory_lock"
	case tryLockShared:
		return "pg_try_advisory_lock_shared"
	case unlock:
		return "pg_advisory_unlock"
	}
	return "pg_advisory_unlock_shared"
}

// text are the query's parameters for any driver.
func (x *exchange) text(sh shape) []any {
	if sh.one {
		return []any{x.ids[0]}
	}
	ids, calls := []byte{'{'}, []byte{'{'}
	for i, id := range x.ids {
		if i > 0 {
			ids, calls = append(ids, ','), append(calls, ',')
		}
		ids, calls = strconv.AppendInt(ids, id, 10), append(calls, x.calls[i])
	}
	args := []any{string(append(ids, '}')), string(append(calls, '}'))}
	if sh.call != 0 {
		return args[:1]
	}
	return args
}

// binary are they as PostgreSQL sends and receives them:
// https://github.com/postgres/postgres/blob/REL_17_STABLE/src/backend/utils/adt/arrayfuncs.c
func (x *exchange) binary(sh shape) [][]byte {
	if sh.one {
		x.params[0] = binary.BigEndian.AppendUint64(x.params[0][:0], uint64(x.ids[0]))
		return x.params[:1]
	}
	ids := appendArray(x.params[0][:0], len(x.ids), pgtype.Int8OID)
	for _, id := range x.ids {
		ids = binary.BigEndian.AppendUint32(ids, 8)
		ids = binary.BigEndian.AppendUint64(ids, uint64(id))
	}
	x.params[0] = ids
	if sh.call != 0 {
		return x.params[:1]
	}
	calls := appendArray(x.params[1][:0], len(x.ids), pgtype.QCharOID)
	for _, call := range x.calls {
		calls = binary.BigEndian.AppendUint32(calls, 1)
		calls = append(calls, call)
	}
	x.params[1] = calls
	return x.params[:]
}

// appendArray begins an array of n elements.
func appendArray(b []byte, n int, element uint32) []byte {
	const dimensions, nulls, lowerBound = 1, 0, 1
	for _, field := range [...]uint32{dimensions, nulls, element, uint32(n), lowerBound} {
		b = binary.BigEndian.AppendUint32(b, field)
	}
	return b
}

// exchangeByRow is the way of every driver and of every mode of pgx.
func exchangeByRow(ctx context.Context, deadline time.Time, c conn, x *exchange) error {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	var pid int64
	var mark, result string
	sh := x.shape()
	if err := c.queryRow(ctx, sh.query(), x.text(sh), &pid, &mark, &result); err != nil {
		return err
	}
	x.answer(pid, []byte(mark), []byte(result))
	return nil
}

func (c *sqlConn) exchange(ctx context.Context, deadline time.Time, x *exchange) error {
	return exchangeByRow(ctx, deadline, c, x)
}

// exchange prepares each of its few queries once, where pgx may do that: other modes
// are for poolers that lose prepared statements. It speaks the protocol itself: what
// pgx does to serve any query costs as much as the rest of the client's work.
// https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-EXT-QUERY
func (c *pgxConn) exchange(ctx context.Context, deadline time.Time, x *exchange) error {
	if !c.prepares {
		return exchangeByRow(ctx, deadline, c, x)
	}
	if ctx.Done() != nil {
		return c.interruptible(ctx, deadline, func() error { return c.exchange(context.Background(), deadline, x) })
	}
	if err := c.boundBy(deadline); err != nil {
		return err
	}
	sh := x.shape()
	statement, err := c.prepared(sh)
	if err != nil {
		return err
	}
	c.bind.PreparedStatement, c.bind.Parameters = statement, x.binary(sh)
	frontend := c.PgConn().Frontend()
	frontend.SendBind(&c.bind)
	frontend.SendExecute(&pgproto3.Execute{})
	frontend.SendSync(&pgproto3.Sync{})
	if err := frontend.Flush(); err != nil {
		return c.broken(err)
	}
	var failure error
	for {
		message, err := c.PgConn().ReceiveMessage(context.Background())
		if err != nil {
			return c.broken(err)
		}
		switch m := message.(type) {
		case *pgproto3.DataRow:
			x.answer(int64(binary.BigEndian.Uint32(m.Values[0])), m.Values[1], m.Values[2])
		case *pgproto3.ErrorResponse:
			failure = pgconn.ErrorResponseToPgError(m)
		case *pgproto3.ReadyForQuery:
			return failure
		}
	}
}

// interruptible ends a call, and the connection, when ctx ends.
func (c *pgxConn) interruptible(ctx context.Context, deadline time.Time, call func() error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	stop := context.AfterFunc(ctx, func() { _ = c.PgConn().Conn().SetDeadline(time.Unix(1, 0)) }) // or it is closed already
	err := call()
	if !stop() {
		return join(ctx.Err(), c.broken(err))
	}
	return err
}

// broken closes a connection on which an answer may still come that nobody waits for.
func (c *pgxConn) broken(err error) error {
	_ = c.PgConn().Conn().Close() // it is broken already
	return err
}

// prepared statements have names of their own, since pgx deallocates those that it knows.
func (c *pgxConn) prepared(sh shape) (name string, err error) {
	if name, ok := c.exchanges[sh]; ok {
		return name, nil
	}
	name = "dblock_" + strconv.Itoa(len(c.exchanges))
	if _, err := c.PgConn().Prepare(context.Background(), name, sh.query(), nil); err != nil {
		return "", err
	}
	c.exchanges[sh] = name
	return name, nil
}

// boundBy makes the connection's reads and writes end at the deadline or little earlier,
// which closes the connection. A context would cost a goroutine for each statement, and
// a new deadline for each costs more than the rest of what is done here.
func (c *pgxConn) boundBy(deadline time.Time) error {
	const early = 50 * time.Millisecond
	if c.deadline.After(deadline.Add(-early)) && !c.deadline.After(deadline) {
		return nil
	}
	c.deadline = deadline
	return c.PgConn().Conn().SetDeadline(deadline)
}

// unbound undoes boundBy.
func (c *pgxConn) unbound() error {
	if c.deadline.IsZero() {
		return nil
	}
	c.deadline = time.Time{}
	return c.PgConn().Conn().SetDeadline(time.Time{})
}
