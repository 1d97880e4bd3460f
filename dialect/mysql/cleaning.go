package mysql

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// markedFor is how long a row stays marked before it is deleted: longer than a process
// goes on to lock a row that it has seen, with room for one that pauses in between.
const markedFor = 2 * knownFor

// CleanRows deletes no row that somebody could be about to lock: under REPEATABLE READ
// a transaction that misses the row which it waited for keeps the gap locked where the
// row was, and several of those deadlock when they create it again. So it marks the
// rows that are not in use first, with a negative fence, which is when, and deletes
// rows that have kept their mark for two minutes. Who uses a row looks at it at least
// once a minute, and takes the mark away.
// https://dev.mysql.com/doc/refman/en/innodb-locking.html#innodb-gap-locks
func (db *DB) CleanRows(ctx context.Context, r dialect.CleanRequest) (dialect.Cleaned, error) {
	c := cleaner{table: db.quoted(r.Table),
		stale:  fmt.Sprintf("fence >= 0 AND fence < %s - %d", clock, r.Age.Microseconds()),
		marked: fmt.Sprintf("fence < 0 AND fence > %d - %s", markedFor.Microseconds(), clock)}
	cleaned := dialect.Cleaned{Last: r.From}
	err := db.besides(ctx, func(conn *sql.Conn) error {
		ids, err := queryInts(ctx, conn, fmt.Sprintf("SELECT id FROM %s WHERE id >= %d ORDER BY id LIMIT %d", c.table, r.From, r.Rows))
		if err != nil || len(ids) == 0 {
			return err
		}
		cleaned.Last, cleaned.More = ids[len(ids)-1], len(ids) == r.Rows
		if cleaned.Deleted, err = c.each(ctx, conn, ids, c.marked, "DELETE FROM "+c.table); err != nil {
			return err
		}
		_, err = c.each(ctx, conn, ids, c.stale, "UPDATE "+c.table+" SET fence = -"+clock)
		return err
	})
	return cleaned, db.tableFailure(ctx, r.Table, err)
}

type cleaner struct{ table, stale, marked string }

// each changes those of the rows that fulfil the condition and that nobody has locked,
// one row per statement: for several the optimizer may prefer to scan the table, and
// waits for all that it reads.
func (c cleaner) each(ctx context.Context, conn *sql.Conn, ids []int64, condition, change string) (n int64, err error) {
	queries := make([]string, len(ids))
	for i, id := range ids {
		queries[i] = fmt.Sprintf("SELECT id FROM %s WHERE id = %d AND %s", c.table, id, condition)
	}
	ids, err = queryInts(ctx, conn, strings.Join(queries, " UNION ALL "))
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	// Where the level is higher, a row that does not fulfil the condition stays locked.
	tx, err := conn.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return 0, err
	}
	defer tx.Rollback() // after Commit it does nothing
	for _, id := range ids {
		free, err := queryInts(ctx, tx, fmt.Sprintf("SELECT id FROM %s WHERE id = %d AND %s FOR UPDATE SKIP LOCKED", c.table, id, condition))
		if err != nil {
			return 0, err
		}
		if len(free) == 0 {
			continue
		}
		if _, err := tx.ExecContext(ctx, fmt.Sprintf("%s WHERE id = %d", change, id)); err != nil {
			return 0, err
		}
		n++
	}
	return n, tx.Commit()
}
