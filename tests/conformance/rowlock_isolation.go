package conformance

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// The documented pattern is to let InTx take the lock first and to read afterwards, at
// every level. 1 is added 100 times to what was read.
func rowsNoStaleRead(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, crowd)
	d.exec(t, `CREATE TABLE counters (id INT PRIMARY KEY, n INT NOT NULL)`)
	levels := []sql.IsolationLevel{sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
	if db.Name() == "sqlserver" {
		d.exec(t, `ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION ON`)
		levels = append(levels, sql.LevelSnapshot)
	}
	for i, isolation := range levels {
		t.Run(isolation.String(), func(t *testing.T) {
			ctx := testContext(t)
			d.exec(t, fmt.Sprintf(`INSERT INTO counters VALUES (%d, 0)`, i))
			// PostgreSQL notices a stale read when the transaction writes, so that it starts
			// again, which costs attempts where many wait.
			rows := rowlock.New(db, &rowlock.Options{Isolation: isolation, Retry: &deadlock.RetryOptions{Attempts: 100}})
			key := dblock.NewKey("counter", isolation.String())
			const goroutines, each = 10, 10
			var all sync.WaitGroup
			for range goroutines {
				all.Go(func() {
					for range each {
						err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
							n, err := readInt(ctx, tx, fmt.Sprintf(`SELECT n FROM counters WHERE id = %d`, i))
							if err != nil {
								return err
							}
							return execute(ctx, tx, fmt.Sprintf(`UPDATE counters SET n = %d WHERE id = %d`, n+1, i))
						}, key)
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			if n := d.number(t, fmt.Sprintf(`SELECT n FROM counters WHERE id = %d`, i)); n != goroutines*each {
				t.Errorf("the counter is %d, want %d: a read was stale", n, goroutines*each)
			}
		})
	}
}

// As before, but what was read decides about a row of its own, which no database
// refuses to insert: the numbers go up by one. SQL Server's SNAPSHOT promises no more
// than to refuse what it would overwrite.
func rowsNoStaleReadBeforeInsert(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, crowd)
	d.exec(t, `CREATE TABLE entries (level INT NOT NULL, n INT NOT NULL)`)
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		if isolation == sql.LevelSnapshot {
			t.Skip("SNAPSHOT of SQL Server refuses no more than to overwrite what is newer")
		}
		ctx := testContext(t)
		key := dblock.NewKey("entries", isolation.String())
		const goroutines, each = 10, 10
		var all sync.WaitGroup
		rows := rowlock.New(db, &rowlock.Options{Isolation: isolation, Retry: &deadlock.RetryOptions{Attempts: 100}})
		for range goroutines {
			all.Go(func() {
				for range each {
					err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
						n, err := readInt(ctx, tx, fmt.Sprintf(`SELECT count(*) FROM entries WHERE level = %d`, isolation))
						if err != nil {
							return err
						}
						return execute(ctx, tx, fmt.Sprintf(`INSERT INTO entries VALUES (%d, %d)`, isolation, n))
					}, key)
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		if n := d.number(t, fmt.Sprintf(`SELECT count(DISTINCT n) FROM entries WHERE level = %d`, isolation)); n != goroutines*each {
			t.Errorf("%d of %d numbers: a read was stale", n, goroutines*each)
		}
	})
}

// readInt reads in the transaction, with the driver's own means.
func readInt(ctx context.Context, tx dblock.Tx, query string) (n int, err error) {
	var native any = tx
	if owned, ok := tx.(dialect.OwnedTx); ok {
		native = owned.Native()
	}
	switch tx := native.(type) {
	case *sql.Tx:
		err = tx.QueryRowContext(ctx, query).Scan(&n)
	case pgx.Tx:
		err = tx.QueryRow(ctx, query).Scan(&n)
	default:
		err = fmt.Errorf("do not know how to read with a %T", tx)
	}
	return n, err
}
