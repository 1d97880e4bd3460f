package conformance

import (
	"context"
	"database/sql"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// Shared holders are beside each other, and never beside an exclusive one.
func rowsShared(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	rows, key := rowlock.New(d.DB), dblock.NewKey("account", "1")
	first, second, third := d.Begin(t, nil), d.Begin(t, nil), d.Begin(t, nil)
	defer rollback(t, third)
	if err := rows.Lock(ctx, first, key.Shared()); err != nil {
		t.Fatal(err)
	}
	if err := rows.TryLock(ctx, second, key.Shared()); err != nil {
		t.Fatalf("beside a shared holder: %v", err)
	}
	if err := rows.TryLock(ctx, third, key); !errors.Is(err, dblock.ErrNotAcquired) || deadlock.Remains(d.DB, err) != dialect.RemainsUsable {
		t.Fatalf("exclusive beside shared holders: %v", err)
	}
	granted := make(chan error, 1)
	go func() { granted <- rows.Lock(ctx, third, key) }()
	d.awaitBlocked(t, 1)
	commit(t, first)
	d.awaitBlocked(t, 1)
	commit(t, second)
	if err := <-granted; err != nil {
		t.Fatal(err)
	}
	fourth := d.Begin(t, nil)
	defer rollback(t, fourth)
	if err := rows.TryLock(ctx, fourth, key.Shared()); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("shared beside an exclusive holder: %v", err)
	}
	shared := make(chan error, 1)
	go func() { shared <- rows.Lock(ctx, fourth, key.Shared()) }()
	d.awaitBlocked(t, 1)
	commit(t, third)
	if err := <-shared; err != nil {
		t.Error(err)
	}
}

// All of a crowd hold a fresh key at once; its first user does not exclude the others.
func rowsSharedFirstUse(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, crowd+2)
	for _, isolation := range []sql.IsolationLevel{sql.LevelDefault, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(isolation.String(), func(t *testing.T) {
			ctx := testContext(t)
			rows := rowlock.New(db, &rowlock.Options{Isolation: isolation})
			keys := []dblock.Key{dblock.NewKey("a", isolation.String()).Shared(), dblock.NewKey("b", isolation.String()).Shared()}
			var inside, all sync.WaitGroup
			inside.Add(crowd)
			for range crowd {
				all.Go(func() {
					arrived := sync.OnceFunc(inside.Done) // it may run several times
					err := rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error {
						arrived()
						inside.Wait()
						return nil
					}, keys...)
					if err != nil {
						t.Error(err)
						arrived()
					}
				})
			}
			all.Wait()
		})
	}
}

// The exclusive mode wins where a call names both, and each key of a call has its own.
func rowsMixedModes(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	rows := rowlock.New(d.DB)
	var keys []dblock.Key
	for i := range 6 {
		key := dblock.NewKey("mixed", strconv.Itoa(i))
		if i%2 == 0 {
			key = key.Shared()
		}
		keys = append(keys, key)
	}
	both := dblock.NewKey("both")
	for _, lock := range []func(context.Context, dblock.Tx, ...dblock.Key) error{rows.Lock, rows.TryLock} {
		holder, other := d.Begin(t, nil), d.Begin(t, nil)
		if err := lock(ctx, holder, append(keys, both.Shared(), both)...); err != nil {
			t.Fatal(err)
		}
		for _, key := range append(keys, both) {
			want := error(dblock.ErrNotAcquired)
			if key.Mode() == dblock.Shared {
				want = nil
			}
			if err := rows.TryLock(ctx, other, key.Shared()); !errors.Is(err, want) {
				t.Errorf("%s, shared: %v, want %v", key, err, want)
			}
		}
		rollback(t, other)
		rollback(t, holder)
	}
}

// A limit is kept to the fraction of a second, not ended early, and leaves the
// transaction to go on.
func rowsWaitLimits(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE written (n INT PRIMARY KEY)`)
	ctx := testContext(t)
	held, free := dblock.NewKey("held"), dblock.NewKey("free")
	holder := d.Begin(t, nil)
	if err := rowlock.New(d.DB).Lock(ctx, holder, held); err != nil {
		t.Fatal(err)
	}
	const limit = 300 * time.Millisecond
	limited := rowlock.New(d.DB, &rowlock.Options{WaitLimit: limit})
	n := 0
	for what, call := range map[string]func(dblock.Tx) error{
		"LockWithin":  func(tx dblock.Tx) error { return rowlock.New(d.DB).LockWithin(ctx, tx, limit, held) },
		"shared":      func(tx dblock.Tx) error { return limited.Lock(ctx, tx, held.Shared()) },
		"Lock":        func(tx dblock.Tx) error { return limited.Lock(ctx, tx, held) },
		"Fence":       func(tx dblock.Tx) error { _, err := limited.Fence(ctx, tx, held); return err },
		"shared, too": func(tx dblock.Tx) error { return limited.Lock(ctx, tx, held.Shared()) },
	} {
		tx := d.Begin(t, nil)
		n++
		mustExec(t, tx, `INSERT INTO written VALUES (`+strconv.Itoa(n)+`)`)
		if err := limited.Lock(ctx, tx, free); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		err := call(tx)
		if waited := time.Since(began); waited < limit || waited > 20*limit {
			t.Errorf("%s: after %v, want %v", what, waited, limit)
		}
		if !errors.Is(err, dblock.ErrTimeout) || deadlock.Remains(d.DB, err) != dialect.RemainsUsable {
			t.Errorf("%s: %v, want %v", what, err, dblock.ErrTimeout)
		}
		other := d.Begin(t, nil)
		if err := limited.TryLock(ctx, other, free); !errors.Is(err, dblock.ErrNotAcquired) {
			t.Errorf("%s: a key of an earlier call was lost: %v", what, err)
		}
		rollback(t, other)
		commit(t, tx)
	}
	if written := d.number(t, `SELECT count(*) FROM written`); written != n {
		t.Errorf("%d transactions went on, want %d", written, n)
	}
	err := rowlock.InTx(ctx, limited, func(context.Context, dblock.Tx) error { return nil }, free, held)
	if !errors.Is(err, dblock.ErrTimeout) {
		t.Errorf("InTx: %v", err)
	}

	// The limit is that of the call, not of each key, and those refused are free.
	several := []dblock.Key{free, held, dblock.NewKey("another")}
	second := d.Begin(t, nil)
	if err := limited.Lock(ctx, second, several[2]); err != nil {
		t.Fatal(err)
	}
	tx := d.Begin(t, nil)
	began := time.Now()
	if err := limited.Lock(ctx, tx, several...); !errors.Is(err, dblock.ErrTimeout) || time.Since(began) > 20*limit {
		t.Errorf("several: after %v: %v", time.Since(began), err)
	}
	rollback(t, tx)
	rollback(t, second)

	// Far from over, the limit does not matter.
	tx = d.Begin(t, nil)
	granted := make(chan error, 1)
	go func() { granted <- limited.LockWithin(ctx, tx, 24*time.Hour, held) }()
	d.awaitBlocked(t, 1)
	commit(t, holder)
	if err := <-granted; err != nil {
		t.Error(err)
	}
	commit(t, tx)
	if err := limited.LockWithin(ctx, d.Begin(t, nil), 0, held); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("no limit: %v", err)
	}
	d.limitCrossesGrant(t, limited, held)
}

// limitCrossesGrant lets limits end at the moment of the grant: whatever comes of the
// call, the transaction is as the error says.
func (d *Database) limitCrossesGrant(t *testing.T, rows *rowlock.Locker, key dblock.Key) {
	ctx := testContext(t)
	var granted, refused int
	for i := range 30 {
		holder, tx := d.Begin(t, nil), d.Begin(t, nil)
		if err := rows.Lock(ctx, holder, key); err != nil {
			t.Fatal(err)
		}
		limit := 20*time.Millisecond + time.Duration(i%10)*time.Millisecond
		ended := make(chan error, 1)
		time.AfterFunc(limit, func() { ended <- holder.Commit(ctx) })
		err := rows.LockWithin(ctx, tx, limit, key)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		other := d.Begin(t, nil)
		tryErr := rows.TryLock(ctx, other, key)
		switch {
		case err == nil:
			granted++
			if !errors.Is(tryErr, dblock.ErrNotAcquired) {
				t.Fatalf("granted, but a try got %v", tryErr)
			}
		case errors.Is(err, dblock.ErrTimeout):
			refused++
			if tryErr != nil {
				t.Fatalf("refused with %v, but a try got %v", err, tryErr)
			}
		default:
			t.Fatal(err)
		}
		rollback(t, other)
		for range 3 { // nothing meets the statements that follow
			mustExec(t, tx, `SELECT 1`)
		}
		commit(t, tx)
	}
	t.Logf("%d granted, %d refused", granted, refused)
}

func rowsWaitAnnounced(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	heard := make(chan dblock.Event, 10)
	rows := rowlock.New(d.DB, &rowlock.Options{Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) { heard <- e })})
	key := dblock.NewKey("account", "1")
	holder := d.Begin(t, nil)
	if err := rowlock.New(d.DB).Lock(ctx, holder, key); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	for _, call := range []func() error{
		func() error { tx := d.Begin(t, nil); defer rollback(t, tx); return rows.Lock(ctx, tx, key) },
		func() error {
			return rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error { return nil }, key)
		},
	} {
		go func() { ended <- call() }()
		if e := <-heard; e.Kind != dblock.EventWaiting || len(e.Keys) != 1 || e.Duration <= 0 {
			t.Errorf("heard %+v", e)
		}
	}
	commit(t, holder)
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}
