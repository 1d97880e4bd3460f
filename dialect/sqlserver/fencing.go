package sqlserver

import (
	"context"
	"database/sql"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// connectionOver is true of errors that are not a statement's alone.
func connectionOver(err error) bool { return len(numbers(err)) == 0 || isLost(err) }

// draw is for keys that the caller's transaction has locked: nobody else draws for
// them meanwhile. It needs a connection of the pool besides the transaction's, which
// the DB keeps; [dialect.Capacity] if the pool has none.
func (d *DB) draw(ctx context.Context, t dialect.Table, keys []dialect.Key) (fences []int64, err error) {
	rows := dialect.FenceRows(keys)
	p, err := pack(rows)
	if err != nil {
		return nil, err
	}
	err = d.beside.Use(ctx, func(c *pinned.Conn) error {
		b := &rowBatch{table: t, draw: true}
		if err := b.run(ctx, c, p, ""); err != nil {
			return err
		}
		fences, err = b.finish(ctx, c, c, p, rows)
		return err
	})
	if err != nil {
		// What remains of that connection says nothing about the transaction.
		err = connectError(ctx, err)
		if e, ok := err.(*dialect.Error); ok {
			e.Remains = dialect.RemainsUnknown
		}
		return nil, err
	}
	return fences, nil
}

// guardBatch has locked the guard row. It reads the fence row without leaving a lock,
// which under SERIALIZABLE would keep others from drawing numbers.
const guardBatch = `
SET NOCOUNT ON;
DECLARE @drawn bigint;
SELECT @highest = fence FROM {table} WITH (UPDLOCK, HOLDLOCK, ROWLOCK) WHERE id = @guard;
SELECT @drawn = fence FROM {table} WITH (READCOMMITTED) WHERE id = @fence;
IF @drawn > @highest SET @highest = @drawn;
IF @highest < @token
BEGIN
	UPDATE {table} WITH (ROWLOCK) SET fence = @token WHERE id = @guard;
	SET @highest = @token;
END;
`

// Guard locks the key's guard row in the transaction and writes the token there,
// unless that or the key's fence row has a higher one.
func (d *DB) Guard(ctx context.Context, tx dialect.Tx, r dialect.GuardRequest) error {
	guard := dialect.GuardRows(r.Key)
	if _, err := d.LockRows(ctx, tx, dialect.RowRequest{Table: r.Table, Keys: guard}); err != nil {
		return err
	}
	var highest int64
	_, err := tx.ExecContext(ctx, inTable(guardBatch, r.Table), sql.Named("guard", guard[0].ID), sql.Named("token", r.Token),
		sql.Named("fence", dialect.FenceRows([]dialect.Key{r.Key})[0].ID), out("highest", &highest))
	switch {
	case err != nil:
		return classify(ctx, err)
	case highest > r.Token:
		return dialect.Overtaken(r)
	}
	return nil
}
