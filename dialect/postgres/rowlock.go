package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dblock-go/dblock/dialect"
)

// LockRows creates and locks the rows in one statement, which goes through the
// keys in their order. ON CONFLICT DO UPDATE locks a row that exists even where
// its condition keeps it from being written
// (https://www.postgresql.org/docs/current/sql-insert.html#SQL-ON-CONFLICT), waits
// for whoever is creating it, and so leaves no gap between looking and locking
// in which first users of a key could deadlock. The lock is that of SELECT … FOR
// NO KEY UPDATE.
//
// That takes one round trip, and a second to read fencing numbers. Through pgx, one
// row that exists and is free is locked by a plain statement instead, and only the
// others cost a savepoint and one round trip more; there a missing table, for one,
// aborts the transaction. A try needs
// one more where a row is missing: it locks the rows with NOWAIT if all exist,
// and otherwise creates them under a lock_timeout, since INSERT has no NOWAIT.
// Under REPEATABLE READ and SERIALIZABLE a row that changed after the
// transaction's snapshot is an error of class Serialization. What else
// [DB.AcquireTx] says of errors and contexts is true here too.
func (d *DB) LockRows(ctx context.Context, tx dialect.Tx, r dialect.RowRequest) ([]int64, error) {
	if len(r.Keys) == 0 {
		return nil, errNoKeys
	}
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return nil, err
	}
	statement, err := lockRows(r)
	if err != nil {
		return nil, err
	}
	if len(r.Keys) == 1 && !r.Fence {
		n, _, err := t.free(ctx, freeRow(r))
		if err != nil || n == 1 {
			return nil, err
		}
	}
	if r.Try {
		err = tryRows(ctx, t, r, statement)
	} else {
		err = guarded(ctx, t, statement)
	}
	if err != nil || !r.Fence {
		return nil, err
	}
	numbers, err := t.ints(ctx, "SELECT fence FROM "+tableName(r.Table)+
		" WHERE id = ANY($1::bigint[]) ORDER BY array_position($1::bigint[], id)", intArray(r.Keys))
	return numbers, classify(ctx, err)
}

// BeginRows begins with the statement that creates and locks the rows, in one round
// trip through a pgx pool.
func (d *DB) BeginRows(ctx context.Context, o *sql.TxOptions, t dialect.Table, keys []dialect.Key) (dialect.OwnedTx, error) {
	if len(keys) == 0 {
		return nil, errNoKeys
	}
	lock, err := lockRows(dialect.RowRequest{Table: t, Keys: keys})
	if err != nil {
		return nil, err
	}
	tx, _, err := d.beginWith(ctx, o, lock)
	return tx, err
}

// freeRow locks the row if it exists and nobody has it.
func freeRow(r dialect.RowRequest) statement {
	return statement{"SELECT FROM " + tableName(r.Table) + " WHERE id = $1::bigint FOR NO KEY UPDATE SKIP LOCKED", []any{r.Keys[0].ID}}
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
		locked, err := tryExisting(ctx, t, r)
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

// tryExisting locks the rows if all of them exist, and none otherwise.
func tryExisting(ctx context.Context, t transaction, r dialect.RowRequest) (bool, error) {
	ids := make([]string, len(r.Keys))
	for i, k := range r.Keys {
		ids[i] = strconv.FormatInt(k.ID, 10)
	}
	rows := fmt.Sprintf("%s WHERE id IN (%s)", tableName(r.Table), strings.Join(ids, ", "))
	statement := fmt.Sprintf(`SELECT set_config('dblock.locked', count(*)::text, true) FROM (
	SELECT FROM %[1]s AND (SELECT count(*) FROM %[1]s) = %[2]d ORDER BY id FOR NO KEY UPDATE NOWAIT
) AS locked`, rows, len(ids))
	if r.Fence {
		statement += fmt.Sprintf("; UPDATE %s SET fence = fence + 1 WHERE id IN (%s) AND current_setting('dblock.locked') = '%d'",
			tableName(r.Table), strings.Join(ids, ", "), len(ids))
	}
	n, err := t.exec(ctx, inTurn(savepoint, limited("lock_timeout", tableWait, statement), release,
		"SELECT FROM generate_series(1, current_setting('dblock.locked')::int)"))
	if err != nil {
		return false, rollBack(ctx, t, err)
	}
	return n == int64(len(ids)), nil
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

func lockRows(r dialect.RowRequest) (statement, error) {
	for _, k := range r.Keys {
		if k.Mode == dialect.Shared {
			return statement{}, &dialect.Error{Class: dialect.Unsupported, Err: fmt.Errorf("shared row lock of key %s", k.Label),
				Hint: "lock the row exclusively, or use an advisory lock in the transaction, which can be shared"}
		}
	}
	first, update := "0", "SET fence = t.fence WHERE false"
	if r.Fence {
		first, update = "1", "SET fence = t.fence + 1"
	}
	rows, args := "VALUES ($1::bigint, $2::text, "+first+")", []any{r.Keys[0].ID, r.Keys[0].Name}
	if len(r.Keys) > 1 {
		rows = "SELECT k.id, k.name, " + first + " FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS k (id, name, n) ORDER BY k.n"
		args = []any{intArray(r.Keys), nameArray(r.Keys)}
	}
	return statement{"INSERT INTO " + tableName(r.Table) + " AS t (id, name, fence) " + rows +
		" ON CONFLICT (id) DO UPDATE " + update, args}, nil
}
