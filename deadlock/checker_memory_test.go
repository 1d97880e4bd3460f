package deadlock

import (
	"context"
	"database/sql"
	"runtime"
	"strconv"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

type heavyTx struct{ _ [1 << 10]byte }

func (*heavyTx) ExecContext(context.Context, string, ...any) (sql.Result, error) { return nil, nil }
func (*heavyTx) Commit(context.Context) error                                    { return nil }

func callFor(k dblock.Key) Call {
	return Call{Kind: "row", Keys: []dblock.Key{k}, Order: []dialect.Key{k.ResolveID()}}
}

// Addresses are used again, and no transaction is taken for an earlier one.
func TestTransactionsAreForgottenAndNeverMistaken(t *testing.T) {
	c := NewChecker(nil)
	for n := range 20_000 {
		call := callFor(dblock.NewKey("a", strconv.Itoa(n)))
		call.Tx = &heavyTx{}
		c.Begin(t.Context(), call).Acquired()
		c.mu.Lock()
		if groups := c.txs[txOf(call.Tx)].groups; len(groups) != 1 || len(groups[0].locks) != 1 {
			t.Fatalf("transaction %d does not have one lock: %v", n, groups)
		}
		c.mu.Unlock()
	}
	runtime.GC()
	last := &heavyTx{}
	c.sweepAt = 0
	call := callFor(dblock.NewKey("a", "0"))
	call.Tx = last
	c.Begin(t.Context(), call).Acquired()
	if len(c.txs) > 2 {
		t.Errorf("%d transactions are remembered, one lives", len(c.txs))
	}
	runtime.KeepAlive(last)
}

func TestWhatIsLearntIsBounded(t *testing.T) {
	c := NewChecker(nil)
	ctx := t.Context()
	for n := range maxOrders + maxOrders/5 {
		outer := c.Begin(ctx, callFor(dblock.NewKey("a", strconv.Itoa(n))))
		outer.Acquired()
		for _, class := range []string{"a", strconv.Itoa(n)} {
			c.Begin(outer.Context(ctx), callFor(dblock.NewKey(class, "x"))).Release()
		}
		outer.Release()
	}
	for name, o := range map[string]*orders{"classes": &c.classes, "keys": &c.keys} {
		if len(o.edges) != maxOrders || len(o.oldest) != maxOrders || len(o.from) > maxOrders {
			t.Errorf("%s: %d orders, %d in turn, from %d", name, len(o.edges), len(o.oldest), len(o.from))
		}
	}
	if len(c.txs) != 0 {
		t.Errorf("%d transactions", len(c.txs))
	}
}
