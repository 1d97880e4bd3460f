package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dblock-go/dblock/dialect"
)

// LockRows creates and locks the rows in one statement, which goes through the
// keys in their order. ON CONFLICT DO UPDATE locks a row that exists also where
// its condition keeps it from being written
// (https://www.postgresql.org/docs/current/sql-insert.html#SQL-ON-CONFLICT), waits
// for whoever is creating it, and so leaves no gap between looking and locking
// in which first users of a key could deadlock. The lock is that of SELECT … FOR
// NO KEY UPDATE.
//
// That takes one round trip. Fencing numbers take a second one, on a connection of
// dblock's own. Through pgx, one
// row that exists and is free is locked by a plain statement instead, and only the
// others cost a savepoint and one round trip more; there a missing table, for one,
// aborts the transaction. A try needs
// one more where a row is missing: it locks the rows with NOWAIT if all exist,
// and otherwise creates them under a lock_timeout, since INSERT has no NOWAIT.
// Where a key is shared, rows that are missing are created on dblock's own
// connection: their creator would exclude the others.
//
// Under REPEATABLE READ and SERIALIZABLE a row that was created, changed or cleaned
// away after the transaction's snapshot is an error of class Serialization, and an
// exclusive lock changes its row: so who has waited for a holder of these levels, and
// would read what was there before it, is told to start again. What else
// [DB.AcquireTx] says of errors and contexts is true here too.
func (d *DB) LockRows(ctx context.Context, tx dialect.Tx, r dialect.RowRequest) ([]int64, error) {
	if len(r.Keys) == 0 {
		return nil, errNoKeys
	}
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return nil, err
	}
	if err := d.lockRows(ctx, t, r); err != nil || !r.Fence {
		return nil, err
	}
	return d.draw(ctx, r.Table, r.Keys)
}

func (d *DB) lockRows(ctx context.Context, t transaction, r dialect.RowRequest) error {
	if r.Shared() {
		return d.lockShared(ctx, t, r)
	}
	if len(r.Keys) == 1 {
		n, _, err := t.free(ctx, freeRow(r))
		if err != nil || n == 1 {
			return err
		}
	}
	lock := createLocked(r)
	switch {
	case r.Try:
		return tryRows(ctx, t, r, lock)
	case r.Wait > 0:
		return within(ctx, t, r.Wait, lock)
	}
	return guarded(ctx, t, lock)
}

// BeginRows begins with the statement that creates and locks the rows, in one round
// trip through a pgx pool. A try, a limit and shared keys need others.
func (d *DB) BeginRows(ctx context.Context, o *sql.TxOptions, r dialect.RowRequest) (dialect.OwnedTx, error) {
	if len(r.Keys) == 0 {
		return nil, errNoKeys
	}
	if r.Try || r.Wait > 0 || r.Shared() {
		tx, err := d.Begin(ctx, o)
		if err != nil {
			return nil, err
		}
		_, err = d.LockRows(ctx, tx, r)
		return dialect.Begun(ctx, tx, err)
	}
	tx, _, err := d.beginWith(ctx, o, createLocked(r))
	return tx, err
}

// oneSnapshot is true where all statements of the transaction read from its first one's
// snapshot: https://www.postgresql.org/docs/current/transaction-iso.html
const oneSnapshot = "current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"

// freeRow locks the row if it exists, nobody has it, and the lock is to leave no trace.
func freeRow(r dialect.RowRequest) statement {
	return statement{"SELECT FROM " + tableName(r.Table) + " WHERE id = $1::bigint AND NOT " + oneSnapshot + " FOR NO KEY UPDATE SKIP LOCKED",
		[]any{r.Keys[0].ID}}
}

const (
	// A try for missing rows gives their creator, if there is one, no more than
	// the shortest lock_timeout there is. What else its statement waits for, such
	// as another session that is extending the table's file, makes it try again
	// with twice the time, up to the longest.
	shortestTry = time.Millisecond
	longestTry  = 64 * time.Millisecond
	// tableWait is how long a try for rows that exist waits for the table or its
	// file; NOWAIT is about rows only.
	tableWait = 250 * time.Millisecond
)

// tryRows looks again after each failed creation: the rows may exist by now.
func tryRows(ctx context.Context, t transaction, r dialect.RowRequest, create statement) error {
	for wait := shortestTry; ; wait *= 2 {
		locked, err := lockExisting(ctx, t, r, limits{"lock_timeout", tableWait})
		if err == nil && !locked {
			err = limitedTo(ctx, t, "lock_timeout", wait, create)
			if sqlState(err) == "55P03" && !waitedForRow(err) && wait < longestTry {
				continue
			}
		}
		if sqlState(err) == "55P03" {
			return asClass(err, dialect.NotAcquired)
		}
		return err
	}
}

// limits bound the waits of a statement. The zero value has none.
type limits struct {
	setting string
	limit   time.Duration
}

// lockExisting locks the rows if all of them exist, and none otherwise, each in the
// mode of its key. Those of the same mode that follow each other are one subquery;
// the subqueries are evaluated one after the other. That one of them finds fewer
// rows than there were means that somebody has just deleted one.
func lockExisting(ctx context.Context, t transaction, r dialect.RowRequest, l limits) (bool, error) {
	all := fmt.Sprintf("(SELECT count(*) FROM %s WHERE id IN (%s)) = %d", tableName(r.Table), idList(r.Keys), len(r.Keys))
	var counts []string
	for rest := r.Keys; len(rest) > 0; {
		other := slices.IndexFunc(rest, func(k dialect.Key) bool { return k.Mode != rest[0].Mode })
		if other < 0 {
			other = len(rest)
		}
		strength := "NO KEY UPDATE"
		if rest[0].Mode == dialect.Shared {
			strength = "SHARE"
		}
		if r.Try {
			strength += " NOWAIT"
		}
		counts = append(counts, fmt.Sprintf("(SELECT count(*) FROM (SELECT FROM %s WHERE id IN (%s) AND %s ORDER BY id FOR %s) AS k)",
			tableName(r.Table), idList(rest[:other]), all, strength))
		rest = rest[other:]
	}
	statement := "SELECT set_config('dblock.locked', (" + strings.Join(counts, " + ") + ")::text, true)"
	if l.limit > 0 {
		statement = limited(l.setting, l.limit, statement)
	}
	var exclusive []dialect.Key
	for _, k := range r.Keys {
		if k.Mode == dialect.Exclusive {
			exclusive = append(exclusive, k)
		}
	}
	if len(exclusive) > 0 {
		statement = inTurn(statement, fmt.Sprintf("UPDATE %s SET fence = fence WHERE id IN (%s) AND %s AND current_setting('dblock.locked')::int = %d",
			tableName(r.Table), idList(exclusive), oneSnapshot, len(r.Keys)))
	}
	n, err := t.exec(ctx, inTurn(savepoint, statement, release,
		"SELECT FROM generate_series(1, current_setting('dblock.locked')::int)"))
	if err != nil {
		return false, rollBack(ctx, t, err)
	}
	return n == int64(len(r.Keys)), nil
}

func idList(keys []dialect.Key) string {
	ids := make([]string, len(keys))
	for i, k := range keys {
		ids[i] = strconv.FormatInt(k.ID, 10)
	}
	return strings.Join(ids, ", ")
}

// createBesides is how often rows are created that the transaction does not see then.
const createBesides = 3

// lockShared creates what is missing on dblock's own connection, which waits for
// nobody there: a transaction that has the connection's user wait for it could be
// waiting for the connection.
func (d *DB) lockShared(ctx context.Context, t transaction, r dialect.RowRequest) error {
	began := time.Now()
	left := func() limits {
		if r.Wait <= 0 {
			return limits{}
		}
		return limits{"statement_timeout", max(time.Millisecond, r.Wait-time.Since(began))}
	}
	if r.Try {
		left = func() limits { return limits{"lock_timeout", tableWait} }
	}
	for created := 0; ; {
		locked, err := lockExisting(ctx, t, r, left())
		switch {
		case locked:
			return nil
		case err != nil && r.Try && sqlState(err) == "55P03":
			return asClass(err, dialect.NotAcquired)
		case err != nil:
			return pastLimit(ctx, began, r.Wait, err)
		case created == createBesides:
			return &dialect.Error{Class: dialect.Serialization, Remains: dialect.RemainsUsable,
				Err: errors.New("a row is newer than the transaction's snapshot"), Hint: "start the transaction again"}
		}
		err = d.createRows(ctx, r)
		switch {
		case err == nil:
			created++
		case sqlState(err) != "55P03":
			return withRemains(besideError(ctx, err), dialect.RemainsUsable)
		case r.Try:
			return withRemains(asClass(besideError(ctx, err), dialect.NotAcquired), dialect.RemainsUsable)
		default:
			if err := waitForCreators(ctx, t, r, left()); err != nil {
				return pastLimit(ctx, began, r.Wait, err)
			}
		}
	}
}

// createRows creates the rows that are missing and commits them. Waiting for somebody
// who creates one of them is left to the transaction.
func (d *DB) createRows(ctx context.Context, r dialect.RowRequest) error {
	for wait := shortestTry; ; wait *= 2 {
		query := "WITH made AS (INSERT INTO " + tableName(r.Table) + ` (id, name)
			SELECT k.id, k.name FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS k (id, name, n)
			WHERE (SELECT set_config('lock_timeout', '` + milliseconds(wait) + `', true)) IS NOT NULL ORDER BY k.n
			ON CONFLICT (id) DO NOTHING RETURNING id) SELECT count(*) FROM made`
		var made int64
		err := d.beside.Use(ctx, func(c conn) error {
			return c.queryRow(ctx, query, []any{intArray(r.Keys), nameArray(r.Keys)}, &made)
		})
		if sqlState(err) != "55P03" || waitedForRow(err) || wait >= longestTry {
			return err
		}
	}
}

// waitForCreators waits until those who create rows of the request have ended. What
// it has created itself then, it takes back.
func waitForCreators(ctx context.Context, t transaction, r dialect.RowRequest, l limits) error {
	create := createLocked(r).text()
	if l.limit > 0 {
		create = limited(l.setting, l.limit, create)
	}
	if _, err := t.exec(ctx, inTurn(savepoint, create, rollback, release)); err != nil {
		return rollBack(ctx, t, err)
	}
	return nil
}

// waitedForRow tells a statement that gave up waiting for another transaction's
// row from one that waited for anything else: only the former has a context,
// "while inserting index tuple (0,1) in relation …".
// See https://www.postgresql.org/docs/current/protocol-error-fields.html.
func waitedForRow(err error) bool {
	var ofPgx *pgconn.PgError
	if errors.As(err, &ofPgx) {
		return ofPgx.Where != ""
	}
	var ofPq interface{ Get(field byte) string }
	return !errors.As(err, &ofPq) || ofPq.Get('W') != ""
}

// createLocked creates and locks the rows.
func createLocked(r dialect.RowRequest) statement {
	rows, args := "VALUES ($1::bigint, $2::text)", []any{r.Keys[0].ID, r.Keys[0].Name}
	if len(r.Keys) > 1 {
		rows = "SELECT k.id, k.name FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS k (id, name, n) ORDER BY k.n"
		args = []any{intArray(r.Keys), nameArray(r.Keys)}
	}
	return statement{"INSERT INTO " + tableName(r.Table) + " AS t (id, name) " + rows +
		" ON CONFLICT (id) DO UPDATE SET fence = t.fence WHERE " + oneSnapshot, args}
}
