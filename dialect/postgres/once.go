package postgres

import (
	"cmp"
	"context"
	"slices"

	"github.com/dblock-go/dblock/dialect"
)

// MarkRows inserts the rows that are not there, in one round trip. It waits for
// transactions that have inserted one of them, and inserts it if they roll back. Where
// one was committed after the snapshot of a REPEATABLE READ or SERIALIZABLE transaction
// the error has class Serialization:
// https://www.postgresql.org/docs/current/transaction-iso.html#XACT-REPEATABLE-READ.
//
// It has no savepoint: after an error of the server the transaction accepts only a
// rollback. A row that is there already is neither locked nor written.
func (d *DB) MarkRows(ctx context.Context, tx dialect.Tx, r dialect.MarkRequest) ([]bool, error) {
	if len(r.Keys) == 0 {
		return nil, errNoKeys
	}
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return nil, err
	}
	if err := t.open(ctx); err != nil {
		return nil, err
	}
	const keys = "unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS k (id, name, n)"
	table := tableName(r.Table)
	marked, err := t.ints(ctx, `INSERT INTO `+table+` (id, name, fence) SELECT k.id, k.name, `+clock+` FROM `+keys+` ORDER BY k.n
		ON CONFLICT (id) DO NOTHING RETURNING id`, intArray(r.Keys), nameArray(r.Keys))
	if err != nil {
		return nil, cmp.Or(unguarded(ctx, err), classify(ctx, err))
	}
	first := make([]bool, len(r.Keys))
	for i, key := range r.Keys {
		first[i] = slices.Contains(marked, key.ID)
	}
	if len(marked) == len(r.Keys) {
		return first, nil
	}
	others, err := t.ints(ctx, `SELECT k.n - 1 FROM `+table+` AS t JOIN `+keys+` ON k.id = t.id AND k.name <> t.name`,
		intArray(r.Keys), nameArray(r.Keys))
	switch {
	case err != nil:
		return nil, classify(ctx, err)
	case len(others) > 0:
		return nil, dialect.Collides(r.Keys[others[0]])
	}
	return first, nil
}
