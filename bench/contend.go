//go:build linux

package bench

import (
	"context"
	"encoding/gob"
	"errors"
	"sync"
	"time"

	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/tests/servers"
)

// contenders are the goroutines of one process that fight for a key.
type contenders struct {
	Kind       servers.Kind
	DSN        string
	Goroutines int
}

// The ways to lock.
const (
	wayDblock   = "dblock"
	wayBlocking = "a blocking connection per waiter"
)

// round is one fight.
type round struct {
	Way    string
	Length time.Duration
	Until  time.Time // nobody asks for the key any more
	Hold   time.Duration
}

// held is one hold, in nanoseconds of the clock that all processes of the machine
// share. The times are taken within the hold: two that overlap are a proof.
type held struct{ Asked, Granted, Releasing int64 }

// outcome is what a process reports of a round.
type outcome struct {
	Holds [][]held // of each goroutine
	Err   string
}

// way locks the key in the goroutine of that number, and returns how to unlock.
type way func(ctx context.Context, goroutine int) (unlock func(context.Context) error, err error)

// contend is the role of a worker: it fights round after round.
func contend(in *gob.Decoder, out *gob.Encoder) error {
	var c contenders
	if err := in.Decode(&c); err != nil {
		return err
	}
	ctx := context.Background()
	db, err := openDB(ctx, c.Kind, c.DSN)
	if err != nil {
		return err
	}
	locks, err := advisory.New(db)
	if err != nil {
		return err
	}
	key := keys("hot", 1)[0]
	ways := map[string]way{wayDblock: func(ctx context.Context, _ int) (func(context.Context) error, error) {
		lock, err := locks.Lock(ctx, key)
		if err != nil {
			return nil, err
		}
		return lock.Release, nil
	}}
	conns := make([]raw, c.Goroutines)
	for i := range conns {
		if conns[i], err = dial(ctx, c.Kind, c.DSN); err != nil {
			return err
		}
	}
	id := rawKeys("hot", 1)[0]
	ways[wayBlocking] = func(ctx context.Context, goroutine int) (func(context.Context) error, error) {
		if err := conns[goroutine].lock(ctx, id); err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return conns[goroutine].unlock(ctx, id) }, nil
	}
	for {
		var r round
		if err := in.Decode(&r); err != nil {
			return err
		}
		if err := out.Encode(r.fight(ctx, ways[r.Way], c.Goroutines)); err != nil {
			return err
		}
	}
}

func (r round) fight(ctx context.Context, lock way, goroutines int) outcome {
	ctx, cancel := context.WithTimeout(ctx, r.Length+patience)
	defer cancel()
	o := outcome{Holds: make([][]held, goroutines)}
	errs := make([]error, goroutines)
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for errs[g] == nil && time.Now().Before(r.Until) {
				h := held{Asked: time.Now().UnixNano()}
				unlock, err := lock(ctx, g)
				if err != nil {
					errs[g] = err
					return
				}
				h.Granted = time.Now().UnixNano()
				if r.Hold > 0 {
					time.Sleep(r.Hold)
				}
				h.Releasing = time.Now().UnixNano()
				errs[g] = unlock(ctx)
				o.Holds[g] = append(o.Holds[g], h)
			}
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		o.Err = err.Error()
	}
	return o
}
