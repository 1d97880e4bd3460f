package mysql

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// longestWait is what one GET_LOCK is asked to wait at most, a year, which is the
// largest wait_timeout too. MySQL takes any negative number for a wait without
// end, which MariaDB refuses, and TiDB cuts waits short; so a longer wait asks
// again.
const longestWait = 365 * 24 * time.Hour

// Acquire needs one round trip for any number of keys of which at most the first is
// not free, and two more for each other one that it waits for. A try for several
// keys that is refused needs a second one, to give back what it was granted before.
func (s *session) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	if err := checkKeys(r.Keys); err != nil {
		return nil, err
	}
	if r.Try {
		granted, err := s.getLocks(ctx, r.Keys, 0)
		switch {
		case err != nil:
			return nil, s.undo(ctx, r.Keys, err)
		case !granted:
			return nil, s.giveUp(ctx, r.Keys)
		}
	} else if err := s.wait(ctx, r.Keys); err != nil {
		return nil, s.undo(ctx, r.Keys, err)
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

// getLocks takes the keys in their order until one is refused. It waits for the
// first only: the process list shows a waiter's statement, and in MariaDB that is
// all that shows which key it waits for.
//
// Both servers evaluate AND from left to right until a 0, and go on after a NULL,
// which the result then is if no 0 follows. They read it fastest of all forms that
// stop at a refusal, and it takes no more of MariaDB's stack with more keys, as a
// sum does. MySQL's IN does not stop.
func (s *session) getLocks(ctx context.Context, keys []dialect.Key, wait int64) (granted bool, err error) {
	if len(keys) == 0 {
		return true, nil
	}
	call := fmt.Sprintf("GET_LOCK(%s, %d)", literal(keys[0]), wait)
	if len(keys) > 1 { // an interrupted wait must not go on with the others
		call = "CASE " + call + " WHEN 0 THEN 0 WHEN 1 THEN 1" + list(" AND GET_LOCK(", keys[1:], ", 0)") + " END"
	}
	all, err := s.ask(ctx, call+", ", 1)
	switch {
	case err != nil:
		return false, err
	case !all[0].Valid:
		return false, interrupted()
	}
	return all[0].Int64 == 1, nil
}

// Renew does both in one statement, unless the server ends a wait early.
func (s *session) Renew(ctx context.Context, key dialect.Key) error {
	keys := []dialect.Key{key}
	if err := checkKeys(keys); err != nil {
		return err
	}
	name := literal(key)
	done, err := s.ask(ctx, fmt.Sprintf("RELEASE_LOCK(%s), GET_LOCK(%s, %d), ", name, name, waitSeconds(ctx)), 2)
	switch {
	case err != nil:
	case done[0].Int64 != 1:
		err = &dialect.Error{Class: dialect.NotHeld, Err: fmt.Errorf("key %s", key.Label)}
	case !done[1].Valid:
		err = interrupted()
	case done[1].Int64 != 1:
		err = s.wait(ctx, keys)
	}
	if err != nil {
		return s.undo(ctx, keys, err)
	}
	return nil
}

// interrupted is for what MariaDB answers to KILL QUERY and max_statement_time, and
// MySQL when it runs out of memory.
func interrupted() error {
	return &dialect.Error{Class: dialect.Canceled, Hint: "the server ended the wait: GET_LOCK returned NULL"}
}

// wait takes the keys in their order, waiting for each that is not free.
func (s *session) wait(ctx context.Context, keys []dialect.Key) error {
	for {
		granted, err := s.getLocks(ctx, keys, waitSeconds(ctx))
		switch {
		case granted || err != nil:
			return err
		case ctx.Err() != nil:
			return s.failure(ctx, ctx.Err())
		case len(keys) == 1:
			continue
		}
		held, err := s.Held(ctx, keys)
		if err != nil {
			return err
		}
		refused := slices.Index(held, false)
		if refused < 0 {
			return nil
		}
		keys = keys[refused:]
	}
}

// waitSeconds outlasts the context, whose end the client enforces; the server's
// own limit matters only if the client vanishes.
func waitSeconds(ctx context.Context) int64 {
	wait := longestWait
	if deadline, ok := ctx.Deadline(); ok {
		wait = max(0, min(wait, time.Until(deadline)))
	}
	return seconds(wait) + 1
}

// undo gives back what a call that failed was or may have been granted, if the
// connection can still be used: after the session's end the server would free it
// a moment later. Not all of the keys need be held.
func (s *session) undo(ctx context.Context, keys []dialect.Key, err error) error {
	if class := dialect.ClassOf(err); ctx.Err() != nil || class == dialect.Lost || class == dialect.Unsafe {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpWithin)
	defer cancel()
	_, undoErr := s.ask(ctx, list("RELEASE_LOCK(", keys, "), "), len(keys))
	return join(err, undoErr)
}

// giveUp releases what a try was granted before it was refused a key, which is the
// first that this session does not hold.
func (s *session) giveUp(ctx context.Context, keys []dialect.Key) error {
	place := int64(1)
	if len(keys) > 1 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpWithin)
		defer cancel()
		answer, err := s.ask(ctx, "FIELD(1"+list(", RELEASE_LOCK(", keys, ") IS NOT TRUE")+"), ", 1)
		if err != nil {
			return err
		}
		place = answer[0].Int64
	}
	if place < 1 || place > int64(len(keys)) {
		return &dialect.Error{Class: dialect.Unsafe, Err: fmt.Errorf("the server refused key %d of %d", place, len(keys))}
	}
	return &dialect.Error{Class: dialect.NotAcquired, Err: fmt.Errorf("key %s", keys[place-1].Label)}
}

// Release gives the last key back first, which MariaDB finds first, and stops at
// one that was not held.
func (s *session) Release(ctx context.Context, keys []dialect.Key) error {
	if len(keys) == 0 {
		return nil
	}
	if err := checkKeys(keys); err != nil {
		return err
	}
	last := slices.Clone(keys)
	slices.Reverse(last)
	all, err := s.ask(ctx, "RELEASE_LOCK("+literal(last[0])+")"+list(" AND RELEASE_LOCK(", last[1:], ")")+", ", 1)
	if err != nil {
		return err
	}
	if all[0].Int64 != 1 { // 0: somebody else holds one; NULL: nobody does
		return &dialect.Error{Class: dialect.NotHeld, Err: fmt.Errorf("one of: %s", labels(keys))}
	}
	return nil
}

// Held asks IS_USED_LOCK.
func (s *session) Held(ctx context.Context, keys []dialect.Key) ([]bool, error) {
	if err := checkKeys(keys); err != nil || len(keys) == 0 {
		return nil, err
	}
	holders, err := s.ask(ctx, list("IS_USED_LOCK(", keys, "), "), len(keys))
	if err != nil {
		return nil, err
	}
	return equal(holders, s.thread.id), nil
}

// Room is a constant of the server's kind: both keep locks in memory that only the
// machine limits, and it is time that a session with many of them costs.
func (s *session) Room(context.Context) (int, error) { return s.db.flavor.room, nil }

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

// list puts a text before and one after the name of each key, which checkKeys has
// approved of.
func list(before string, keys []dialect.Key, after string) string {
	return string(appendList(nil, before, keys, after))
}

func appendList(b []byte, before string, keys []dialect.Key, after string) []byte {
	for _, key := range keys {
		b = append(b, before...)
		b = append(b, '\'')
		b = append(b, key.Name...)
		b = append(b, '\'')
		b = append(b, after...)
	}
	return b
}

func equal(results []sql.NullInt64, to int64) []bool {
	same := make([]bool, len(results))
	for i, result := range results {
		same[i] = result.Valid && result.Int64 == to
	}
	return same
}

func labels(keys []dialect.Key) string {
	var all []string
	for _, key := range keys {
		all = append(all, key.Label)
	}
	return strings.Join(all, ", ")
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
