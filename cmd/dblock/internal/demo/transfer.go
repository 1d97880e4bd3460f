package demo

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/migrations"
	"github.com/dblock-go/dblock/rowlock"
)

const (
	opening           = 1000 // what each account has in the beginning
	transfersOfTeller = 50
)

// owners of the accounts, by the account's id.
var owners = map[int]string{1: "alice", 2: "bob"}

// tellers are who moves money: from, to and how much at a time.
var tellers = []struct{ from, to, amount int }{{1, 2, 7}, {2, 1, 5}, {1, 2, 3}, {2, 1, 2}}

// transfer is the second act.
func (p *play) transfer(ctx context.Context, c *cast, f *facts) error {
	p.timeline.act("Transactions: four processes move money between the same two accounts,\n" +
		"   two in each direction. Each transfer locks both accounts.")
	if err := migrations.Setup(ctx, p.db, &migrations.SetupOptions{Table: locksTable}); err != nil {
		return err
	}
	for i, t := range tellers {
		_, err := c.start("teller", fmt.Sprintf("teller-%d", i+1),
			strconv.Itoa(t.from), strconv.Itoa(t.to), strconv.Itoa(t.amount), strconv.Itoa(transfersOfTeller))
		if err != nil {
			return err
		}
	}
	return c.playOut(ctx)
}

// teller moves money again and again. Its arguments are from which account, to
// which, how much, and how often.
func (c *child) teller(ctx context.Context) error {
	moved := Event{Kind: kindMoved}
	for i, n := range []*int{&moved.From, &moved.To, &moved.Amount, &moved.Count} {
		if i >= len(c.args) {
			return errors.New("a teller takes four numbers")
		}
		var err error
		if *n, err = strconv.Atoi(c.args[i]); err != nil {
			return err
		}
	}
	return c.withDB(ctx, func(db dblock.DB) error {
		var deadlocks atomic.Int64
		rows := rowlock.New(db, &rowlock.Options{
			Table: locksTable,
			Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
				if e.Kind == dblock.EventRetried && deadlock.IsDeadlock(db, e.Err) {
					deadlocks.Add(1)
				}
			}),
		})
		from := dblock.NewKey("account", c.args[0])
		to := dblock.NewKey("account", c.args[1])
		for range moved.Count {
			err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
				if err := add(ctx, tx, moved.From, -moved.Amount); err != nil {
					return err
				}
				return add(ctx, tx, moved.To, moved.Amount)
			}, from, to)
			if err != nil {
				return err
			}
		}
		moved.Deadlocks = int(deadlocks.Load())
		c.tell(moved)
		return nil
	})
}

// add changes a balance.
func add(ctx context.Context, tx dblock.Tx, account, amount int) error {
	result, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET balance = balance + %d WHERE id = %d", accountsTable, amount, account))
	if err != nil {
		return err
	}
	return oneRow(result)
}
