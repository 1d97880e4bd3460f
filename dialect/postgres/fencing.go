package postgres

import (
	"cmp"
	"context"
	"strconv"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// clock is the server's, in microseconds since 1970.
const clock = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"

// drawNumbers is the statement that draws a number for each of the keys, whose ids
// and names are parameters, if the condition holds; see [dialect.FenceStride].
// ON CONFLICT sees rows that were committed while the statement waited:
// https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED.
func drawNumbers(t dialect.Table, ids, names, condition string) string {
	return `INSERT INTO ` + tableName(t) + ` AS t (id, name, fence)
	SELECT k.id, k.name, ` + clock + ` FROM unnest(` + ids + `::bigint[], ` + names + `::text[]) WITH ORDINALITY AS k (id, name, n)
	WHERE ` + condition + ` ORDER BY k.n
	ON CONFLICT (id) DO UPDATE SET fence = greatest(t.fence + ` + strconv.Itoa(dialect.FenceStride) + `, ` + clock + `)
	RETURNING id, fence`
}

// drawnNumbers is the list of them, in the order of the keys.
func drawnNumbers(ids string) string {
	return "SELECT string_agg(fence::text, ',' ORDER BY array_position(" + ids + "::bigint[], id)) FROM fenced"
}

// connectBeside opens a connection for what is committed beside the caller's
// transaction. Nothing is set on it: it may lead through a pooler. Where the driver is
// not pgx it is one of the pool's, and counts against its limit.
func (d *DB) connectBeside(ctx context.Context) (conn, error) {
	if d.config == nil {
		d.needsBeside.Store(true)
		return pinnedConn(obtain(ctx, d.pinned.TakeFree, (*pinned.Conn).Destroy))
	}
	c, _, err := d.connect(ctx, dialect.SessionOptions{})
	return c, err
}

// prepareBeside takes that connection out of the pool before a transaction begins, which
// can wait for it, once a call has needed it: transactions may have all others by then.
func (d *DB) prepareBeside(ctx context.Context) {
	if d.needsBeside.Load() {
		d.beside.Prepare(ctx, func(ctx context.Context) (conn, error) { return pinnedConn(d.take(ctx)) })
	}
}

func pinnedConn(c *pinned.Conn, err error) (conn, error) {
	if err != nil {
		return nil, err
	}
	return &sqlConn{Conn: c.Conn, destroy: c.Destroy}, nil
}

// connectionOver is true of errors that are not a statement's alone.
func connectionOver(err error) bool { return sqlState(err) == "" || sessionEnded(err) }

// besideError is connectError, but for what the server says of a statement.
func besideError(ctx context.Context, err error) error {
	if e := classify(ctx, err); sqlState(err) != "" && dialect.ClassOf(e) == "" {
		return e
	}
	return connectError(ctx, err)
}

// draw is for keys that the caller's transaction has locked: nobody else draws for
// them meanwhile. The commit is on disk when it returns: a number that a crash takes
// back would be given twice.
func (d *DB) draw(ctx context.Context, t dialect.Table, keys []dialect.Key) ([]int64, error) {
	query := "WITH fenced AS (" + drawNumbers(t, "$1", "$2", "(SELECT set_config('synchronous_commit', 'on', true)) IS NOT NULL") + ") " + drawnNumbers("$1")
	rows := dialect.FenceRows(keys)
	var numbers string
	draw := func(c conn) error { return c.queryRow(ctx, query, []any{intArray(rows), nameArray(rows)}, &numbers) }
	err := d.beside.Use(ctx, draw)
	for sqlState(err) == "40001" && ctx.Err() == nil { // where default_transaction_isolation is more than READ COMMITTED
		err = d.beside.Use(ctx, draw)
	}
	if err != nil {
		// What remains of the connection beside says nothing about the transaction.
		return nil, withRemains(besideError(ctx, err), dialect.RemainsUnknown)
	}
	return parseInts(numbers)
}

// Guard writes the token into the key's guard row, unless that or the key's fence row
// has a higher one, in one round trip. It has no savepoint: after an error of the
// server, as a Serialization that tells of a later holder's guarded transaction, the
// transaction accepts only a rollback.
func (d *DB) Guard(ctx context.Context, tx dialect.Tx, r dialect.GuardRequest) error {
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return err
	}
	table := tableName(r.Table)
	write := statement{`INSERT INTO ` + table + ` AS t (id, name, fence)
		SELECT $1::bigint, $2::text, $3::bigint WHERE NOT EXISTS (SELECT FROM ` + table + ` WHERE id = $4::bigint AND fence > $3::bigint)
		ON CONFLICT (id) DO UPDATE SET fence = excluded.fence WHERE t.fence <= excluded.fence`,
		[]any{dialect.GuardRows(r.Key)[0].ID, r.Key.Name, r.Token, dialect.FenceRows([]dialect.Key{r.Key})[0].ID}}
	// The savepoint only proves that there is a transaction.
	n, err := t.exec(ctx, inTurn(savepoint, release, write.text()))
	if err != nil {
		return cmp.Or(unguarded(ctx, err), classify(ctx, err))
	}
	if n == 0 {
		return dialect.Overtaken(r)
	}
	return nil
}
