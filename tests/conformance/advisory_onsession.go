package conformance

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

const insertWork = "INSERT INTO work_done (n) VALUES (1)"

func (d *Database) createWork(t testing.TB) {
	t.Helper()
	if _, err := d.SQL.ExecContext(t.Context(), "CREATE TABLE work_done (n INT NOT NULL)"); err != nil {
		t.Fatal(err)
	}
}

// mustHaveDone says how often the work was committed.
func (d *Database) mustHaveDone(t testing.TB, want int) {
	t.Helper()
	var n int
	if err := d.SQL.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM work_done").Scan(&n); err != nil {
		t.Error(err)
	} else if n != want {
		t.Errorf("the work was done %d times, want %d", n, want)
	}
}

func advisoryInTx(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	key := dblock.NewKey("job")
	l := newLocker(t, d.DB)
	others := newLocker(t, d.Open(t))
	inTx := func(ctx context.Context, fn func(ctx context.Context, tx dblock.Tx) error) error {
		return advisory.InTx(ctx, l, fn, key)
	}
	insert := func(ctx context.Context, tx dblock.Tx) error {
		_, err := tx.ExecContext(ctx, insertWork)
		return err
	}

	var successor sync.WaitGroup
	err := inTx(testContext(t), func(ctx context.Context, tx dblock.Tx) error {
		if holder, session := d.holder(t, key), d.sessionOf(t, tx); holder != session {
			t.Errorf("session %d holds the key, and session %d does the work", holder, session)
		}
		_ = mustBeHeld(t, others, key)
		successor.Go(func() {
			lock, err := others.Lock(testContext(t), key)
			if err != nil {
				t.Error(err)
				return
			}
			d.mustHaveDone(t, 1) // committed before the key was free
			if err := lock.Release(testContext(t)); err != nil {
				t.Error(err)
			}
		})
		d.waiting(t, key, 1)
		return insert(ctx, tx)
	})
	if err != nil {
		t.Errorf("%v", err)
	}
	successor.Wait()

	failure := errors.New("no")
	err = inTx(testContext(t), func(ctx context.Context, tx dblock.Tx) error { return errors.Join(insert(ctx, tx), failure) })
	if !errors.Is(err, failure) || errors.Is(err, dblock.ErrLost) {
		t.Errorf("a function that failed: %v", err)
	}
	mustBeFree(t, others, key)

	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic did not go on")
			}
		}()
		_ = inTx(testContext(t), func(ctx context.Context, tx dblock.Tx) error { panic(insert(ctx, tx)) })
	}()
	mustBeFree(t, others, key)

	ctx, cancel := context.WithCancel(testContext(t))
	err = inTx(ctx, func(ctx context.Context, tx dblock.Tx) error {
		if err := insert(ctx, tx); err != nil {
			return err
		}
		cancel()
		return nil
	})
	if !errors.Is(err, dblock.ErrCanceled) {
		t.Errorf("a context that ended before the commit: %v", err)
	}
	d.mustHaveDone(t, 1)
	d.nothingLeft(t)
}

func advisoryInTxLost(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	key := dblock.NewKey("job")
	l := newLocker(t, d.DB)
	others := newLocker(t, d.Open(t))
	for _, again := range []bool{true, false} {
		err := advisory.InTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error {
			if _, err := tx.ExecContext(ctx, insertWork); err != nil {
				return err
			}
			d.kill(t, d.holder(t, key))
			mustRelease(t, mustLock(t, others, key)) // so the work is gone by now
			if !again {
				return nil // and the commit finds out
			}
			_, err := tx.ExecContext(ctx, insertWork)
			if err == nil {
				t.Error("a statement succeeded without the lock")
			}
			return err
		}, key)
		if !errors.Is(err, dblock.ErrLost) {
			t.Errorf("statement after the loss: %t: %v", again, err)
		}
		t.Log(err)
		d.mustHaveDone(t, 0)
	}
	d.nothingLeft(t)
}

// sleep runs for some seconds.
var sleep = map[string]string{
	"postgres":  "SELECT pg_sleep(20)",
	"mysql":     "DO SLEEP(20)",
	"mariadb":   "DO SLEEP(20)",
	"sqlserver": "WAITFOR DELAY '00:00:20'",
}

// The driver closes the connection then; nobody else ended the session.
func advisoryInTxCancelled(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	key := dblock.NewKey("job")
	var lost atomic.Bool
	l := newLocker(t, d.DB, &advisory.Options{Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		if e.Kind == dblock.EventLost {
			lost.Store(true)
		}
	})})
	for what, call := range map[string]func(ctx context.Context, fn func(ctx context.Context, on dblock.Tx) error) error{
		"InTx": func(ctx context.Context, fn func(ctx context.Context, on dblock.Tx) error) error {
			return advisory.InTx(ctx, l, fn, key)
		},
		"OnSession": func(ctx context.Context, fn func(ctx context.Context, on dblock.Tx) error) error {
			return advisory.OnSession(ctx, l, fn, key)
		},
	} {
		ctx, cancel := context.WithCancel(testContext(t))
		err := call(ctx, func(ctx context.Context, on dblock.Tx) error {
			time.AfterFunc(100*time.Millisecond, cancel)
			_, err := on.ExecContext(ctx, sleep[d.DB.Name()])
			return err
		})
		if err == nil || errors.Is(err, dblock.ErrLost) || lost.Load() {
			t.Errorf("%s: %v, heard of a loss: %t", what, err, lost.Load())
		}
	}
	d.nothingLeft(t)
	mustBeFree(t, l, key)
}

func advisoryOnSession(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	key := dblock.NewKey("job")
	l := newLocker(t, d.DB)
	others := newLocker(t, d.Open(t))
	onSession := func(fn func(ctx context.Context, conn dblock.Tx) error) error {
		return advisory.OnSession(testContext(t), l, fn, key)
	}
	err := onSession(func(ctx context.Context, conn dblock.Tx) error {
		_, err := conn.ExecContext(ctx, insertWork)
		return err
	})
	if err != nil {
		t.Errorf("%v", err)
	}
	d.mustHaveDone(t, 1)
	mustBeFree(t, others, key)

	// What fn leaves open is rolled back, and its settings serve nobody else.
	err = onSession(func(ctx context.Context, conn dblock.Tx) error {
		_, err := conn.ExecContext(ctx, "BEGIN "+map[bool]string{true: "TRANSACTION"}[d.DB.Name() == "sqlserver"])
		if err == nil {
			_, err = conn.ExecContext(ctx, insertWork)
		}
		return err
	})
	if err != nil {
		t.Errorf("a transaction left open: %v", err)
	}
	d.nothingLeft(t)
	d.mustHaveDone(t, 1)
	mustBeFree(t, others, key)

	err = onSession(func(ctx context.Context, conn dblock.Tx) error {
		d.kill(t, d.holder(t, key))
		mustRelease(t, mustLock(t, others, key))
		_, err := conn.ExecContext(ctx, insertWork)
		if err == nil {
			t.Error("a statement succeeded without the lock")
		}
		return err
	})
	if !errors.Is(err, dblock.ErrLost) {
		t.Errorf("after the loss: %v", err)
	}
	d.mustHaveDone(t, 1)
	d.nothingLeft(t)
}

// manyRows are more than a driver reads ahead.
const manyRows = "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 100) SELECT a.n FROM s a, s b, s c"

func advisoryOpenRows(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("job")
	l := newLocker(t, d.DB, &advisory.Options{AnswerWithin: time.Second})
	err := advisory.OnSession(testContext(t), l, func(ctx context.Context, conn dblock.Conn) error {
		rows, err := conn.QueryContext(context.Background(), manyRows)
		if err == nil && !rows.Next() {
			err = rows.Err()
		}
		if err == nil {
			t.Cleanup(func() { rows.Close() })
		}
		return err
	}, key)
	switch {
	case errors.Is(err, dblock.ErrUnsupported) && strings.Contains(err.Error(), "*pgx.Conn"): // which closes what it opened
	case d.DB.Name() != "sqlserver" && !errors.Is(err, dblock.ErrLost):
		t.Errorf("%v", err)
	}
	d.nothingLeft(t)
	mustBeFree(t, l, key)
}

// SQL Server ends no idle session.
func advisoryStatementGap(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.createWork(t)
	key := dblock.NewKey("job")
	l := newLocker(t, d.DB, &advisory.Options{StatementGap: time.Second})
	others := newLocker(t, d.Open(t))
	err := advisory.InTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error {
		if _, err := tx.ExecContext(ctx, insertWork); err != nil {
			return err
		}
		if d.DB.Name() != "sqlserver" {
			mustRelease(t, mustLock(t, others, key))
		}
		return nil
	}, key)
	if d.DB.Name() == "sqlserver" {
		if err != nil {
			t.Errorf("%v", err)
		}
		return
	}
	if !errors.Is(err, dblock.ErrLost) {
		t.Errorf("%v", err)
	}
	d.mustHaveDone(t, 0)

	// Pauses that are shorter add up to more.
	err = advisory.InTx(testContext(t), newLocker(t, d.DB, &advisory.Options{StatementGap: 2 * time.Second}), func(ctx context.Context, tx dblock.Tx) error {
		for range 4 {
			<-time.After(700 * time.Millisecond)
			if _, err := tx.ExecContext(ctx, insertWork); err != nil {
				return err
			}
		}
		return nil
	}, key)
	if err != nil {
		t.Errorf("pauses within the gap: %v", err)
	}
	d.mustHaveDone(t, 4)
}
