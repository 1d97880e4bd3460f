package postgres

import (
	"context"
	"encoding/binary"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/dblock-go/dblock/dialect"
)

// Exchange is one statement for all keys. What it was granted before it failed stays
// granted: session locks do not end with a transaction.
func (s *session) Exchange(deadline time.Time, tries, releases []dialect.Key) (granted, released []bool, err error) {
	if len(tries)+len(releases) == 0 {
		return nil, nil, errNoKeys
	}
	x := &s.exchanged
	x.reset()
	x.add(tries, tryLock, tryLockShared)
	x.add(releases, unlock, unlockShared)
	if err := s.conn.exchange(deadline, x); err != nil {
		return nil, nil, classify(context.Background(), err)
	}
	if x.pid != s.id || x.mark != s.mark {
		return nil, nil, s.moved()
	}
	if len(x.done) != len(x.ids) {
		return nil, nil, &dialect.Error{Class: dialect.Lost, Err: errors.New("the server's answer is not one for each key")}
	}
	return x.done[:len(tries)], x.done[len(tries):], nil
}

// exchange is what is asked of the server for several keys, and its answer. A session
// uses the same one again: nothing is allocated in the run of things.
type exchange struct {
	ids   []int64
	calls []byte // tryLock, … for each of them

	params [2][]byte

	pid, mark int64  // of the session that answered; see answering
	done      []bool // what the calls returned
}

func (x *exchange) reset() {
	x.ids, x.calls, x.done = x.ids[:0], x.calls[:0], x.done[:0]
}

func (x *exchange) answer(pid int64, mark, digits []byte) {
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
	for _, c := range digits {
		x.done = append(x.done, c == '1')
	}
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

// query is one statement for any number of keys, or one for the only call. Its last
// column has a digit for each key: 1 for true.
func (x *exchange) query() string {
	if len(x.ids) > 1 {
		return exchangeSeveral
	}
	switch x.calls[0] {
	case tryLock:
		return exchangeTry
	case tryLockShared:
		return exchangeTryShared
	case unlock:
		return exchangeUnlock
	}
	return exchangeUnlockShared
}

const (
	exchangeTry          = "SELECT " + answeringParts + ", CASE WHEN pg_try_advisory_lock($1::bigint) THEN '1' ELSE '0' END"
	exchangeTryShared    = "SELECT " + answeringParts + ", CASE WHEN pg_try_advisory_lock_shared($1::bigint) THEN '1' ELSE '0' END"
	exchangeUnlock       = "SELECT " + answeringParts + ", CASE WHEN pg_advisory_unlock($1::bigint) THEN '1' ELSE '0' END"
	exchangeUnlockShared = "SELECT " + answeringParts + ", CASE WHEN pg_advisory_unlock_shared($1::bigint) THEN '1' ELSE '0' END"
	// The scan of a function has the order of its arrays.
	exchangeSeveral = "SELECT " + answeringParts + `, (SELECT string_agg(CASE WHEN CASE call
	WHEN 't' THEN pg_try_advisory_lock(id)
	WHEN 'u' THEN pg_advisory_unlock(id)
	WHEN 'T' THEN pg_try_advisory_lock_shared(id)
	ELSE pg_advisory_unlock_shared(id) END THEN '1' ELSE '0' END, '')
	FROM unnest($1::bigint[], $2::"char"[]) AS k (id, call))`
)

// text are the query's parameters for any driver.
func (x *exchange) text() []any {
	if len(x.ids) == 1 {
		return []any{x.ids[0]}
	}
	ids, calls := []byte{'{'}, []byte{'{'}
	for i, id := range x.ids {
		if i > 0 {
			ids, calls = append(ids, ','), append(calls, ',')
		}
		ids, calls = strconv.AppendInt(ids, id, 10), append(calls, x.calls[i])
	}
	return []any{string(append(ids, '}')), string(append(calls, '}'))}
}

// binary are they as PostgreSQL sends and receives them:
// https://github.com/postgres/postgres/blob/REL_17_STABLE/src/backend/utils/adt/arrayfuncs.c
func (x *exchange) binary() [][]byte {
	if len(x.ids) == 1 {
		x.params[0] = binary.BigEndian.AppendUint64(x.params[0][:0], uint64(x.ids[0]))
		return x.params[:1]
	}
	ids := appendArray(x.params[0][:0], len(x.ids), pgtype.Int8OID)
	calls := appendArray(x.params[1][:0], len(x.ids), pgtype.QCharOID)
	for i, id := range x.ids {
		ids = binary.BigEndian.AppendUint32(ids, 8)
		ids = binary.BigEndian.AppendUint64(ids, uint64(id))
		calls = binary.BigEndian.AppendUint32(calls, 1)
		calls = append(calls, x.calls[i])
	}
	x.params = [2][]byte{ids, calls}
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
func exchangeByRow(deadline time.Time, c conn, x *exchange) error {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	var pid int64
	var mark, digits string
	if err := c.queryRow(ctx, x.query(), x.text(), &pid, &mark, &digits); err != nil {
		return err
	}
	x.answer(pid, []byte(mark), []byte(digits))
	return nil
}

func (c *sqlConn) exchange(deadline time.Time, x *exchange) error {
	return exchangeByRow(deadline, c, x)
}

// exchange prepares each of its few queries once, where pgx may do that: other modes
// are for poolers that lose prepared statements. It leaves out what pgx does
// to serve any query, which costs as much as the rest of the client's work.
func (c *pgxConn) exchange(deadline time.Time, x *exchange) error {
	if !c.prepares {
		return exchangeByRow(deadline, c, x)
	}
	if err := c.boundBy(deadline); err != nil {
		return err
	}
	statement, err := c.prepared(x.query())
	if err != nil {
		return err
	}
	rows := c.PgConn().ExecStatement(context.Background(), statement, x.binary(), binaryFormat, binaryFormat)
	if rows.NextRow() {
		columns := rows.Values()
		x.answer(int64(binary.BigEndian.Uint32(columns[0])), columns[1], columns[2])
	}
	_, err = rows.Close()
	return err
}

var binaryFormat = []int16{pgx.BinaryFormatCode}

// prepared has a name of its own, since pgx deallocates those that it knows.
func (c *pgxConn) prepared(query string) (*pgconn.StatementDescription, error) {
	if s := c.exchanges[query]; s != nil {
		return s, nil
	}
	s, err := c.PgConn().Prepare(context.Background(), "dblock_"+strconv.Itoa(len(c.exchanges)), query, nil)
	if err != nil {
		return nil, err
	}
	c.exchanges[query] = s
	return s, nil
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
