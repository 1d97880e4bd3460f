package conformance

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

func userRowsExclude(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows := d.stock(t, rowlock.RowsOptions{}, 2)
	ctx := testContext(t)
	for _, strength := range []rowlock.Strength{rowlock.ForNoKeyUpdate, rowlock.ForUpdate} {
		rows := rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: `the "stock`, Key: []string{"order", "Article]`"}, Strength: strength})
		holder := d.Begin(t, nil)
		if err := rows.Lock(ctx, holder, rowlock.PK(1, "a"), rowlock.PK(0, "b")); err != nil {
			t.Fatal(err)
		}
		if err := rows.Lock(ctx, holder, rowlock.PK(1, "a")); err != nil {
			t.Fatalf("again in the same transaction: %v", err)
		}
		granted := make(chan error, 1)
		waiter := d.Begin(t, nil)
		go func() { granted <- rows.Lock(ctx, waiter, rowlock.PK(0, "b"), rowlock.PK(1, "b")) }()
		d.awaitBlocked(t, 1)
		commit(t, holder)
		if err := <-granted; err != nil {
			t.Errorf("after the holder's end: %v", err)
		}
		rollback(t, waiter)
	}
	for _, key := range []rowlock.PrimaryKey{rowlock.PK(1, "a"), rowlock.PK(0, "b"), rowlock.PK(1, "b")} {
		if err := d.inTx(ctx, d.DB, func(tx dblock.Tx) error { return rows.TryLock(ctx, tx, key) }); err != nil {
			t.Errorf("%v is still locked: %v", key, err)
		}
	}
}

func userRowsShared(t *testing.T, h *Harness) {
	d := h.Database(t)
	exclusive := d.stock(t, rowlock.RowsOptions{}, 1)
	shared := rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: `the "stock`, Key: []string{"order", "Article]`"}, Strength: rowlock.ForShare})
	ctx := testContext(t)
	one, another, third := d.Begin(t, nil), d.Begin(t, nil), d.Begin(t, nil)
	defer rollback(t, third)
	for _, tx := range []dialect.OwnedTx{one, another} {
		if err := shared.TryLock(ctx, tx, rowlock.PK(0, "a"), rowlock.PK(0, "b")); err != nil {
			t.Fatalf("shared: %v", err)
		}
	}
	rollback(t, one)
	if err := exclusive.TryLock(ctx, third, rowlock.PK(0, "b")); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("an exclusive lock beside a shared one: %v", err)
	}
	rollback(t, another)
	if err := exclusive.TryLock(ctx, third, rowlock.PK(0, "b")); err != nil {
		t.Errorf("after the end of both: %v", err)
	}
}

// InnoDB can lock all that it reads, and the gaps between; PostgreSQL can lock what it
// does not return.
func userRowsExact(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows := d.stock(t, rowlock.RowsOptions{}, 1)
	ctx := testContext(t)
	for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead} {
		tx, other := d.Begin(t, &sql.TxOptions{Isolation: isolation}), d.Begin(t, nil)
		if err := rows.Lock(ctx, tx, rowlock.PK(0, "e"), rowlock.PK(0, "a"), rowlock.PK(0, "d"), rowlock.PK(0, "b")); err != nil {
			t.Fatal(err)
		}
		if err := rows.TryLock(ctx, other, rowlock.PK(0, "c")); err != nil {
			t.Errorf("%v: a row that was not named: %v", isolation, err)
		}
		mustExec(t, other, `INSERT INTO `+d.escaped(`the "stock`)+` VALUES (0, 'bb', 0), (0, 'zz', 0)`) // into the gaps
		rollback(t, tx)
		rollback(t, other)
	}
}

func userRowsMissing(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows := d.stock(t, rowlock.RowsOptions{}, 1)
	ctx := testContext(t)
	tx := d.Begin(t, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	defer rollback(t, tx)
	for name, lock := range map[string]func(...rowlock.PrimaryKey) error{
		"lock":   func(keys ...rowlock.PrimaryKey) error { return rows.Lock(ctx, tx, keys...) },
		"try":    func(keys ...rowlock.PrimaryKey) error { return rows.TryLock(ctx, tx, keys...) },
		"within": func(keys ...rowlock.PrimaryKey) error { return rows.LockWithin(ctx, tx, time.Second, keys...) },
	} {
		for _, keys := range [][]rowlock.PrimaryKey{
			{rowlock.PK(7, "nobody")},
			{rowlock.PK(0, "b"), rowlock.PK(7, "nobody"), rowlock.PK(0, "a")},
		} {
			err := lock(keys...)
			if !errors.Is(err, dblock.ErrNotFound) || !strings.Contains(err.Error(), `order = 7, Article]`+"`"+` = "nobody"`) {
				t.Errorf("%s: %v does not name the row that is missing", name, err)
			} else if strings.Contains(err.Error(), `= "b"`) {
				t.Errorf("%s: %v names a row that exists", name, err)
			}
		}
		if err := lock(rowlock.PK(0, "a")); err != nil {
			t.Errorf("%s: afterwards: %v", name, err)
		}
	}
}

func userRowsTryRefused(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows := d.stock(t, rowlock.RowsOptions{}, 1)
	ctx := testContext(t)
	holder, tx := d.Begin(t, nil), d.Begin(t, nil)
	defer rollback(t, holder)
	defer rollback(t, tx)
	if err := rows.Lock(ctx, holder, rowlock.PK(0, "c")); err != nil {
		t.Fatal(err)
	}
	if err := rows.TryLock(ctx, tx, rowlock.PK(0, "a")); err != nil {
		t.Fatal(err)
	}
	err := rows.TryLock(ctx, tx, rowlock.PK(0, "c"))
	if !errors.Is(err, dblock.ErrNotAcquired) || deadlock.Remains(d.DB, err) != dialect.RemainsUsable {
		t.Errorf("a locked row: %v", err)
	}
	if err := rows.TryLock(ctx, tx, rowlock.PK(0, "b"), rowlock.PK(0, "c")); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("a locked row of two: %v", err)
	}
	if err := rows.TryLock(ctx, tx, rowlock.PK(0, "d")); err != nil {
		t.Errorf("after a refused try: %v", err)
	}
	if err := rows.TryLock(ctx, holder, rowlock.PK(0, "a")); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("the lock of before the refused try was not kept: %v", err)
	}
}

func userRowsWithin(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows := d.stock(t, rowlock.RowsOptions{}, 1)
	ctx := testContext(t)
	holder, tx := d.Begin(t, nil), d.Begin(t, nil)
	defer rollback(t, holder)
	defer rollback(t, tx)
	if err := rows.Lock(ctx, holder, rowlock.PK(0, "c"), rowlock.PK(0, "d")); err != nil {
		t.Fatal(err)
	}
	if err := rows.LockWithin(ctx, tx, time.Minute, rowlock.PK(0, "a")); err != nil {
		t.Fatal(err)
	}
	const limit = 300 * time.Millisecond
	for _, keys := range [][]rowlock.PrimaryKey{{rowlock.PK(0, "c")}, {rowlock.PK(0, "d"), rowlock.PK(0, "b"), rowlock.PK(0, "c")}} {
		start := time.Now()
		err := rows.LockWithin(ctx, tx, limit, keys...)
		took := time.Since(start)
		if !errors.Is(err, dblock.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v: %v, want %v", keys, err, dblock.ErrTimeout)
		}
		if len(keys) == 1 && deadlock.Remains(d.DB, err) != dialect.RemainsUsable {
			t.Errorf("%v does not say that the transaction goes on", err)
		}
		if took < limit || took > 10*limit {
			t.Errorf("%v: waited %v, limit %v", keys, took, limit)
		}
	}
	if err := rows.TryLock(ctx, holder, rowlock.PK(0, "a")); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("the lock of before the wait was not kept: %v", err)
	}
	mustExec(t, tx, `UPDATE `+d.escaped(`the "stock`)+` SET n = 1 WHERE `+d.escaped("order")+` = 0 AND `+d.escaped("Article]`")+` = 'a'`)
	granted := make(chan error, 1)
	go func() { granted <- rows.LockWithin(ctx, tx, 30*time.Second, rowlock.PK(0, "c")) }()
	d.awaitBlocked(t, 1)
	rollback(t, holder)
	if err := <-granted; err != nil {
		t.Errorf("a wait that ended in time: %v", err)
	}
	commit(t, tx)
	if n := d.number(t, `SELECT sum(n) FROM `+d.escaped(`the "stock`)); n != 1 {
		t.Errorf("what the transaction wrote is lost: %d", n)
	}
}

// The holder ends at about the moment at which the waiter's limit does. Whatever the
// waiter is told is then true.
func userRowsCrossing(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows := d.stock(t, rowlock.RowsOptions{}, 1)
	ctx := testContext(t)
	const limit = 15 * time.Millisecond
	key := rowlock.PK(0, "c")
	for round := range 60 {
		holder, tx, other := d.Begin(t, nil), d.Begin(t, nil), d.Begin(t, nil)
		if err := rows.TryLock(ctx, holder, key); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		time.AfterFunc(limit+time.Duration(round%40-15)*100*time.Microsecond, func() {
			defer close(ended)
			_ = holder.Rollback(ctx)
		})
		err := rows.LockWithin(ctx, tx, limit, key)
		<-ended
		free := rows.TryLock(ctx, other, key)
		switch {
		case err == nil && !errors.Is(free, dblock.ErrNotAcquired):
			t.Errorf("granted, but another one got: %v", free)
		case err != nil && !errors.Is(err, dblock.ErrTimeout):
			t.Errorf("%v, want %v", err, dblock.ErrTimeout)
		case err != nil && deadlock.Remains(d.DB, err) == dialect.RemainsUsable && free != nil:
			t.Errorf("%v, but another one got: %v", err, free)
		}
		rollback(t, tx)
		rollback(t, other)
	}
}

func userRowsCancelled(t *testing.T, h *Harness) {
	d := h.Database(t)
	rows := d.stock(t, rowlock.RowsOptions{}, 1)
	holder, tx := d.Begin(t, nil), d.Begin(t, nil)
	if err := rows.Lock(testContext(t), holder, rowlock.PK(0, "c")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	result := make(chan error, 1)
	go func() { result <- rows.Lock(ctx, tx, rowlock.PK(0, "a"), rowlock.PK(0, "c")) }()
	d.awaitBlocked(t, 1)
	cancel()
	if err := <-result; !errors.Is(err, dblock.ErrCanceled) {
		t.Errorf("%v, want %v", err, dblock.ErrCanceled)
	}
	d.awaitBlocked(t, 0) // on the server too, and while the holder goes on
	_ = tx.Rollback(context.Background())
	if err := rows.TryLock(testContext(t), holder, rowlock.PK(0, "a")); err != nil {
		t.Errorf("after the rollback: %v", err)
	}
	rollback(t, holder)
}
