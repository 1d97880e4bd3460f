package mysql

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/dblock-go/dblock/dialect"
)

// clock is the server's, in microseconds since 1970. UNIX_TIMESTAMP(NOW()) would be
// that of the session's time zone, which can go back by an hour.
const clock = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"

// drawNumber is the statement that draws a number for the key of a fence row, if the
// condition holds; see [dialect.FenceStride]. The number reaches the client with the
// result of the statement:
// https://dev.mysql.com/doc/refman/en/information-functions.html#function_last-insert-id
func drawNumber(table string, key dialect.Key, condition string) string {
	return fmt.Sprintf("INSERT INTO %s (id, name, fence) SELECT %d, X'%X', LAST_INSERT_ID(%s) FROM DUAL WHERE %s"+
		" ON DUPLICATE KEY UPDATE fence = LAST_INSERT_ID(GREATEST(fence + %d, %[4]s))",
		table, key.ID, key.Name, clock, condition, dialect.FenceStride)
}

// fence draws numbers for each key, in a transaction per key, so that sessions
// cannot deadlock over the rows. The statement itself sees to it that no other
// connection draws any.
func (s *session) fence(ctx context.Context, t dialect.Table, keys []dialect.Key) ([]int64, error) {
	fences := make([]int64, len(keys))
	for i, key := range dialect.FenceRows(keys) {
		result, err := s.conn.ExecContext(ctx, drawNumber(s.db.quoted(t), key, fmt.Sprintf("CONNECTION_ID() = %d", s.thread.id)))
		if err != nil {
			return nil, s.failed(ctx, s.db.tableFailure(ctx, t, err))
		}
		written, err := result.RowsAffected()
		if err != nil {
			return nil, s.failure(ctx, err)
		}
		if written == 0 {
			return nil, s.another("another connection")
		}
		if fences[i], err = result.LastInsertId(); err != nil {
			return nil, s.failure(ctx, err)
		}
	}
	return fences, nil
}

// draw is for keys that the caller's transaction has locked: nobody else draws for
// them meanwhile.
func (db *DB) draw(ctx context.Context, t dialect.Table, keys []dialect.Key) ([]int64, error) {
	fences := make([]int64, len(keys))
	err := db.besides(ctx, func(conn *sql.Conn) error {
		for i, key := range dialect.FenceRows(keys) {
			result, err := conn.ExecContext(ctx, drawNumber(db.quoted(t), key, "TRUE"))
			if err != nil {
				return err
			}
			if fences[i], err = result.LastInsertId(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		// What remains of the second connection says nothing about the transaction.
		err = db.tableFailure(ctx, t, err)
		if dialect.ClassOf(err) == dialect.Lost {
			err = db.connectFailure(ctx, err)
		}
		return nil, remains(err, dialect.RemainsUnknown)
	}
	return fences, nil
}

// besides calls with a second connection whose statements commit by themselves.
func (db *DB) besides(ctx context.Context, call func(conn *sql.Conn) error) error {
	conn, done, err := db.side.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	return committing(ctx, conn, func() error { return call(conn) })
}

// Guard locks the key's guard row in the transaction and writes the token there. The
// key's fence row it reads on a second connection: in the transaction that would open
// its read view, and under SERIALIZABLE keep others from drawing numbers.
func (db *DB) Guard(ctx context.Context, tx dialect.Tx, r dialect.GuardRequest) error {
	guard := dialect.GuardRows(r.Key)
	if _, err := db.LockRows(ctx, tx, dialect.RowRequest{Table: r.Table, Keys: guard}); err != nil {
		return err
	}
	q := tx.(dialect.Querier) // else LockRows has refused it
	table := db.quoted(r.Table)
	var highest, drawn int64
	_, err := queryRow(ctx, q, fmt.Sprintf("SELECT fence FROM %s WHERE id = %d FOR UPDATE", table, guard[0].ID), &highest)
	if err == nil {
		err = db.besides(ctx, func(conn *sql.Conn) error {
			_, err := queryRow(ctx, conn, fmt.Sprintf("SELECT fence FROM %s WHERE id = %d", table, dialect.FenceRows([]dialect.Key{r.Key})[0].ID), &drawn)
			return err
		})
	}
	switch {
	case err != nil:
		return doubtful(db.tableFailure(ctx, r.Table, err))
	case max(highest, drawn) > r.Token:
		return dialect.Overtaken(r)
	case highest == r.Token:
		return nil
	}
	_, err = q.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET fence = %d WHERE id = %d", table, r.Token, guard[0].ID))
	return doubtful(db.tableFailure(ctx, r.Table, err))
}
