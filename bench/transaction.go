//go:build linux

package bench

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// transaction: a transaction with a lock, against the same one without. Both run on
// the only connection of one pool.
func transaction(t *testing.T, d *database, p plan) {
	if d.kind != servers.KindPostgres { // the only one of them whose locks can belong to a transaction
		return
	}
	var pool *pgxpool.Pool // the comparison opens ours first
	comparison{
		name: "lock", what: "transaction with a lock, against the same without",
		target: everywhere(atMost(1.10)),
		ours: func(t testing.TB, d *database) op {
			pool = d.pgxPool(t, 1)
			db, err := postgres.New(t.Context(), pool)
			if err != nil {
				t.Fatal(err)
			}
			locks, err := advisory.New(db)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := locks.Close(); err != nil {
					t.Error(err)
				}
				if err := db.Close(); err != nil {
					t.Error(err)
				}
			})
			key := keys("transaction", 1)[0]
			return func(ctx context.Context, _ int) error {
				return advisory.DoTx(ctx, locks, func(_ context.Context, tx pgx.Tx) error { return work(tx) }, key)
			}
		},
		theirs: func(testing.TB, *database) op {
			return func(ctx context.Context, _ int) error { return pgx.BeginFunc(ctx, pool, work) }
		},
	}.run(t, d, p)
}

// work is the one statement of either transaction.
func work(tx pgx.Tx) error {
	var one int
	return tx.QueryRow(context.Background(), "SELECT 1").Scan(&one)
}
