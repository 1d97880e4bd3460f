package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

func rowsFailure(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE written (n INT PRIMARY KEY)`)
	key := dblock.NewKey("account", "1")
	rows := rowlock.New(d.DB)
	write := func(ctx context.Context, tx dblock.Tx) {
		if err := execute(ctx, tx, `INSERT INTO written VALUES (1)`); err != nil {
			t.Error(err)
		}
	}
	check := func() {
		t.Helper()
		d.checkNothingOpen(t, key)
		if n := d.number(t, `SELECT count(*) FROM written`); n != 0 {
			t.Fatal("the write was committed")
		}
	}

	poor := errors.New("not enough money")
	err := rowlock.InTx(testContext(t), rows, func(ctx context.Context, tx dblock.Tx) error {
		write(ctx, tx)
		return poor
	}, key)
	if err != poor {
		t.Errorf("%v, want the function's own error", err)
	}
	check()

	var got any
	func() {
		defer func() { got = recover() }()
		_ = rowlock.InTx(testContext(t), rows, func(ctx context.Context, tx dblock.Tx) error {
			write(ctx, tx)
			panic("boom")
		}, key)
	}()
	if got != "boom" {
		t.Errorf("recovered %v, want the function's panic", got)
	}
	check()
}

// endings are what a function must not do to the driver's own transaction.
var endings = map[string]func(context.Context, any) error{
	"commit": func(ctx context.Context, tx any) error {
		switch tx := tx.(type) {
		case interface{ Commit() error }: // database/sql
			return tx.Commit()
		case interface{ Commit(context.Context) error }: // pgx
			return tx.Commit(ctx)
		}
		return fmt.Errorf("do not know how to end a %T", tx)
	},
	"rollback": func(ctx context.Context, tx any) error {
		switch tx := tx.(type) {
		case interface{ Rollback() error }:
			return tx.Rollback()
		case interface{ Rollback(context.Context) error }:
			return tx.Rollback(ctx)
		}
		return fmt.Errorf("do not know how to end a %T", tx)
	},
}

func rowsEndedByFunction(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	key := dblock.NewKey("account", "1")
	for name, end := range endings {
		err := rowlock.InTx(testContext(t), rowlock.New(d.DB), end, key) // gets the driver's own transaction
		if !errors.Is(err, dblock.ErrClosed) || !strings.Contains(err.Error(), "ended the transaction itself") {
			t.Errorf("%s: %v, want %v with the reason", name, err, dblock.ErrClosed)
		}
	}
	d.checkNothingOpen(t, key)
}

// The server ends the session in the middle: no later statement runs outside of
// the transaction, and nothing is committed.
func rowsLostSession(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE written (n INT PRIMARY KEY)`)
	key := dblock.NewKey("account", "1")
	runs := 0
	err := rowlock.InTx(testContext(t), rowlock.New(d.DB), func(ctx context.Context, tx dblock.Tx) error {
		runs++
		if err := execute(ctx, tx, `INSERT INTO written VALUES (1)`); err != nil {
			return err
		}
		d.kill(t, d.sessionOf(t, tx))
		eventually(t, "the transaction is gone", func() bool { return d.number(t, openTransactions[d.DB.Name()]) == 0 })
		return execute(ctx, tx, `INSERT INTO written VALUES (2)`)
	}, key)
	if class := dialect.ClassOf(d.DB.Classify(err)); class != dblock.ErrLost {
		t.Errorf("%v is %q, want %q", err, class, dblock.ErrLost)
	}
	if runs != 1 {
		t.Errorf("%d runs, want 1", runs)
	}
	if n := d.number(t, `SELECT count(*) FROM written`); n != 0 {
		t.Errorf("%d writes were committed", n)
	}
	d.checkNothingOpen(t, key)
}
