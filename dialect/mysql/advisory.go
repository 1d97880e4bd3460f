package mysql

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// longestWait is what one GET_LOCK is asked to wait at most, a year, which is the
// largest wait_timeout too. MySQL takes any negative number for a wait without
// end, which MariaDB refuses, and TiDB cuts waits short; so a longer wait asks
// again.
const longestWait = 365 * 24 * time.Hour

// Acquire sends one GET_LOCK per key.
func (s *session) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	if err := checkKeys(r.Keys); err != nil {
		return nil, err
	}
	for i, key := range r.Keys {
		granted, err := s.getLock(ctx, key, r.Try)
		if err != nil {
			return nil, s.undo(ctx, r.Keys[:i+1], err)
		}
		if !granted {
			return nil, s.giveUp(ctx, r.Keys[:i], key)
		}
	}
	if r.Fence == nil {
		return nil, nil
	}
	fences, err := s.fence(ctx, *r.Fence, r.Keys)
	if err != nil {
		return nil, s.undo(ctx, r.Keys, err)
	}
	return fences, nil
}

// undo gives back what a call that failed was or may have been granted, if the
// connection can still be used: after the session's end the server would free it
// a moment later. A wait can be interrupted when it has just been granted, so the
// last of the keys need not be held.
func (s *session) undo(ctx context.Context, keys []dialect.Key, err error) error {
	if class := dialect.ClassOf(err); ctx.Err() != nil || class == dialect.Lost || class == dialect.Unsafe {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpWithin)
	defer cancel()
	_, undoErr := s.callEach(ctx, "RELEASE_LOCK(%s)", keys)
	return join(err, undoErr)
}

// getLock answers false only to a try.
func (s *session) getLock(ctx context.Context, key dialect.Key, try bool) (bool, error) {
	for {
		var result sql.NullInt64
		var id int64
		query := fmt.Sprintf("SELECT GET_LOCK(%s, %d), CONNECTION_ID()", literal(key), waitSeconds(ctx, try))
		if _, err := queryRow(ctx, s.conn, query, &result, &id); err != nil {
			return false, s.failure(ctx, err)
		}
		if err := s.same(id); err != nil {
			return false, err
		}
		switch {
		case !result.Valid:
			// What MariaDB answers to KILL QUERY and max_statement_time, and MySQL
			// when it runs out of memory.
			return false, &dialect.Error{Class: dialect.Canceled, Hint: "the server ended the wait: GET_LOCK returned NULL"}
		case result.Int64 == 1:
			return true, nil
		case try:
			return false, nil
		case ctx.Err() != nil:
			return false, s.failure(ctx, ctx.Err())
		}
	}
}

// waitSeconds outlasts the context, whose end the client enforces; the server's
// own limit matters only if the client vanishes.
func waitSeconds(ctx context.Context, try bool) int64 {
	if try {
		return 0
	}
	wait := longestWait
	if deadline, ok := ctx.Deadline(); ok {
		wait = max(0, min(wait, time.Until(deadline)))
	}
	return seconds(wait) + 1
}

// giveUp releases what a try was granted before it met a held key.
func (s *session) giveUp(ctx context.Context, granted []dialect.Key, held dialect.Key) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpWithin)
	defer cancel()
	if err := s.Release(ctx, granted); err != nil {
		return err
	}
	return &dialect.Error{Class: dialect.NotAcquired, Err: fmt.Errorf("key %s", held.Label)}
}

// Release sends one statement for all keys.
func (s *session) Release(ctx context.Context, keys []dialect.Key) error {
	results, err := s.callEach(ctx, "RELEASE_LOCK(%s)", keys)
	if err != nil {
		return err
	}
	for i, result := range results {
		if result.Int64 != 1 { // 0: somebody else's, NULL: nobody's
			return &dialect.Error{Class: dialect.NotHeld, Err: fmt.Errorf("key %s", keys[i].Label)}
		}
	}
	return nil
}

func (s *session) Held(ctx context.Context, keys []dialect.Key) (bool, error) {
	results, err := s.callEach(ctx, "IS_USED_LOCK(%s)", keys)
	if err != nil {
		return false, err
	}
	for _, holder := range results {
		if !holder.Valid || holder.Int64 != s.thread.id {
			return false, nil
		}
	}
	return true, nil
}

// fence writes one number per key, each in a transaction of its own, so that
// sessions cannot deadlock over the rows. The number reaches the client with the
// result of the statement, and the statement itself sees to it that no other
// connection writes one:
// https://dev.mysql.com/doc/refman/en/information-functions.html#function_last-insert-id
func (s *session) fence(ctx context.Context, t dialect.Table, keys []dialect.Key) ([]int64, error) {
	fences := make([]int64, len(keys))
	for i, key := range dialect.FenceRows(keys) {
		result, err := s.conn.ExecContext(ctx, fmt.Sprintf("INSERT INTO %s (id, name, fence)"+
			" SELECT %d, %s, LAST_INSERT_ID(1) FROM DUAL WHERE CONNECTION_ID() = %d"+
			" ON DUPLICATE KEY UPDATE fence = LAST_INSERT_ID(fence + 1)", s.db.quoted(t), key.ID, literal(key), s.thread.id))
		if err != nil {
			return nil, s.failed(ctx, s.db.tableFailure(ctx, t, err))
		}
		written, err := result.RowsAffected()
		if err != nil {
			return nil, s.failure(ctx, err)
		}
		if written == 0 {
			return nil, s.another("another connection")
		}
		if fences[i], err = result.LastInsertId(); err != nil {
			return nil, s.failure(ctx, err)
		}
	}
	return fences, nil
}

// callEach is the function of that name on the session's own connection.
func (s *session) callEach(ctx context.Context, call string, keys []dialect.Key) ([]sql.NullInt64, error) {
	results, id, err := callEach(ctx, s.conn, call, keys)
	if err != nil {
		return nil, s.failure(ctx, err)
	}
	if len(keys) == 0 {
		return nil, nil
	}
	return results, s.same(id)
}

// same is an error if another connection answered than the one that holds the
// locks.
func (s *session) same(id int64) error {
	if id == s.thread.id {
		return nil
	}
	return s.another(fmt.Sprintf("connection %d", id))
}

func (s *session) another(which string) error {
	return &dialect.Error{Class: dialect.Unsafe, Err: fmt.Errorf("%s answered instead of %d", which, s.thread.id),
		Hint: "something in between hands one session to several clients: connect to the server itself"}
}

// callEach calls a function of the server for each key, in one statement, and
// says which connection answered.
func callEach(ctx context.Context, q dialect.Querier, call string, keys []dialect.Key) (results []sql.NullInt64, id int64, err error) {
	if len(keys) == 0 {
		return nil, 0, nil
	}
	if err := checkKeys(keys); err != nil {
		return nil, 0, err
	}
	columns := make([]string, len(keys))
	results = make([]sql.NullInt64, len(keys))
	dest := []any{&id}
	for i, key := range keys {
		columns[i] = fmt.Sprintf(call, literal(key))
		dest = append(dest, &results[i])
	}
	_, err = queryRow(ctx, q, "SELECT CONNECTION_ID(), "+strings.Join(columns, ", "), dest...)
	return results, id, err
}

// alphabet is what both servers tell apart in a name, and what needs no escaping
// in SQL text: with the text protocol a statement is one round trip, whatever the
// settings of the application's pool.
const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789._-/#"

// maxName is MySQL's limit; MariaDB's is 192 bytes.
const maxName = 64

// checkKeys must have approved of keys before their names become SQL.
func checkKeys(keys []dialect.Key) error {
	for _, key := range keys {
		if n := len(key.Name); n < 1 || n > maxName || strings.Trim(key.Name, alphabet) != "" {
			return &dialect.Error{Class: dialect.InvalidKey, Hint: fmt.Sprintf("the name %q is not 1 to %d out of %s", key.Name, maxName, alphabet)}
		}
		if err := exclusive(key); err != nil {
			return err
		}
	}
	return nil
}

func exclusive(key dialect.Key) error {
	if key.Mode != dialect.Exclusive {
		return &dialect.Error{Class: dialect.Unsupported, Hint: fmt.Sprintf("no shared mode for key %s: lock it exclusively", key.Label)}
	}
	return nil
}

func literal(key dialect.Key) string { return "'" + key.Name + "'" }
