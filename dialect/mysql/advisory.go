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
			return nil, s.undo(ctx, r.Keys[:i], err)
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

// undo gives back what a call that failed was granted, if the connection can
// still be used: after the session's end the server would free it a moment later.
func (s *session) undo(ctx context.Context, granted []dialect.Key, err error) error {
	if len(granted) == 0 || ctx.Err() != nil || dialect.ClassOf(err) == dialect.Lost {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpWithin)
	defer cancel()
	return join(err, s.Release(ctx, granted))
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
		switch {
		case id != s.thread.id:
			return false, &dialect.Error{Class: dialect.Unsafe, Hint: fmt.Sprintf(
				"connection %d answered instead of %d: something between hands one session to several clients; connect to the server itself", id, s.thread.id)}
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
	results, err := callEach(ctx, s.conn, "RELEASE_LOCK(%s)", keys)
	if err != nil {
		return s.failure(ctx, err)
	}
	for i, result := range results {
		if result.Int64 != 1 { // 0: somebody else's, NULL: nobody's
			return &dialect.Error{Class: dialect.NotHeld, Err: fmt.Errorf("key %s", keys[i].Label)}
		}
	}
	return nil
}

func (s *session) Held(ctx context.Context, keys []dialect.Key) (bool, error) {
	results, err := callEach(ctx, s.conn, "IS_USED_LOCK(%s)", keys)
	if err != nil {
		return false, s.failure(ctx, err)
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
// result of the statement:
// https://dev.mysql.com/doc/refman/en/information-functions.html#function_last-insert-id
func (s *session) fence(ctx context.Context, t dialect.Table, keys []dialect.Key) ([]int64, error) {
	fences := make([]int64, len(keys))
	for i, key := range dialect.FenceRows(keys) {
		result, err := s.conn.ExecContext(ctx, fmt.Sprintf("INSERT INTO %s (id, name, fence) VALUES (%d, %s, LAST_INSERT_ID(1))"+
			" ON DUPLICATE KEY UPDATE fence = LAST_INSERT_ID(fence + 1)", s.db.quoted(t), key.ID, literal(key)))
		if err != nil {
			return nil, s.failed(ctx, s.db.tableFailure(ctx, t, err))
		}
		if fences[i], err = result.LastInsertId(); err != nil {
			return nil, s.failure(ctx, err)
		}
	}
	return fences, nil
}

// callEach calls a function of the server for each key, in one statement.
func callEach(ctx context.Context, q dialect.Querier, call string, keys []dialect.Key) ([]sql.NullInt64, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	if err := checkKeys(keys); err != nil {
		return nil, err
	}
	columns := make([]string, len(keys))
	results := make([]sql.NullInt64, len(keys))
	dest := make([]any, len(keys))
	for i, key := range keys {
		columns[i] = fmt.Sprintf(call, literal(key))
		dest[i] = &results[i]
	}
	_, err := queryRow(ctx, q, "SELECT "+strings.Join(columns, ", "), dest...)
	return results, err
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
