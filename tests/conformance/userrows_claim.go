package conformance

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

func claimsInOrder(t *testing.T, h *Harness) {
	d := h.Database(t)
	jobs := d.jobs(t, 20)
	ctx := testContext(t)
	d.exec(t, `UPDATE jobs SET state = 'done' WHERE id IN (3, 18)`)
	byDue := rowlock.ClaimOptions{Limit: 5, Where: "state = 'new' AND due <= " + placeholder[d.DB.Name()] + " -- and no more", Args: []any{10},
		OrderBy: []rowlock.Order{{Column: "due"}}} // so that rows 10 to 19 may be taken, the last first
	first, second, third := d.Begin(t, nil), d.Begin(t, nil), d.Begin(t, nil)
	defer rollback(t, first)
	defer rollback(t, third)
	claim := func(tx dblock.Tx, o rowlock.ClaimOptions, want ...int) {
		t.Helper()
		keys, err := jobs.Claim(ctx, tx, o)
		if got := ids(t, keys); err != nil || !slices.Equal(got, want) {
			t.Errorf("claimed %v, %v; want %v", got, err, want)
		}
	}
	claim(first, byDue, 19, 17, 16, 15, 14)
	claim(second, byDue, 13, 12, 11, 10)
	claim(third, byDue)
	rollback(t, second)
	claim(third, byDue, 13, 12, 11, 10)
	claim(third, rowlock.ClaimOptions{}, 0)
	claim(third, rowlock.ClaimOptions{Limit: 3, Where: "id < 9", OrderBy: []rowlock.Order{{Column: "state"}, {Column: "id", Descending: true}}}, 3, 8, 7)
}

// Of what one transaction claims, others miss nothing more.
func claimsExact(t *testing.T, h *Harness) {
	d := h.Database(t)
	jobs := d.jobs(t, 50)
	ctx := testContext(t)
	for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead} {
		claimed := map[int]bool{}
		var open []dialect.OwnedTx
		for _, o := range []rowlock.ClaimOptions{
			{Limit: 1},
			{Limit: 7, Where: "due > 10", OrderBy: []rowlock.Order{{Column: "due", Descending: true}}},
			{Limit: 12, Where: "state = 'new'", OrderBy: []rowlock.Order{{Column: "state"}}},
			{Limit: 100},
		} {
			tx := d.Begin(t, &sql.TxOptions{Isolation: isolation})
			open = append(open, tx)
			keys, err := jobs.Claim(ctx, tx, o)
			if want := min(o.Limit, 50-len(claimed)); err != nil || len(keys) != want {
				t.Errorf("%v: claimed %d rows of %d that are free, %v; want %d", isolation, len(keys), 50-len(claimed), err, want)
			}
			for _, id := range ids(t, keys) {
				if claimed[id] {
					t.Errorf("row %d was claimed twice", id)
				}
				claimed[id] = true
			}
		}
		if isolation == sql.LevelReadCommitted { // nobody waits to add rows
			d.exec(t, `INSERT INTO jobs VALUES (1000, 'new', 0)`, `DELETE FROM jobs WHERE id = 1000`)
		}
		for _, tx := range open {
			rollback(t, tx)
		}
	}
}

// Workers do each job and mark it done; some are killed between the claim and the
// commit. No job is left, and none is done twice.
func claimsOnce(t *testing.T, h *Harness) {
	const jobs, workers = 300, 8
	d := h.Database(t)
	d.jobs(t, jobs)
	d.exec(t, `CREATE TABLE done (id INT NOT NULL, worker INT NOT NULL)`)
	ctx := testContext(t)
	var all sync.WaitGroup
	for worker := range workers {
		db := d.Open(t)
		rows := rowlock.NewRows(db, rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}})
		work := func(victim bool) (claimed int, err error) {
			tx, err := db.Begin(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
			if err != nil {
				return 0, err
			}
			defer tx.Rollback(context.Background())
			keys, err := rows.Claim(ctx, tx, rowlock.ClaimOptions{Limit: 1 + rand.IntN(10), Where: "state = 'new'"})
			if err != nil {
				return 0, err
			}
			for i, id := range ids(t, keys) {
				if victim && i == len(keys)/2 {
					d.kill(t, d.sessionOf(t, tx))
				}
				for _, statement := range []string{`INSERT INTO done VALUES (%[1]d, %[2]d)`, `UPDATE jobs SET state = 'done' WHERE id = %[1]d`} {
					if err := execute(ctx, tx, fmt.Sprintf(statement+" /* worker %[2]d */", id, worker)); err != nil {
						return len(keys), err
					}
				}
			}
			return len(keys), tx.Commit(ctx)
		}
		all.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				victim := worker%2 == 0 && round%4 == 1
				claimed, err := work(victim)
				switch {
				case err != nil && !victim:
					t.Errorf("worker %d: %v", worker, err)
					return
				case err == nil && claimed == 0:
					return
				}
			}
		})
	}
	all.Wait()
	// What the killed held was skipped by those who looked meanwhile.
	last := rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}})
	eventually(t, "no transaction is open", func() bool { return d.number(t, openTransactions[d.DB.Name()]) == 0 })
	err := d.inTx(ctx, d.DB, func(tx dblock.Tx) error {
		keys, err := last.Claim(ctx, tx, rowlock.ClaimOptions{Limit: jobs, Where: "state = 'new'"})
		for _, id := range ids(t, keys) {
			mustExec(t, tx, fmt.Sprintf(`INSERT INTO done VALUES (%d, -1)`, id))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	total, distinct := d.number(t, `SELECT count(*) FROM done`), d.number(t, `SELECT count(DISTINCT id) FROM done`)
	if total != jobs || distinct != jobs {
		t.Errorf("%d jobs were done %d times, want each of %d once", distinct, total, jobs)
	}
}
