package conformance

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

func rowsMissingTable(t *testing.T, h *Harness) {
	d := h.Database(t) // and no setup
	ctx := testContext(t)
	key := dblock.NewKey("account", "1")
	rows := rowlock.New(d.DB)
	tx, another := d.Begin(t, nil), d.Begin(t, nil)
	defer rollback(t, tx)
	defer rollback(t, another)
	_, fenceErr := rows.Fence(ctx, another, key)
	for name, err := range map[string]error{
		"lock":  rows.Lock(ctx, tx, key),
		"fence": fenceErr,
		"InTx":  rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error { return nil }, key),
		"another table": rowlock.InTx(ctx, rowlock.New(d.DB, &rowlock.Options{Table: `other "locks"`}),
			func(context.Context, dblock.Tx) error { return nil }, key),
	} {
		if !errors.Is(err, dblock.ErrSetup) {
			t.Errorf("%s: %v, want %v", name, err, dblock.ErrSetup)
		} else if !strings.Contains(err.Error(), "dblock setup") {
			t.Errorf("%s: %q does not name the way out", name, err)
		}
	}
}
