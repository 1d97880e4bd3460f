package main

import (
	"context"
	"flag"
	"fmt"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// hold takes the keys, prints "held", and keeps them until it is killed. Its
// arguments are a DSN and the keys, a part each. With -fencing it prints "token N"
// first. When it hears that the lock is lost, it prints "lost", the time in
// nanoseconds since 1970 and why; then what Check and Release say.
func hold(args []string) error {
	flags := flag.NewFlagSet("hold", flag.ContinueOnError)
	fencing := flags.Bool("fencing", false, "print the fencing number")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if args = flags.Args(); len(args) < 2 {
		return fmt.Errorf("usage: worker hold [-fencing] DSN KEY…")
	}
	ctx := context.Background()
	db, err := open(ctx, args[0])
	if err != nil {
		return err
	}
	locks, err := advisory.New(db, &advisory.Options{Fencing: *fencing})
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
	if *fencing {
		fmt.Println("token", lock.Token())
	}
	fmt.Println("held")
	<-lock.Done()
	fmt.Println("lost", time.Now().UnixNano(), lock.Err())
	fmt.Println("check", lock.Check(ctx))
	fmt.Println("release", lock.Release(ctx))
	return lock.Err()
}
