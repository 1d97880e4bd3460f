package mysql

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// MarkRows locks the rows as LockRows does, which creates those that are missing, with
// the fence 0, beside the transaction, and writes the time into the fence of those that
// have none. A row that the transaction inserted itself would not do: those who wait for
// it deadlock when it is rolled back, and who finds it committed keeps, under
// REPEATABLE READ, the gap before it locked, where others are about to insert.
// https://dev.mysql.com/doc/refman/en/innodb-locks-set.html
//
// What it goes by are locking reads, which see the newest version at every level
// without opening a read view.
func (db *DB) MarkRows(ctx context.Context, tx dialect.Tx, r dialect.MarkRequest) ([]bool, error) {
	table := db.quoted(r.Table)
	defer db.rows.forget(table, r.Keys...) // a message hardly comes again soon
	if err := db.createMarks(ctx, table, r.Keys); err != nil {
		return nil, remains(db.tableFailure(ctx, r.Table, err), dialect.RemainsUsable)
	}
	if _, err := db.LockRows(ctx, tx, dialect.RowRequest{Table: r.Table, Keys: r.Keys}); err != nil {
		return nil, err
	}
	q := tx.(dialect.Querier) // else LockRows has refused it
	first := make([]bool, 0, len(r.Keys))
	for keys := range slices.Chunk(r.Keys, branches) {
		isFirst, err := markLocked(ctx, q, table, keys)
		if err != nil {
			return nil, doubtful(db.tableFailure(ctx, r.Table, err))
		}
		first = append(first, isFirst...)
	}
	return first, nil
}

// createMarks creates many rows with few commits, since new messages are the rule. Where
// others are about to do the same it leaves the rows to LockRows.
func (db *DB) createMarks(ctx context.Context, table string, keys []dialect.Key) error {
	if len(keys) == 1 {
		return nil
	}
	return db.besides(ctx, func(conn *sql.Conn) error {
		missing, err := missingRows(ctx, conn, table, keys, "TRUE")
		if err != nil {
			return err
		}
		for keys := range slices.Chunk(missing, branches) {
			rows := make([]string, len(keys))
			for i, key := range keys {
				rows[i] = fmt.Sprintf("(%d, X'%X')", key.ID, key.Name)
			}
			_, err := conn.ExecContext(ctx, "INSERT IGNORE INTO "+table+" (id, name) VALUES "+strings.Join(rows, ", "))
			if err != nil && !isBusy(err) && !isNumber(err, errDeadlock) {
				return err
			}
		}
		return nil
	})
}

// markLocked marks rows that are locked.
func markLocked(ctx context.Context, q dialect.Querier, table string, keys []dialect.Key) ([]bool, error) {
	marks, err := marksOf(ctx, q, table, keys)
	if err != nil {
		return nil, err
	}
	first := make([]bool, len(keys))
	var fresh []string
	for i, key := range keys {
		mark, ok := marks[key.ID]
		switch {
		case !ok:
			return nil, dialect.Unseen()
		case mark.name != key.Name:
			return nil, dialect.Collides(key)
		case mark.fence <= 0: // never marked, or so long ago that CleanRows is about to delete it
			first[i] = true
			fresh = append(fresh, fmt.Sprintf("SELECT %d AS id", key.ID))
		}
	}
	if len(fresh) == 0 {
		return first, nil
	}
	// For id IN (…) the optimizer may prefer to scan the table, and locks all that it reads.
	result, err := q.ExecContext(ctx, fmt.Sprintf("UPDATE (%s) AS k STRAIGHT_JOIN %s AS t FORCE INDEX (PRIMARY) ON t.id = k.id SET t.fence = %s",
		strings.Join(fresh, " UNION ALL "), table, clock))
	if err != nil {
		return nil, err
	}
	n, err := result.RowsAffected()
	if err == nil && n != int64(len(fresh)) {
		err = dialect.Unseen()
	}
	return first, err
}

type mark struct {
	fence int64 // when, in microseconds since 1970; not above 0: not marked
	name  string
}

func marksOf(ctx context.Context, q dialect.Querier, table string, keys []dialect.Key) (map[int64]mark, error) {
	queries := make([]string, len(keys))
	for i, key := range keys {
		queries[i] = fmt.Sprintf("(SELECT id, fence, name FROM %s WHERE id = %d FOR UPDATE)", table, key.ID)
	}
	rows, err := q.QueryContext(ctx, strings.Join(queries, " UNION ALL "))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	marks := make(map[int64]mark, len(keys))
	for rows.Next() {
		var id int64
		var m mark
		if err := rows.Scan(&id, &m.fence, &m.name); err != nil {
			return nil, err
		}
		marks[id] = m
	}
	return marks, rows.Err()
}
