package conformance

import (
	"context"
	"strconv"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

// More transactions at once than connections, each with a new key: whoever needs
// a second connection to create a row must not wait for the others for ever.
func rowsSmallPool(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	rows := rowlock.New(d.OpenMax(t, 3))
	ctx := testContext(t)
	var all sync.WaitGroup
	for i := range crowd {
		all.Go(func() {
			for round := range 5 {
				err := rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error { return nil },
					dblock.NewKey("small pool", strconv.Itoa(i), strconv.Itoa(round)))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// Two of three connections are taken, one of them by dblock itself where it needs
// a second connection to create the row of a new key.
func rowsLastConnection(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	db := d.OpenMax(t, 3)
	rows := rowlock.New(db)
	first, err := db.Begin(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer rollback(t, first)
	if db.Name() == "postgres" {
		second, err := db.Begin(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer rollback(t, second)
	}
	err = rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
		return rows.Lock(ctx, tx, dblock.NewKey("new in the transaction"))
	}, dblock.NewKey("new"))
	if err != nil {
		t.Errorf("transaction on the last connection: %v", err)
	}
}
