package postgres

import (
	"context"
	"fmt"
	"strings"

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
// That takes one round trip, and a second to read fencing numbers. A try fails
// after waiting for a millisecond, the shortest lock_timeout there is, since the
// statement has no NOWAIT. Under REPEATABLE READ and SERIALIZABLE a row that
// changed after the transaction's snapshot is an error of class Serialization.
// What else [DB.AcquireTx] says of errors and contexts is true here too.
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
	if r.Try {
		statement = limited("lock_timeout", "1", statement)
	}
	if err := guarded(ctx, t, statement); err != nil {
		if r.Try && sqlState(err) == "55P03" {
			err = asClass(err, dialect.NotAcquired)
		}
		return nil, err
	}
	if !r.Fence {
		return nil, nil
	}
	numbers, err := t.ints(ctx, "SELECT fence FROM "+tableName(r.Table)+
		" WHERE id = ANY($1::bigint[]) ORDER BY array_position($1::bigint[], id)", intArray(r.Keys))
	return numbers, classify(ctx, err)
}

func lockRows(r dialect.RowRequest) (string, error) {
	first, update := "0", "SET fence = t.fence WHERE false"
	if r.Fence {
		first, update = "1", "SET fence = t.fence + 1"
	}
	rows := make([]string, len(r.Keys))
	for i, k := range r.Keys {
		if k.Mode == dialect.Shared {
			return "", &dialect.Error{Class: dialect.Unsupported, Err: fmt.Errorf("shared row lock of key %s", k.Label),
				Hint: "lock the row exclusively, or use an advisory lock in the transaction, which can be shared"}
		}
		rows[i] = fmt.Sprintf("(%d, %s, %s)", k.ID, literal(k.Name), first)
	}
	return "INSERT INTO " + tableName(r.Table) + " AS t (id, name, fence) VALUES " + strings.Join(rows, ", ") +
		" ON CONFLICT (id) DO UPDATE " + update, nil
}
