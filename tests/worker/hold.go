package main

import (
	"context"
	"fmt"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// hold takes the keys, prints "held", and keeps them until it is killed. Its
// arguments are a DSN and the keys, a part each.
func hold(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("usage: worker hold DSN KEY…")
	}
	ctx := context.Background()
	db, err := open(ctx, args[0])
	if err != nil {
		return err
	}
	locks, err := advisory.New(db)
	if err != nil {
		return err
	}
	keys := make([]dblock.Key, len(args)-1)
	for i, part := range args[1:] {
		keys[i] = dblock.NewKey(part)
	}
	lock, err := locks.Lock(ctx, keys...)
	if err != nil {
		return err
	}
	fmt.Println("held")
	<-lock.Done()
	return lock.Err()
}
