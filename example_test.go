package dblock_test

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/dblock-go/dblock"
)

func ExampleNewKey() {
	key := dblock.NewKey("account", "42")
	fmt.Println(key)
	fmt.Println(key.ID())         // what PostgreSQL and the lock table lock
	fmt.Println(key.Name(""))     // what SQL Server locks
	fmt.Println(key.Name("Shop")) // what MySQL and MariaDB lock in the database Shop

	fmt.Println(key == dblock.NewKey("account/42"))
	// Output:
	// account/42
	// -9025438081853769558
	// account/42#82bf33e224d2b8aa
	// shop/account/42#56c226c674141f58
	// false
}

// goose's own locker on PostgreSQL locks this number.
func ExampleRawKey() {
	key := dblock.RawKey(4097083626)
	fmt.Println(key.ID(), key.Name("Shop"))
	// Output: 4097083626 4097083626
}

func ExampleError() {
	err := error(&dblock.Error{Op: "try", Dialect: "postgres", Keys: []string{"report"}, Err: dblock.ErrNotAcquired,
		Blocker: &dblock.Blocker{Session: 4711, Application: "billing", State: "idle"}})
	var details *dblock.Error
	if errors.Is(err, dblock.ErrNotAcquired) && errors.As(err, &details) {
		fmt.Println(details.Blocker.Session)
	}
	fmt.Println(err)
	// Output:
	// 4711
	// dblock: try report on postgres: held by another session; held by session 4711 ("billing", idle)
}

// An observer logs what happens to locks; it goes into the Options of advisory,
// rowlock and migrations.
func ExampleSlogObserver() {
	_ = dblock.SlogObserver(slog.Default())
}
