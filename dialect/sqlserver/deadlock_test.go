package sqlserver

import (
	"testing"

	"github.com/dblock-go/dblock/dialect"
)

// With parameters the statement would set the priority for itself alone.
func TestDeadlockPriority(t *testing.T) {
	stub, d := openDB(t, answer{})
	tx := begin(t, d)
	for _, priority := range []int{0, -7} {
		if err := d.SetDeadlock(t.Context(), tx, dialect.DeadlockSettings{Priority: priority}); err != nil {
			t.Error(err)
		}
	}
	sent := stub.sent("")
	if len(sent) != 1 || sent[0].query != "SET DEADLOCK_PRIORITY -7" || len(sent[0].args) != 0 {
		t.Errorf("sent %+v", sent)
	}
}
