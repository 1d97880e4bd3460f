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
			locks := lockerOn(t, pool)
			key := keys("transaction", 1)[0]
			return func(ctx context.Context, _ int) error {
				return advisory.DoTx(ctx, locks, func(_ context.Context, tx pgx.Tx) error { return work(tx) }, key)
			}
		},
		theirs: func(testing.TB, *database) op { return without(pool) },
	}.run(t, d, p)
	comparison{
		name: "bound", what: "what bounds it: a lock in one pgx.Batch with its BEGIN, against the same",
		ours: func(t testing.TB, d *database) op {
			pool = d.pgxPool(t, 1)
			return batched(pool, rawKeys("transaction", 1)[0])
		},
		theirs: func(testing.TB, *database) op { return without(pool) },
	}.run(t, d, p)
	comparison{
		name: "write", what: "transaction with a lock that updates a row, against the same without",
		ours: func(t testing.TB, d *database) op {
			pool = d.pgxPool(t, 1)
			prepareWrite(t, pool)
			locks := lockerOn(t, pool)
			key := keys("transaction", 1)[0]
			return func(ctx context.Context, _ int) error {
				return advisory.DoTx(ctx, locks, func(_ context.Context, tx pgx.Tx) error { return write(tx) }, key)
			}
		},
		theirs: func(testing.TB, *database) op {
			return func(ctx context.Context, _ int) error { return pgx.BeginFunc(ctx, pool, write) }
		},
	}.run(t, d, p)
}

func without(pool *pgxpool.Pool) op {
	return func(ctx context.Context, _ int) error { return pgx.BeginFunc(ctx, pool, work) }
}

// batched is what an application would write by hand.
func batched(pool *pgxpool.Pool, id int64) op {
	return func(ctx context.Context, _ int) error {
		var batch pgx.Batch
		batch.Queue("BEGIN")
		batch.Queue("SELECT pg_advisory_xact_lock($1)", id)
		return pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
			if err := c.SendBatch(ctx, &batch).Close(); err != nil {
				return err
			}
			var one int
			if err := c.QueryRow(ctx, "SELECT 1").Scan(&one); err != nil {
				return err
			}
			_, err := c.Exec(ctx, "COMMIT")
			return err
		})
	}
}

func prepareWrite(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	for _, statement := range []string{"CREATE TABLE IF NOT EXISTS written (id int PRIMARY KEY, n int NOT NULL)",
		"INSERT INTO written VALUES (1, 0) ON CONFLICT DO NOTHING"} {
		if _, err := pool.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
}

func write(tx pgx.Tx) error {
	_, err := tx.Exec(context.Background(), "UPDATE written SET n = n + 1 WHERE id = 1")
	return err
}

func lockerOn(t testing.TB, pool *pgxpool.Pool) *advisory.Locker {
	t.Helper()
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
	return locks
}

// work is the one statement of either transaction.
func work(tx pgx.Tx) error {
	var one int
	return tx.QueryRow(context.Background(), "SELECT 1").Scan(&one)
}
