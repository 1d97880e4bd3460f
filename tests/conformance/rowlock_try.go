package conformance

import (
	"errors"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

func rowsTryRefused(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE written (n INT PRIMARY KEY)`)
	ctx := testContext(t)
	rows := rowlock.New(d.DB)
	held, before, after := dblock.NewKey("held"), dblock.NewKey("before"), dblock.NewKey("after")

	holder := d.Begin(t, nil)
	defer rollback(t, holder)
	if err := rows.Lock(ctx, holder, held); err != nil {
		t.Fatal(err)
	}

	tx := d.Begin(t, nil)
	defer rollback(t, tx)
	mustExec(t, tx, `INSERT INTO written VALUES (1)`)
	if err := rows.TryLock(ctx, tx, before); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		err := rows.TryLock(ctx, tx, held)
		if !errors.Is(err, dblock.ErrNotAcquired) {
			t.Fatalf("try of a held key: %v, want %v", err, dblock.ErrNotAcquired)
		}
		if deadlock.Remains(d.DB, err) != dialect.RemainsUsable || !strings.Contains(err.Error(), "goes on") {
			t.Fatalf("%v does not say that the transaction goes on", err)
		}
	}
	mustExec(t, tx, `INSERT INTO written VALUES (2)`)
	if err := rows.TryLock(ctx, tx, after); err != nil {
		t.Fatalf("after a refused try: %v", err)
	}

	other := d.Begin(t, nil)
	defer rollback(t, other)
	for _, k := range []dblock.Key{before, after} {
		if err := rows.TryLock(ctx, other, k); !errors.Is(err, dblock.ErrNotAcquired) {
			t.Errorf("key %s was not kept across a refused try: %v", k, err)
		}
	}
	commit(t, tx)
	if n := d.number(t, `SELECT count(*) FROM written`); n != 2 {
		t.Errorf("%d rows were committed, want 2", n)
	}
	commit(t, holder)
	if err := rows.TryLock(ctx, other, held, before, after); err != nil {
		t.Errorf("after all holders ended: %v", err)
	}
}

// The creator of a row has not committed it; the try must not wait to see.
func rowsTryAgainstCreator(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	rows := rowlock.New(d.DB)
	key := dblock.NewKey("fresh")

	creator := d.Begin(t, nil)
	defer rollback(t, creator)
	if err := rows.Lock(ctx, creator, key); err != nil {
		t.Fatal(err)
	}
	tx := d.Begin(t, nil)
	defer rollback(t, tx)
	// A try that waits would wait for the end of ctx, since the creator stays.
	if err := rows.TryLock(ctx, tx, key); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Fatalf("try of a key in creation: %v, want %v", err, dblock.ErrNotAcquired)
	}
	rollback(t, creator)
	if err := rows.TryLock(ctx, tx, key); err != nil {
		t.Errorf("after the creator rolled back: %v", err)
	}
}
