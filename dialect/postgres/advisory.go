package postgres

import (
	"cmp"
	"context"
	"database/sql"
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

// acquireOne waits for one key; the columns are those of acquireSeveral.
func acquireOne(mode dialect.Mode) string {
	if mode == dialect.Shared {
		return "SELECT " + answering + ", CASE WHEN " + renewed + " THEN pg_advisory_lock_shared($1::bigint) IS NOT NULL END, true, ''"
	}
	return "SELECT " + answering + ", CASE WHEN " + renewed + " THEN pg_advisory_lock($1::bigint) IS NOT NULL END, true, ''"
}

// renewed limits the waits of its statement, which is then sent again. A statement
// that waits holds a snapshot, for which VACUUM keeps dead rows and CREATE INDEX
// CONCURRENTLY waits:
// https://www.postgresql.org/docs/current/sql-createindex.html#SQL-CREATEINDEX-CONCURRENTLY
const renewed = "set_config('lock_timeout', '20s', true) IS NOT NULL"

// firstRefused takes the keys until one is refused, and has its place. A scan of a
// function has the order of its array and ends at the limit, so of several tries for the
// same keys one always wins.
func firstRefused(try string) string {
	return "SELECT n FROM " + keyRows + " WHERE NOT CASE WHEN shared THEN " + try + "_shared(id) ELSE " + try + "(id) END LIMIT 1"
}

const keyRows = "unnest($1::bigint[], $2::boolean[]) WITH ORDINALITY AS k (id, shared, n)"

// acquireSeveral takes all keys or gives back what it got. The columns: the
// session, whether all were taken, whether what was given back had been held, and
// the fencing numbers in the order of the keys.
//
// The numbers are written once all keys are taken: the subquery in the INSERT is
// evaluated before its first row. ON CONFLICT sees rows that were committed
// while the statement waited: https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED.
func acquireSeveral(r dialect.Request) string {
	query := "WITH taken AS MATERIALIZED (SELECT count(CASE WHEN shared THEN pg_advisory_lock_shared(id) IS NOT NULL ELSE pg_advisory_lock(id) IS NOT NULL END)" +
		" FROM " + keyRows + " WHERE (SELECT " + renewed + "))"
	got, clean := "(SELECT count > 0 FROM taken)", "true"
	if r.Try {
		query = "WITH refused AS MATERIALIZED (" + firstRefused("pg_try_advisory_lock") + ")," +
			" undone AS (SELECT CASE WHEN shared THEN pg_advisory_unlock_shared(id) ELSE pg_advisory_unlock(id) END AS ok" +
			" FROM " + keyRows + " WHERE n < (SELECT n FROM refused))"
		got, clean = "NOT EXISTS (SELECT FROM refused)", "coalesce((SELECT bool_and(ok) FROM undone), true)"
	}
	numbers := "''"
	if r.Fence != nil {
		query += ", fenced AS (" + drawNumbers(*r.Fence, "$3", "$4", got) + ")"
		numbers = "coalesce((" + drawnNumbers("$3") + "), '')"
	}
	return query + " SELECT " + answering + ", " + got + ", " + clean + ", " + numbers
}

// Acquire takes the keys in one statement, and in a long wait one after the other
// (see renewed), each of which waits behind those who came before it. A try for several
// keys that is refused needs a second one, to give back what it was granted before.
//
// A statement that fails keeps the session locks that it was granted before, or
// while it was being cancelled, so what it may have left is given back.
func (s *session) Acquire(ctx context.Context, r dialect.Request) ([]int64, error) {
	if len(r.Keys) == 0 {
		return nil, errNoKeys
	}
	if r.Try && r.Fence == nil {
		return nil, s.try(ctx, r.Keys)
	}
	query, args := acquireOne(r.Keys[0].Mode), []any{r.Keys[0].ID}
	if len(r.Keys) > 1 || r.Fence != nil {
		query, args = acquireSeveral(r), []any{intArray(r.Keys), sharedArray(r.Keys)}
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
		if again, err := s.afterFailure(ctx, r.Keys, err); !again || r.Try {
			return nil, err
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

// try takes the keys until one is refused.
func (s *session) try(ctx context.Context, keys []dialect.Key) error {
	refused, err := s.untilFailure(ctx, keys, tryLock, tryLockShared)
	switch {
	case err != nil:
		return join(err, s.undo(ctx, keys, err))
	case refused == 0:
		return nil
	case refused > 1:
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		missing, err := s.untilFailure(ctx, keys[:refused-1], unlock, unlockShared)
		switch {
		case err != nil:
			return err
		case missing > 0:
			return &dialect.Error{Class: dialect.Lost, Err: fmt.Errorf("key %s, taken a moment ago, was not held any more", keys[missing-1].Label)}
		}
	}
	return &dialect.Error{Class: dialect.NotAcquired}
}

// Renew is one statement, unless the wait is long; see Acquire.
func (s *session) Renew(ctx context.Context, key dialect.Key) error {
	query := renewOne
	if key.Mode == dialect.Shared {
		query = renewOneShared
	}
	var answer int64
	var held bool
	err := s.row(ctx, query, []any{key.ID}, &answer, &held)
	if err == nil && !held {
		return &dialect.Error{Class: dialect.NotHeld, Err: fmt.Errorf("key %s", key.Label)}
	}
	if err == nil {
		return nil
	}
	keys := []dialect.Key{key}
	again, err := s.afterFailure(ctx, keys, err)
	if again {
		_, err = s.Acquire(ctx, dialect.Request{Keys: keys})
	}
	return err
}

const (
	renewOne = "SELECT " + answering + ", CASE WHEN " + renewed +
		" THEN CASE WHEN pg_advisory_unlock($1::bigint) THEN pg_advisory_lock($1::bigint) IS NOT NULL ELSE false END END"
	renewOneShared = "SELECT " + answering + ", CASE WHEN " + renewed +
		" THEN CASE WHEN pg_advisory_unlock_shared($1::bigint) THEN pg_advisory_lock_shared($1::bigint) IS NOT NULL ELSE false END END"
)

// afterFailure undoes a call that failed. It is to be made again if all that happened is
// that its statement had waited for long.
func (s *session) afterFailure(ctx context.Context, keys []dialect.Key, err error) (again bool, failure error) {
	undoErr := s.undo(ctx, keys, err)
	if sqlState(err) == "55P03" && undoErr == nil && ctx.Err() == nil {
		return true, err
	}
	return false, join(err, undoErr)
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
JOIN (` + ownLocks + `) AS held USING (id, shared)`

const ownLocks = `SELECT (classid::bigint << 32) | objid::bigint AS id, mode = 'ShareLock' AS shared
	FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND pid = pg_backend_pid() AND granted`

// Release gives the keys back in one statement, up to one that is not held in its mode.
// Those behind that one need another.
func (s *session) Release(ctx context.Context, keys []dialect.Key) error {
	if len(keys) == 0 {
		return errNoKeys
	}
	missing, err := s.untilFailure(ctx, keys, unlock, unlockShared)
	if err != nil || missing == 0 {
		return err
	}
	labels := keys[missing-1].Label
	if rest := keys[missing:]; len(rest) > 0 {
		_, released, err := s.Exchange(time.Now().Add(closeTimeout), nil, rest)
		if err != nil {
			return err
		}
		for i, k := range rest {
			if !released[i] {
				labels += ", " + k.Label
			}
		}
	}
	return &dialect.Error{Class: dialect.NotHeld, Err: fmt.Errorf("key %s", labels)}
}

// Held looks the keys up in pg_locks, in the mode that they name.
func (s *session) Held(ctx context.Context, keys []dialect.Key) ([]bool, error) {
	var answer int64
	var list string
	err := s.row(ctx, "SELECT "+answering+`, coalesce(string_agg(n::text, ','), '')
		FROM unnest($1::bigint[], $2::boolean[]) WITH ORDINALITY AS k (id, shared, n)
		JOIN (`+ownLocks+`) AS held USING (id, shared)`,
		[]any{intArray(keys), sharedArray(keys)}, &answer, &list)
	if err != nil {
		return nil, err
	}
	held := make([]bool, len(keys))
	if list == "" {
		return held, nil
	}
	positions, err := parseInts(list)
	for _, p := range positions {
		held[p-1] = true
	}
	return held, err
}

// mostLocks that one session holds: at the end of each statement the server looks
// through all of its session locks.
const mostLocks = 512

// Room is half of the server's lock table at most, which all sessions share, with
// their table locks: once it is full, nobody can even connect.
// https://www.postgresql.org/docs/current/runtime-config-locks.html#GUC-MAX-LOCKS-PER-TRANSACTION
func (s *session) Room(ctx context.Context) (int, error) {
	var answer, size, used int64
	err := s.row(ctx, "SELECT "+answering+`, current_setting('max_locks_per_transaction')::bigint *
		(current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint),
		(SELECT count(*) FROM pg_locks)`, nil, &answer, &size, &used)
	if err != nil {
		return 0, err
	}
	if used >= size/2 {
		return 0, &dialect.Error{Class: dialect.Capacity,
			Err:  fmt.Errorf("%d locks are held on the server, whose lock table has room for %d and is used up to the half of it", used, size),
			Hint: "raise max_locks_per_transaction, or lock something coarser"}
	}
	return int(min(size/2-used, mostLocks)), nil
}

// AcquireTx takes the keys for the rest of the transaction, in one round trip; a
// try for several keys in two. An error of class NotAcquired, Timeout or
// Deadlock leaves the transaction as it was before the call.
//
// Through pgx, one key that is free is taken by a plain statement, and only a wait
// has a savepoint: it takes one round trip more.
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
	if len(r.Keys) == 1 {
		n, asked, err := t.free(ctx, takeForTx(r.Keys, true))
		switch {
		case err != nil || n == 1:
			return err
		case asked && r.Try:
			return refusedTx
		}
	}
	if r.Try {
		return tryTx(ctx, t, r.Keys)
	}
	lock := takeForTx(r.Keys, false)
	if r.Wait <= 0 {
		return guarded(ctx, t, lock)
	}
	return within(ctx, t, r.Wait, lock)
}

// BeginLocked begins with the statement that takes the keys, in one round trip
// through a pgx pool. Where a limited wait is needed after all, that is one more.
func (d *DB) BeginLocked(ctx context.Context, o *sql.TxOptions, r dialect.TxRequest) (dialect.OwnedTx, error) {
	if len(r.Keys) == 0 {
		return nil, errNoKeys
	}
	tx, n, err := d.beginWith(ctx, o, takeForTx(r.Keys, r.Try || r.Wait > 0))
	if err != nil || n == int64(len(r.Keys)) {
		return tx, err
	}
	return dialect.Begun(ctx, tx, d.AcquireTx(ctx, tx, r)) // what it got, it may take twice
}

// takeForTx takes the keys until one is refused, and has a row for each that it
// took.
func takeForTx(keys []dialect.Key, try bool) statement {
	if len(keys) == 1 {
		return statement{takeOneForTx(keys[0].Mode, try), []any{keys[0].ID}}
	}
	arrays := []any{intArray(keys), sharedArray(keys)}
	if try {
		return statement{"SELECT FROM generate_series(1, coalesce((" + firstRefused("pg_try_advisory_xact_lock") +
			") - 1, cardinality($1::bigint[])))", arrays}
	}
	// Functions that are volatile are called after the rows were sorted.
	return statement{"SELECT CASE WHEN shared THEN pg_advisory_xact_lock_shared(id) ELSE pg_advisory_xact_lock(id) END" +
		" FROM " + keyRows + " ORDER BY n", arrays}
}

func takeOneForTx(mode dialect.Mode, try bool) string {
	switch {
	case try && mode == dialect.Shared:
		return "SELECT WHERE pg_try_advisory_xact_lock_shared($1::bigint)"
	case try:
		return "SELECT WHERE pg_try_advisory_xact_lock($1::bigint)"
	case mode == dialect.Shared:
		return "SELECT pg_advisory_xact_lock_shared($1::bigint)"
	}
	return "SELECT pg_advisory_xact_lock($1::bigint)"
}

var refusedTx = &dialect.Error{Class: dialect.NotAcquired, Remains: dialect.RemainsUsable}

func tryTx(ctx context.Context, t transaction, keys []dialect.Key) error {
	take := takeForTx(keys, true).text()
	if len(keys) == 1 {
		// The savepoint only proves that there is a transaction to hold the lock.
		n, err := t.exec(ctx, inTurn(savepoint, release, take))
		if err != nil {
			return cmp.Or(unguarded(ctx, err), classify(ctx, err))
		}
		if n == 0 {
			return refusedTx
		}
		return nil
	}
	n, err := t.exec(ctx, inTurn(savepoint, take))
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
