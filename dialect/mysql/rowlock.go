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
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// LockRows locks several rows in one statement if nobody has them, and otherwise one
// after the other, each wait in a statement of its own. Fencing numbers are drawn
// afterwards, on a second connection.
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
	if err := db.inTransaction(ctx, q); err != nil {
		return nil, err
	}
	l := &rowLocker{db: db, tx: q, table: db.quoted(r.Table), try: r.Try}
	ensuring, cancel := ctx, func() {}
	if r.Wait > 0 {
		l.until = time.Now().Add(r.Wait)
		ensuring, cancel = context.WithDeadline(ctx, l.until)
	}
	defer cancel()
	needed := r.Keys
	if r.Fence {
		// The numbers are drawn on another connection, which must not wait for a gap that
		// this transaction has locked because it missed a row.
		needed = slices.Concat(r.Keys, dialect.FenceRows(r.Keys))
		db.rows.forget(l.table, needed...)
	}
	if err := db.ensureRows(ensuring, l.table, needed, r.Try); err != nil {
		// The caller's transaction has not been used.
		if ctx.Err() == nil && r.Wait > 0 && !time.Now().Before(l.until) {
			return nil, &dialect.Error{Class: dialect.Timeout, Remains: dialect.RemainsUsable, Err: fmt.Errorf("wait limit: %w", err)}
		}
		return nil, remains(db.tableFailure(ctx, r.Table, err), dialect.RemainsUsable)
	}
	locked, err := l.lockFree(ctx, r.Keys)
	if err != nil {
		return nil, stillLocked(len(r.Keys)-1, db.tableFailure(ctx, r.Table, err))
	}
	for i, key := range r.Keys {
		if locked {
			break
		}
		if err := l.lockRow(ctx, key); err != nil {
			return nil, stillLocked(i, db.tableFailure(ctx, r.Table, err))
		}
	}
	if !r.Fence {
		return nil, nil
	}
	return db.draw(ctx, r.Table, r.Keys)
}

// rowLocker is one call of LockRows.
type rowLocker struct {
	db    *DB
	tx    dialect.Querier
	table string
	try   bool
	until time.Time // the end of RowRequest.Wait; zero without one
}

// branches is how many rows one statement locks.
const branches = 100

// lockFree locks several rows if it can have all of them without waiting. Otherwise
// it has locked some of the first ones, as lockRow would. Each row is a query of its
// own, of which a statement runs one after the other up to a refusal: for id IN (…)
// the optimizer may prefer to scan the table, and locks all that it reads.
func (l *rowLocker) lockFree(ctx context.Context, keys []dialect.Key) (bool, error) {
	if len(keys) == 1 || l.db.rollbackOnTimeout {
		return false, nil
	}
	for keys := range slices.Chunk(keys, branches) {
		queries := make([]string, len(keys))
		for i, key := range keys {
			queries[i] = "(" + l.selectRow(key) + " NOWAIT)"
		}
		found, err := l.db.lockedPlaces(ctx, l.tx, strings.Join(queries, " UNION ALL "))
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

func (l *rowLocker) selectRow(key dialect.Key) string {
	strength := "FOR UPDATE"
	if key.Mode == dialect.Shared {
		strength = l.db.flavor.forShare
	}
	return fmt.Sprintf("SELECT id, %s FROM %s WHERE id = %d %s", l.db.flavor.inTransaction, l.table, key.ID, strength)
}

// lockRow waits for the row if it is not free.
//
// SKIP LOCKED would do instead of NOWAIT, but under REPEATABLE READ it goes on to
// lock the gap behind the row. On MariaDB the error of NOWAIT is that of a timeout,
// so innodb_rollback_on_timeout applies to it.
func (l *rowLocker) lockRow(ctx context.Context, key dialect.Key) error {
	query := l.selectRow(key)
	if l.try || !l.db.rollbackOnTimeout {
		found, err := l.find(ctx, query+" NOWAIT")
		switch busy := isBusy(err); {
		case busy && l.try:
			return l.db.refused(key, err)
		case err != nil && !busy, found:
			return err
		case !busy:
			return l.recreate(ctx, key)
		}
	}
	var found bool
	err := l.db.waitForRow(ctx, l.tx, query, l.left(), func(query string) (err error) {
		found, err = l.find(ctx, query)
		return err
	})
	if err != nil || found {
		return err
	}
	return l.recreate(ctx, key)
}

func (l *rowLocker) find(ctx context.Context, query string) (found bool, err error) {
	ids, err := l.db.lockedPlaces(ctx, l.tx, query)
	return len(ids) > 0, err
}

// recreate is for a row that somebody deleted although this process had seen it, which
// CleanRows does not do. Under REPEATABLE READ the look that missed it has locked its
// place, so nobody but this transaction can create it; several that missed it can
// deadlock.
func (l *rowLocker) recreate(ctx context.Context, key dialect.Key) error {
	l.db.rows.forget(l.table, key)
	if l.try {
		if err := l.db.ensureRows(ctx, l.table, []dialect.Key{key}, l.try); err != nil {
			return err
		}
		found, err := l.find(ctx, l.selectRow(key)+" NOWAIT")
		if isBusy(err) || err == nil && !found {
			return l.db.refused(key, err)
		}
		return err
	}
	return doubtful(l.db.waitForPlace(ctx, l.tx, insertRow(l.table, key), l.left()))
}

// left is what is left of the call's limit, 0 if it has none.
func (l *rowLocker) left() time.Duration {
	if l.until.IsZero() {
		return 0
	}
	return max(time.Until(l.until), time.Millisecond)
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

// refused is what the server's error means to a try.
func (db *DB) refused(key dialect.Key, err error) error {
	e := &dialect.Error{Class: dialect.NotAcquired, Remains: dialect.RemainsUsable, Err: fmt.Errorf("key %s is being deleted", key.Label)}
	if err == nil {
		return e
	}
	e.Err = fmt.Errorf("key %s: %w", key.Label, err)
	var cause *dialect.Error
	if errors.As(db.Classify(err), &cause) {
		e.Code, e.Remains = cause.Code, cause.Remains
	}
	return e
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
	if isNumber(err, errDoesNotExist) {
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
	missing, err := missingRows(ctx, conn, table, unknown, alive)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		err := committing(ctx, conn, func() error {
			for _, key := range missing {
				if err := db.createRow(ctx, conn, table, key, try); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		missing, err = missingRows(ctx, conn, table, missing, alive)
		if err != nil {
			return err
		}
	}
	db.rows.add(table, slices.DeleteFunc(unknown, func(key dialect.Key) bool { return slices.Contains(missing, key) }))
	return nil
}

// alive is true of rows that CleanRows has not marked.
const alive = "fence >= 0"

// missingRows reads without a lock, since inserting what exists would wait for
// its holder.
func missingRows(ctx context.Context, conn *sql.Conn, table string, keys []dialect.Key, condition string) ([]dialect.Key, error) {
	ids := make([]string, len(keys))
	for i, key := range keys {
		ids[i] = fmt.Sprint(key.ID)
	}
	found, err := queryInts(ctx, conn, fmt.Sprintf("SELECT id FROM %s WHERE id IN (%s) AND %s", table, strings.Join(ids, ", "), condition))
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
	// Who writes beside the caller's transaction commits each statement by itself, and
	// waits for a second, MySQL's least, at most: who is in the way may have created
	// the very row and hold it.
	committingSettings = "SET @dblock_wait = @@innodb_lock_wait_timeout, @dblock_autocommit = @@autocommit," +
		" SESSION innodb_lock_wait_timeout = 1, SESSION autocommit = 1"
	poolSettings = "SET SESSION innodb_lock_wait_timeout = @dblock_wait, SESSION autocommit = @dblock_autocommit," +
		" @dblock_wait = NULL, @dblock_autocommit = NULL"
)

// committing calls with a connection whose statements commit by themselves. It
// leaves the connection with the settings that it had, or destroys it.
func committing(ctx context.Context, conn *sql.Conn, call func() error) (err error) {
	defer func() {
		if err != nil {
			err = join(err, pinned.Destroy(conn))
		}
	}()
	if _, err := conn.ExecContext(ctx, committingSettings); err != nil {
		return err
	}
	if err := call(); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, poolSettings)
	return err
}

// insertRow creates a row, or takes the mark of CleanRows from it.
func insertRow(table string, key dialect.Key) string {
	return fmt.Sprintf("INSERT INTO %s (id, name) VALUES (%d, X'%X') ON DUPLICATE KEY UPDATE fence = GREATEST(fence, 0)", table, key.ID, key.Name)
}

func (db *DB) createRow(ctx context.Context, conn *sql.Conn, table string, key dialect.Key, try bool) error {
	_, err := conn.ExecContext(ctx, insertRow(table, key))
	switch {
	case isNumber(err, errDeadlock): // only the insert was rolled back
		return db.createRow(ctx, conn, table, key, try)
	case !isNumber(err, errLockWaitTimeout):
		return err
	}
	missing, missingErr := missingRows(ctx, conn, table, []dialect.Key{key}, "TRUE")
	switch {
	case missingErr != nil:
		return missingErr
	case len(missing) == 0:
		return nil // held, by who created it for instance
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

// knownRows remembers which rows were seen in a lock table a moment ago, for most
// calls find theirs. CleanRows deletes no row within that time.
type knownRows struct {
	mu   sync.Mutex
	rows map[knownRow]time.Time // when they were seen
}

type knownRow struct {
	table string
	id    int64
}

const (
	// maxKnown bounds the memory to about 5 MB.
	maxKnown = 1 << 16
	// knownFor is how long a row that was seen is taken to be there.
	knownFor = time.Minute
)

func (k *knownRows) unknown(table string, keys []dialect.Key) []dialect.Key {
	k.mu.Lock()
	defer k.mu.Unlock()
	var unknown []dialect.Key
	for _, key := range keys {
		if seen, ok := k.rows[knownRow{table, key.ID}]; !ok || time.Since(seen) > knownFor {
			unknown = append(unknown, key)
		}
	}
	return unknown
}

func (k *knownRows) add(table string, keys []dialect.Key) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.rows == nil || len(k.rows)+len(keys) > maxKnown {
		k.rows = map[knownRow]time.Time{}
	}
	for _, key := range keys {
		k.rows[knownRow{table, key.ID}] = time.Now()
	}
}

func (k *knownRows) forget(table string, keys ...dialect.Key) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		delete(k.rows, knownRow{table, key.ID})
	}
}
