package conformance

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/rowlock"
)

// grow makes the marks that are committed older.
func (d *Database) grow(t testing.TB, age time.Duration) {
	t.Helper()
	d.exec(t, fmt.Sprintf(`UPDATE once SET fence = fence - %d WHERE fence > 0`, age.Microseconds()))
}

func onceClean(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	once := rowlock.NewOnce(d.DB)
	count := func() int { return d.number(t, `SELECT count(*) FROM once WHERE fence > 0`) }
	mark := func(messages ...dblock.Key) {
		t.Helper()
		tx := d.Begin(t, nil)
		if _, err := once.MarkEach(ctx, tx, messages...); err != nil {
			t.Fatal(err)
		}
		commit(t, tx)
	}
	var old []dblock.Key
	for i := range 25 {
		old = append(old, message("old", i))
	}
	mark(old...)
	d.grow(t, 2*time.Hour)
	mark(message("recent"))
	open := d.Begin(t, nil)
	mustMark(t, once, open, true, message("open"))

	o := &rowlock.CleanOptions{Age: time.Hour, Batch: 10}
	deleted, err := d.clean(ctx, "once", once, o)
	if err != nil || deleted != 25 || count() != 1 {
		t.Errorf("%d deleted, %d left, %v; want 25 and 1", deleted, count(), err)
	}
	// Even if no mark were young enough.
	o.Age = time.Microsecond
	if _, err := d.clean(ctx, "once", once, o); err != nil {
		t.Error(err)
	}
	commit(t, open)
	if count() != 1 {
		t.Errorf("%d marks are left, want that of the transaction that was open", count())
	}
	tx := d.Begin(t, nil)
	mustMark(t, once, tx, false, message("open"))
	for _, m := range []dblock.Key{message("recent"), old[3]} { // gone, so that they are new again
		mustMark(t, once, tx, true, m)
	}
	commit(t, tx)

	// The default is long, and the lock table is somebody else's.
	for _, c := range []cleaner{once, rowlock.New(d.DB)} {
		if deleted, err := c.Clean(ctx); deleted != 0 && c == cleaner(once) || err != nil {
			t.Errorf("%d deleted, %v", deleted, err)
		}
	}
	if count() != 3 {
		t.Errorf("%d marks are left, want 3", count())
	}
	if _, err := once.Clean(ctx, &rowlock.CleanOptions{Age: -1}); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("bad option: %v", err)
	}
}

// Old marks are deleted while the same messages, and others, are marked: nobody hears of
// it, and nothing that is young is forgotten.
func onceCleanBesideDeliveries(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	dbs := []dblock.DB{d.OpenMax(t, crowd), d.OpenMax(t, crowd)} // two applications
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		old := make([]dblock.Key, 100)
		for i := range old {
			old[i] = message(isolation, "old", i)
		}
		tx := d.Begin(t, nil)
		if _, err := rowlock.NewOnce(d.DB).MarkEach(ctx, tx, old...); err != nil {
			t.Fatal(err)
		}
		commit(t, tx)
		d.grow(t, 31*24*time.Hour)

		stop, cancel := context.WithCancel(ctx)
		defer cancel()
		var all sync.WaitGroup
		for i := range 10 {
			once := rowlock.NewOnce(dbs[i%2], &rowlock.OnceOptions{Isolation: isolation, Retry: &deadlock.RetryOptions{Attempts: 100}})
			all.Go(func() {
				for round := 0; stop.Err() == nil; round++ {
					young := message(isolation, "young", i, round)
					for n, m := range []dblock.Key{young, old[(i+round)%len(old)], young} {
						first, err := rowlock.DoOnce(ctx, once, func(context.Context, dblock.Tx) error { return nil }, m)
						if err != nil {
							t.Error(err)
							return
						}
						if n != 1 && first != (n == 0) {
							t.Errorf("a message of a moment ago: %t", first)
						}
					}
				}
			})
		}
		cleaned := int64(0)
		for began := time.Now(); !t.Failed() && (cleaned == 0 || time.Since(began) < time.Second); {
			n, err := d.clean(ctx, "once", rowlock.NewOnce(d.DB), nil)
			if err != nil {
				t.Error(err)
			}
			cleaned += n
		}
		cancel()
		all.Wait()
		t.Logf("%d deleted", cleaned)
	})
}
