package advisory_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// An application makes its database once, with postgres.New, mysql.New or
// sqlserver.New.
var db dblock.DB

func Example() {
	ctx := context.Background()
	locks, err := advisory.New(db)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = locks.Do(ctx, func(ctx context.Context) error {
		// ctx ends when the lock is lost: give it to all that the work calls.
		return project(ctx)
	}, dblock.NewKey("projector", "orders"))
	if errors.Is(err, dblock.ErrLost) {
		log.Print("somebody else may have taken over in the meantime: ", err)
	}
}

// A scheduled job that runs on every replica, but should do its work once.
func ExampleLocker_TryLock() {
	ctx := context.Background()
	locks, err := advisory.New(db)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	lock, err := locks.TryLock(ctx, dblock.NewKey("report", "2026-11"))
	if errors.Is(err, dblock.ErrNotAcquired) {
		fmt.Println(err) // says who holds it, and since when, where the server tells
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer lock.Release(ctx)
	if err := report(lock.Context()); err != nil {
		log.Print(err)
	}
}

// The lock cannot be lost without the work: both are on one session.
func ExampleInTx() {
	ctx := context.Background()
	locks, err := advisory.New(db)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = advisory.InTx(ctx, locks, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE checkpoints SET position = position + 100 WHERE projector = 'orders'")
		return err
	}, dblock.NewKey("projector", "orders"))
	if err != nil {
		log.Print(err)
	}
}

// The locks come with the BEGIN and go with the COMMIT.
func ExampleDoTx() {
	ctx := context.Background()
	locks, err := advisory.New(db)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = advisory.DoTx(ctx, locks, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE accounts SET balance = balance - 10 WHERE id = 42")
		return err
	}, dblock.NewKey("account", "42"))
	if err != nil {
		log.Print(err)
	}
}

// Readers share a key, a writer has it alone; one call takes both kinds.
func ExampleLocker_Lock_shared() {
	ctx := context.Background()
	locks, err := advisory.New(db, &advisory.Options{WaitLimit: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	lock, err := locks.Lock(ctx, dblock.NewKey("catalog").Shared(), dblock.NewKey("stock", "17"))
	if errors.Is(err, dblock.ErrTimeout) {
		log.Print(err)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer lock.Release(ctx)
}

// What the lock guards refuses a holder that does not know yet that it is none.
func ExampleLock_Token() {
	ctx := context.Background()
	locks, err := advisory.New(db, &advisory.Options{
		Fencing:  true, // needs `dblock setup` or migrations.Setup
		Observer: dblock.SlogObserver(slog.Default()),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	lock, err := locks.Lock(ctx, dblock.NewKey("projector", "orders"))
	if err != nil {
		log.Fatal(err)
	}
	defer lock.Release(ctx)
	// It takes over before it reads, since a stale write could come in between.
	fmt.Printf("UPDATE checkpoints SET fence = %d WHERE projector = 'orders' AND fence < %[1]d\n", lock.Token())
	// No row: there is a later holder, and this one must stop.
	fmt.Printf("UPDATE checkpoints SET position = 42 WHERE projector = 'orders' AND fence = %d\n", lock.Token())
}

func project(context.Context) error { return nil }
func report(context.Context) error  { return nil }
