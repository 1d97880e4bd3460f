package conformance

import (
	"database/sql"
	"errors"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

// A read-only transaction locks for real, or is refused with a reason.
func rowsReadOnly(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	rows := rowlock.New(d.DB)
	key := dblock.NewKey("account", "1")
	tx, err := d.DB.Begin(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		if d.DB.Name() == "sqlserver" {
			return // its driver has no read-only transactions, and says so
		}
		t.Fatal(err)
	}
	defer rollback(t, tx)
	if err := rows.Lock(ctx, tx, key); err != nil {
		if !errors.Is(err, dblock.ErrUnsupported) {
			t.Errorf("refused without a reason: %v", err)
		}
		return
	}
	other := d.Begin(t, nil)
	defer rollback(t, other)
	if err := rows.TryLock(ctx, other, key); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("a read-only transaction holds the key, but a try returned %v", err)
	}
}
