package conformance

import (
	"fmt"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// The table and the statements are those of docs/guarantees.md.
const (
	createCheckpoints = "CREATE TABLE checkpoints (projector VARCHAR(64) NOT NULL PRIMARY KEY, position BIGINT NOT NULL, fence BIGINT NOT NULL)"
	insertCheckpoint  = "INSERT INTO checkpoints VALUES ('orders', 0, 0)"
	takeOver          = "UPDATE checkpoints SET fence = %[1]d WHERE projector = 'orders' AND fence < %[1]d"
	advance           = "UPDATE checkpoints SET position = %[2]d WHERE projector = 'orders' AND fence = %[1]d"
)

// A holder that pauses does not know that its session has ended, and goes on.
func advisoryStaleHolder(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	changed := func(statement string, args ...any) int64 {
		t.Helper()
		result, err := d.SQL.ExecContext(t.Context(), fmt.Sprintf(statement, args...))
		if err != nil {
			t.Fatal(err)
		}
		n, err := result.RowsAffected()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	changed(createCheckpoints)
	changed(insertCheckpoint)
	key := dblock.NewKey("projector", "orders")
	fenced := &advisory.Options{Fencing: true}

	paused := mustLock(t, newLocker(t, d.DB, fenced), key)
	if changed(takeOver, paused.Token()) != 1 || changed(advance, paused.Token(), 100) != 1 {
		t.Fatal("the holder could not write")
	}
	d.kill(t, d.holder(t, key))

	successor := mustLock(t, newLocker(t, d.Open(t), fenced), key)
	if changed(takeOver, successor.Token()) != 1 {
		t.Fatal("the successor could not take over")
	}
	if changed(advance, paused.Token(), 150) != 0 {
		t.Error("a stale write, before the first of the successor, was not refused")
	}
	if changed(advance, successor.Token(), 200) != 1 {
		t.Error("the successor could not write")
	}
	if changed(takeOver, paused.Token()) != 0 || changed(advance, paused.Token(), 150) != 0 {
		t.Error("a stale write was not refused")
	}
	mustRelease(t, successor)
}
