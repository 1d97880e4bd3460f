package mysql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// LockRows locks several rows in one statement if nobody has them, and otherwise one
// after the other, each wait in a statement of its own.
//
// A row that is missing is created before, in a transaction of its own: whatever
// creates it within the caller's transaction can deadlock, and so can a locking
// read that misses it, since under REPEATABLE READ it locks the gap. The caller's
// transaction sees locking reads only, which open no read view: what it reads
// after the lock is fresh.
// https://dev.mysql.com/doc/refman/en/innodb-locking.html#innodb-gap-locks
//
// InnoDB gives a row lock back only at the end of the transaction. So when one
// key of several is refused, those before it stay locked until then, and
// [dialect.Error.Remains] is RemainsUnknown: roll back.
func (db *DB) LockRows(ctx context.Context, tx dialect.Tx, r dialect.RowRequest) ([]int64, error) {
	if dialect.IsNil(tx) {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the transaction is nil"}
	}
	q, ok := tx.(dialect.Querier)
	if !ok {
		return nil, &dialect.Error{Class: dialect.Unsupported, Hint: fmt.Sprintf("%T has no QueryContext: pass a *sql.Tx", tx)}
	}
	for _, key := range r.Keys {
		if err := exclusive(key); err != nil {
			return nil, err
		}
	}
	if err := db.inTransaction(ctx, q); err != nil {
		return nil, err
	}
	table := db.quoted(r.Table)
	if err := db.ensureRows(ctx, table, r.Keys, r.Try); err != nil {
		// The caller's transaction has not been used.
		return nil, remains(db.tableFailure(ctx, r.Table, err), dialect.RemainsUsable)
	}
	locked, err := db.lockFree(ctx, q, table, r.Keys)
	if err != nil {
		return nil, stillLocked(len(r.Keys)-1, db.tableFailure(ctx, r.Table, err))
	}
	var fences []int64
	for i, key := range r.Keys {
		if !locked {
			if err := db.lockRow(ctx, q, table, key, r.Try); err != nil {
				return nil, stillLocked(i, db.tableFailure(ctx, r.Table, err))
			}
		}
		if !r.Fence {
			continue
		}
		number, err := nextFence(ctx, q, table, key)
		if err != nil {
			return nil, stillLocked(i+1, db.tableFailure(ctx, r.Table, err))
		}
		fences = append(fences, number)
	}
	return fences, nil
}

// branches is how many rows one statement locks.
const branches = 100

// lockFree locks several rows if it can have all of them without waiting. Otherwise
// it has locked some of the first ones, as lockRow would. Each row is a query of its
// own, of which a statement runs one after the other up to a refusal: for id IN (…)
// the optimizer may prefer to scan the table, and locks all that it reads.
func (db *DB) lockFree(ctx context.Context, q dialect.Querier, table string, keys []dialect.Key) (bool, error) {
	if len(keys) == 1 || db.rollbackOnTimeout {
		return false, nil
	}
	for keys := range slices.Chunk(keys, branches) {
		queries := make([]string, len(keys))
		for i, key := range keys {
			queries[i] = "(" + selectRow(table, key) + " NOWAIT)"
		}
		found, err := queryInts(ctx, q, strings.Join(queries, " UNION ALL "))
		if isBusy(err) || err == nil && len(found) < len(keys) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

func isBusy(err error) bool { return isNumber(err, errLockNowait) || isNumber(err, errLockWaitTimeout) }

func selectRow(table string, key dialect.Key) string {
	return fmt.Sprintf("SELECT id FROM %s WHERE id = %d FOR UPDATE", table, key.ID)
}

// lockRow waits for the row if it is not free.
//
// SKIP LOCKED would do instead of NOWAIT, but under REPEATABLE READ it goes on to
// lock the gap behind the row. On MariaDB the error of NOWAIT is that of a timeout,
// so innodb_rollback_on_timeout applies to it.
func (db *DB) lockRow(ctx context.Context, q dialect.Querier, table string, key dialect.Key, try bool) error {
	query := selectRow(table, key)
	if try || !db.rollbackOnTimeout {
		err := db.lockFound(ctx, q, query+" NOWAIT", table, key)
		switch busy := isBusy(err); {
		case busy && try:
			return db.refused(key, err)
		case !busy:
			return err
		}
	}
	return db.waitForRow(ctx, q, query, 0, func(query string) error {
		return db.lockFound(ctx, q, query, table, key)
	})
}

// unique marks a statement, so that it can be told from the next one of its kind
// on the same connection. What wraps a transaction may prepare statements and keep
// them for good, of which a server has only so many.
func unique(q dialect.Querier, query string) string {
	switch q.(type) {
	case *sql.Tx, *sql.Conn, *ownedTx:
		return fmt.Sprintf("/* dblock %016x */ %s", rand.Uint64(), query)
	}
	return query
}

func (db *DB) lockFound(ctx context.Context, q dialect.Querier, query, table string, key dialect.Key) error {
	var id int64
	found, err := queryRow(ctx, q, query, &id)
	if err != nil || found {
		return err
	}
	db.rows.forget(table, key.ID)
	return &dialect.Error{Class: dialect.Serialization, Hint: fmt.Sprintf("somebody deleted the row of key %s from %s: start the transaction again", key.Label, table)}
}

// refused is what the server's error means to a try.
func (db *DB) refused(key dialect.Key, err error) error {
	e := &dialect.Error{Class: dialect.NotAcquired, Err: fmt.Errorf("key %s: %w", key.Label, err)}
	var cause *dialect.Error
	if errors.As(db.Classify(err), &cause) {
		e.Code, e.Remains = cause.Code, cause.Remains
	}
	return e
}

// nextFence is called by the row's holder.
func nextFence(ctx context.Context, q dialect.Querier, table string, key dialect.Key) (int64, error) {
	result, err := q.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET fence = LAST_INSERT_ID(fence + 1) WHERE id = %d", table, key.ID))
	if err != nil {
		return 0, err
	}
	return result.LastInsertId()
}

// inTransaction refuses an executor on which the lock would end with the
// statement that takes it. Of a transaction of database/sql itself that is known
// not to be the case; every other type is asked, since what wraps a pool looks
// like what wraps a transaction.
func (db *DB) inTransaction(ctx context.Context, q dialect.Querier) error {
	switch q.(type) {
	case *sql.Tx, *ownedTx:
		return nil
	case *sql.DB:
		return noTransaction(q, nil)
	}
	const savepoint = "SAVEPOINT dblock_in_transaction"
	_, err := q.ExecContext(ctx, savepoint)
	if isNumber(err, errNotPreparable) {
		return db.inTransactionPrepared(ctx, q)
	}
	if err == nil {
		// Without a transaction, the savepoint has gone with its own statement.
		_, err = q.ExecContext(ctx, "RELEASE "+savepoint)
	}
	if isNumber(err, errNoSuchSavepoint) {
		return noTransaction(q, err)
	}
	return db.failure(ctx, err)
}

// inTransactionPrepared is for an executor that prepares every statement, which
// MySQL and older MariaDB refuse for savepoints. This statement gives the next
// transaction what it has by default, which changes nothing; within a transaction
// it is an error.
// https://dev.mysql.com/doc/refman/en/set-transaction.html#set-transaction-scope
func (db *DB) inTransactionPrepared(ctx context.Context, q dialect.Querier) error {
	_, err := q.ExecContext(ctx, fmt.Sprintf("SET @@%s = @@SESSION.%[1]s", db.flavor.readOnly))
	switch {
	case isNumber(err, errInTransaction):
		return nil
	case err == nil:
		return noTransaction(q, nil)
	}
	return db.failure(ctx, err)
}

func noTransaction(q dialect.Querier, cause error) error {
	return &dialect.Error{Class: dialect.Unsupported, Err: cause, Hint: fmt.Sprintf(
		"a row lock lasts as long as its transaction, and this %T is in none: begin one, and pass the *sql.Tx where it hides one", q)}
}

// ensureRows creates the rows that are missing, on a second connection.
func (db *DB) ensureRows(ctx context.Context, table string, keys []dialect.Key, try bool) error {
	if len(db.rows.unknown(table, keys)) == 0 {
		return nil
	}
	conn, done, err := db.side.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	unknown := db.rows.unknown(table, keys) // others may have had the connection before
	if len(unknown) == 0 {
		return nil
	}
	missing, err := missingRows(ctx, conn, table, unknown)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		if err := db.createRows(ctx, conn, table, missing, try); err != nil {
			return err
		}
	}
	db.rows.add(table, unknown)
	return nil
}

// missingRows reads without a lock, since inserting what exists would wait for
// its holder.
func missingRows(ctx context.Context, conn *sql.Conn, table string, keys []dialect.Key) ([]dialect.Key, error) {
	ids := make([]string, len(keys))
	for i, key := range keys {
		ids[i] = fmt.Sprint(key.ID)
	}
	found, err := queryInts(ctx, conn, fmt.Sprintf("SELECT id FROM %s WHERE id IN (%s)", table, strings.Join(ids, ", ")))
	if err != nil {
		return nil, err
	}
	exists := make(map[int64]bool, len(found))
	for _, id := range found {
		exists[id] = true
	}
	var missing []dialect.Key
	for _, key := range keys {
		if !exists[key.ID] {
			missing = append(missing, key)
		}
	}
	return missing, nil
}

func queryInts(ctx context.Context, q dialect.Querier, query string) (ints []int64, err error) {
	rows, err := q.QueryContext(ctx, query)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var n int64
		if err := rows.Scan(&n); err != nil {
			return nil, err
		}
		ints = append(ints, n)
	}
	return ints, rows.Err()
}

const (
	// A creator waits for a second, MySQL's least, at most: who is in its way may
	// have created the very row and hold it. It commits each row by itself.
	creatorSettings = "SET @dblock_wait = @@innodb_lock_wait_timeout, @dblock_autocommit = @@autocommit," +
		" SESSION innodb_lock_wait_timeout = 1, SESSION autocommit = 1"
	poolSettings = "SET SESSION innodb_lock_wait_timeout = @dblock_wait, SESSION autocommit = @dblock_autocommit," +
		" @dblock_wait = NULL, @dblock_autocommit = NULL"
)

// createRows inserts one row per statement. It leaves the connection with the
// settings that it had, or destroys it.
func (db *DB) createRows(ctx context.Context, conn *sql.Conn, table string, missing []dialect.Key, try bool) (err error) {
	defer func() {
		if err != nil {
			err = join(err, pinned.Destroy(conn))
		}
	}()
	if _, err := conn.ExecContext(ctx, creatorSettings); err != nil {
		return err
	}
	for _, key := range missing {
		if err := db.createRow(ctx, conn, table, key, try); err != nil {
			return err
		}
	}
	_, err = conn.ExecContext(ctx, poolSettings)
	return err
}

func (db *DB) createRow(ctx context.Context, conn *sql.Conn, table string, key dialect.Key, try bool) error {
	_, err := conn.ExecContext(ctx, fmt.Sprintf("INSERT IGNORE INTO %s (id, name) VALUES (%d, X'%X')", table, key.ID, key.Name))
	switch {
	case isNumber(err, errDeadlock): // only the insert was rolled back
		return db.createRow(ctx, conn, table, key, try)
	case !isNumber(err, errLockWaitTimeout):
		return err
	}
	missing, missingErr := missingRows(ctx, conn, table, []dialect.Key{key})
	switch {
	case missingErr != nil:
		return missingErr
	case len(missing) == 0:
		return nil // held by who created it
	case try:
		return db.refused(key, err)
	}
	return &dialect.Error{Class: dialect.Timeout, Err: err, Remains: dialect.RemainsUsable, Hint: fmt.Sprintf(
		"cannot create the row of key %s in %s: some transaction has locked the place where it belongs", key.Label, table)}
}

// stillLocked corrects an error that leaves the transaction as it was if there
// are rows that the call has locked before.
func stillLocked(rows int, err error) error {
	if rows > 0 {
		return doubtful(err)
	}
	return err
}

func remains(err error, r dialect.Remains) error {
	var e *dialect.Error
	if !errors.As(err, &e) {
		return err
	}
	corrected := *e
	corrected.Remains = r
	return &corrected
}

// knownRows remembers which rows were seen in a lock table, for most calls find
// theirs. A row that is deleted nevertheless is noticed when it is to be locked.
type knownRows struct {
	mu   sync.Mutex
	rows map[knownRow]struct{}
}

type knownRow struct {
	table string
	id    int64
}

// maxKnown bounds the memory to about 5 MB.
const maxKnown = 1 << 16

func (k *knownRows) unknown(table string, keys []dialect.Key) []dialect.Key {
	k.mu.Lock()
	defer k.mu.Unlock()
	var unknown []dialect.Key
	for _, key := range keys {
		if _, ok := k.rows[knownRow{table, key.ID}]; !ok {
			unknown = append(unknown, key)
		}
	}
	return unknown
}

func (k *knownRows) add(table string, keys []dialect.Key) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rows == nil || len(k.rows)+len(keys) > maxKnown {
		k.rows = map[knownRow]struct{}{}
	}
	for _, key := range keys {
		k.rows[knownRow{table, key.ID}] = struct{}{}
	}
}

func (k *knownRows) forget(table string, id int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.rows, knownRow{table, id})
}
