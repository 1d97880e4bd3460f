package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// The functions are described at
// https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
// Those that wait return void, which is not null.

// acquireOne asks for one key; the columns are those of acquireSeveral.
func acquireOne(mode dialect.Mode, try bool) string {
	switch {
	case try && mode == dialect.Shared:
		return "SELECT " + answering + ", pg_try_advisory_lock_shared($1::bigint), true, ''"
	case try:
		return "SELECT " + answering + ", pg_try_advisory_lock($1::bigint), true, ''"
	case mode == dialect.Shared:
		return "SELECT " + answering + ", CASE WHEN " + renewed + " THEN pg_advisory_lock_shared($1::bigint) IS NOT NULL END, true, ''"
	}
	return "SELECT " + answering + ", CASE WHEN " + renewed + " THEN pg_advisory_lock($1::bigint) IS NOT NULL END, true, ''"
}

// renewed limits the waits of its statement, which is then sent again. A statement
// that waits holds a snapshot, for which VACUUM keeps dead rows and CREATE INDEX
// CONCURRENTLY waits:
// https://www.postgresql.org/docs/current/sql-createindex.html#SQL-CREATEINDEX-CONCURRENTLY
const renewed = "set_config('lock_timeout', '20s', true) IS NOT NULL"

// taking starts a query with the CTEs keys and taken: it takes the keys one
// after the other and stops at one that is refused, so of several tries for the
// same keys one always wins. Each step of the recursion needs the one before,
// so the order is not left to the planner. Row 0 is the start, not a key.
func taking(ids, modes string, xact, try bool) string {
	call := func(suffix string) string {
		prefix, result := "pg_advisory_", " IS NOT NULL"
		if try {
			prefix, result = "pg_try_advisory_", ""
		}
		if xact {
			prefix += "xact_"
		}
		return prefix + "lock" + suffix + "(ids[n + 1])" + result
	}
	start := "true"
	if !try && !xact {
		start = renewed
	}
	return fmt.Sprintf(`WITH RECURSIVE keys AS (SELECT %s::bigint[] AS ids, %s::boolean[] AS shared),
taken (n, got) AS (
	SELECT 0, %s
	UNION ALL
	SELECT n + 1, CASE WHEN shared[n + 1] THEN %s ELSE %s END
	FROM taken, keys WHERE got AND n < cardinality(ids)
)`, ids, modes, start, call("_shared"), call(""))
}

// acquireSeveral takes all keys or gives back what it got. The columns: the
// server process, whether all were taken, whether what was given back had been
// held, and the fencing numbers in the order of the keys.
//
// The numbers are written once all keys are taken: the subquery in the INSERT is
// evaluated before its first row. ON CONFLICT sees rows that were committed
// while the statement waited: https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED.
func acquireSeveral(try bool, fence *dialect.Table) string {
	query := taking("$1", "$2", false, try) + `,
undone AS (
	SELECT CASE WHEN shared[n] THEN pg_advisory_unlock_shared(ids[n]) ELSE pg_advisory_unlock(ids[n]) END AS ok
	FROM taken, keys WHERE n > 0 AND got AND NOT (SELECT bool_and(got) FROM taken)
)`
	numbers := "''"
	if fence != nil {
		query += `,
fenced AS (
	INSERT INTO ` + tableName(*fence) + ` AS t (id, name, fence)
	SELECT k.id, k.name, 1 FROM unnest($3::bigint[], $4::text[]) WITH ORDINALITY AS k (id, name, n)
	WHERE (SELECT bool_and(got) FROM taken) ORDER BY k.n
	ON CONFLICT (id) DO UPDATE SET fence = t.fence + 1
	RETURNING id, fence
)`
		numbers = "coalesce((SELECT string_agg(fence::text, ',' ORDER BY array_position($3::bigint[], id)) FROM fenced), '')"
	}
	return query + `
SELECT ` + answering + `, (SELECT bool_and(got) FROM taken), coalesce((SELECT bool_and(ok) FROM undone), true), ` + numbers
}

// Acquire takes the keys in one statement, and in a long wait one after the other
// (see renewed), each of which waits behind those who came before it.
//
// A statement that fails keeps the session locks that it was granted before, or
// while it was being cancelled, so what it may have left is given back.
func (s *session) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	if len(r.Keys) == 0 {
		return nil, errNoKeys
	}
	query, args := acquireOne(r.Keys[0].Mode, r.Try), []any{r.Keys[0].ID}
	if len(r.Keys) > 1 || r.Fence != nil {
		query, args = acquireSeveral(r.Try, r.Fence), []any{intArray(r.Keys), sharedArray(r.Keys)}
	}
	if r.Fence != nil {
		args = append(args, intArray(dialect.FenceRows(r.Keys)), nameArray(r.Keys))
	}
	var answer int64
	var got, clean bool
	var numbers string
	for {
		err := s.row(ctx, query, args, &answer, &got, &clean, &numbers)
		if err == nil {
			break
		}
		undoErr := s.undo(ctx, r.Keys, err)
		if r.Try || sqlState(err) != "55P03" || undoErr != nil || ctx.Err() != nil {
			return nil, join(err, undoErr)
		}
	}
	switch {
	case !clean:
		return nil, &dialect.Error{Class: dialect.Lost, Hint: "keys taken a moment ago were not held any more"}
	case !got:
		return nil, &dialect.Error{Class: dialect.NotAcquired}
	case r.Fence == nil:
		return nil, nil
	}
	return parseInts(numbers)
}

// undo gives back those keys of a failed call that the session holds, and no
// other, if the server can still be asked: after the session's end it would free
// them a moment later. It looks before it unlocks, since unlocking what is not
// held puts a warning into the server's log.
func (s *session) undo(ctx context.Context, keys []dialect.Key, cause error) error {
	if ctx.Err() != nil || dialect.ClassOf(cause) == dialect.Lost {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	var answer int64
	var released bool
	undoErr := s.row(ctx, undoHeld, []any{intArray(keys), sharedArray(keys)}, &answer, &released)
	if undoErr == nil && !released {
		undoErr = &dialect.Error{Class: dialect.NotHeld, Err: errors.New("a key that the failed call was granted")}
	}
	return undoErr
}

// undoHeld asks for this session only, which needs no lock on pg_database: there
// may be no room for one left in the server's lock table.
const undoHeld = "SELECT " + answering + `, coalesce(bool_and(CASE WHEN shared THEN pg_advisory_unlock_shared(id) ELSE pg_advisory_unlock(id) END), true)
FROM unnest($1::bigint[], $2::boolean[]) AS k (id, shared)
JOIN (SELECT (classid::bigint << 32) | objid::bigint AS id, mode = 'ShareLock' AS shared
	FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND pid = pg_backend_pid() AND granted) AS held USING (id, shared)`

// Release gives the keys back in one statement. pg_advisory_unlock returns false
// for what is not held in that mode.
func (s *session) Release(ctx context.Context, keys []dialect.Key) error {
	if len(keys) == 0 {
		return errNoKeys
	}
	query, args := releaseOne, []any{keys[0].ID}
	switch {
	case len(keys) > 1:
		query, args = releaseSeveral, []any{intArray(keys), sharedArray(keys)}
	case keys[0].Mode == dialect.Shared:
		query = releaseOneShared
	}
	var answer int64
	var missing string
	if err := s.row(ctx, query, args, &answer, &missing); err != nil || missing == "" {
		return err
	}
	positions, err := parseInts(missing)
	if err != nil {
		return err
	}
	labels := make([]string, len(positions))
	for i, p := range positions {
		labels[i] = keys[p-1].Label
	}
	return &dialect.Error{Class: dialect.NotHeld, Err: fmt.Errorf("key %s", strings.Join(labels, ", "))}
}

// The second column lists the positions of keys that were not held.
const (
	releaseOne       = "SELECT " + answering + ", CASE WHEN pg_advisory_unlock($1::bigint) THEN '' ELSE '1' END"
	releaseOneShared = "SELECT " + answering + ", CASE WHEN pg_advisory_unlock_shared($1::bigint) THEN '' ELSE '1' END"
	releaseSeveral   = "SELECT " + answering + `, coalesce(string_agg(n::text, ',') FILTER (WHERE NOT ok), '') FROM (
	SELECT n, CASE WHEN shared THEN pg_advisory_unlock_shared(id) ELSE pg_advisory_unlock(id) END AS ok
	FROM unnest($1::bigint[], $2::boolean[]) WITH ORDINALITY AS k (id, shared, n)
) AS released`
)

// Held looks the keys up in pg_locks, in the mode that they name.
func (s *session) Held(ctx context.Context, keys []dialect.Key) (bool, error) {
	var answer, n int64
	err := s.row(ctx, "SELECT "+answering+`, count(*)
		FROM unnest($1::bigint[], $2::boolean[]) AS k (id, shared)
		JOIN (`+advisoryLocks+`) AS l USING (id, shared)
		WHERE l.pid = pg_backend_pid() AND l.granted`,
		[]any{intArray(keys), sharedArray(keys)}, &answer, &n)
	return n == int64(len(keys)), err
}

// AcquireTx takes the keys for the rest of the transaction, in one round trip; a
// try for several keys in two. An error of class NotAcquired, Timeout or
// Deadlock leaves the transaction as it was before the call.
//
// Over drivers that close a connection when a context ends, as pgx does, the end
// of ctx costs the transaction; the request's Wait does not, nor does a ctx that
// had ended before the call.
func (d *DB) AcquireTx(ctx context.Context, tx dialect.Tx, r dialect.TxRequest) error {
	if len(r.Keys) == 0 {
		return errNoKeys
	}
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return err
	}
	if r.Try {
		return tryTx(ctx, t, r.Keys)
	}
	lock := "SELECT " + callOne("pg_advisory_xact_lock", r.Keys[0])
	if len(r.Keys) > 1 {
		lock = taking(literal(intArray(r.Keys)), literal(sharedArray(r.Keys)), true, false) + " SELECT FROM taken"
	}
	if r.Wait <= 0 {
		return guarded(ctx, t, lock)
	}
	began := time.Now()
	// lock_timeout would begin anew with each key.
	err = guarded(ctx, t, limited("statement_timeout", milliseconds(r.Wait), lock))
	if sqlState(err) == "57014" && ctx.Err() == nil && time.Since(began) >= r.Wait {
		return changed(err, func(e *dialect.Error) {
			e.Class, e.Err = dialect.Timeout, fmt.Errorf("wait limit of %v: %w", r.Wait, e.Err)
		})
	}
	return err
}

func tryTx(ctx context.Context, t transaction, keys []dialect.Key) error {
	if len(keys) == 1 {
		// The savepoint only proves that there is a transaction to hold the lock.
		n, err := t.exec(ctx, savepoint+release+"SELECT WHERE "+callOne("pg_try_advisory_xact_lock", keys[0]))
		if err != nil {
			return cmp.Or(unguarded(ctx, err), classify(ctx, err))
		}
		if n == 0 {
			return &dialect.Error{Class: dialect.NotAcquired, Remains: dialect.RemainsUsable}
		}
		return nil
	}
	n, err := t.exec(ctx, savepoint+taking(literal(intArray(keys)), literal(sharedArray(keys)), true, true)+
		" SELECT FROM taken WHERE got AND n > 0")
	if err == nil && n == int64(len(keys)) {
		if _, err = t.exec(ctx, release); err == nil {
			return nil
		}
	}
	if err == nil {
		err = &dialect.Error{Class: dialect.NotAcquired}
	}
	return rollBack(ctx, t, err)
}

// callOne calls a function on one key, written out.
func callOne(function string, k dialect.Key) string {
	if k.Mode == dialect.Shared {
		function += "_shared"
	}
	return function + "(" + strconv.FormatInt(k.ID, 10) + ")"
}

func parseInts(list string) ([]int64, error) {
	fields := strings.Split(list, ",")
	ints := make([]int64, len(fields))
	for i, f := range fields {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return nil, err
		}
		ints[i] = n
	}
	return ints, nil
}

// The drivers have no array type in common, but all send text.

func intArray(keys []dialect.Key) string {
	return array(keys, func(k dialect.Key) string { return strconv.FormatInt(k.ID, 10) })
}

func sharedArray(keys []dialect.Key) string {
	return array(keys, func(k dialect.Key) string { return strconv.FormatBool(k.Mode == dialect.Shared) })
}

func nameArray(keys []dialect.Key) string {
	return array(keys, func(k dialect.Key) string { return quoteElement(k.Name) })
}

func textArray(elements []string) string { return array(elements, quoteElement) }

func array[T any](elements []T, text func(T) string) string {
	b := []byte{'{'}
	for i, e := range elements {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, text(e)...)
	}
	return string(append(b, '}'))
}

func quoteElement(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}
