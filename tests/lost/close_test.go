package lost

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// Calls of every kind are under way when the locker is closed, at a random
// moment.
func TestClosingALockerLeavesNothing(t *testing.T) {
	const rounds, callers = 200, 5
	shared(t, processes(), func(t *testing.T, w way, d *database) {
		all := keys(2)
		var granted, closed atomic.Int64
		before := goleak.IgnoreCurrent()
		for round := range rounds {
			l, err := advisory.New(d.db)
			must(t, err)
			first := make(chan struct{})
			grant := sync.OnceFunc(func() { close(first) })
			var calls sync.WaitGroup
			for caller := range callers {
				calls.Go(func() {
					for {
						acquire := l.Lock
						if caller%2 == 1 {
							acquire = l.TryLock
						}
						held, err := acquire(t.Context(), all[caller%len(all)])
						switch {
						case err == nil:
							grant()
							granted.Add(1)
							if err = held.Check(t.Context()); err == nil {
								err = held.Release(context.Background())
							}
							if caller == 4 { // a holder that Close finds at rest
								held, err = l.TryLock(t.Context(), all[0], all[1])
								if err == nil {
									select {
									case <-held.Done():
										err = held.Err()
									case <-time.After(30 * time.Second):
										err = errors.New("held after Close")
									}
								}
							}
						case errors.Is(err, dblock.ErrNotAcquired):
						}
						switch {
						case errors.Is(err, dblock.ErrClosed):
							closed.Add(1)
							return
						case err != nil && !errors.Is(err, dblock.ErrNotAcquired):
							t.Errorf("caller %d: %v", caller, err)
							return
						}
					}
				})
			}
			if round%4 > 0 { // else while it connects
				<-first
			}
			time.Sleep(time.Duration(rand.Int64N(int64(10 * time.Millisecond))))
			must(t, l.Close())
			calls.Wait()
			for _, acquire := range []func(context.Context, ...dblock.Key) (*advisory.Lock, error){l.Lock, l.TryLock} {
				if _, err := acquire(t.Context(), all[0]); !errors.Is(err, dblock.ErrClosed) {
					t.Errorf("after Close: %v", err)
				}
			}
		}
		d.nothingLeft(t)
		t.Logf("%d grants", granted.Load())
		if granted.Load() == 0 || closed.Load() != callers*rounds {
			t.Errorf("%d grants, %d calls ended by Close", granted.Load(), closed.Load())
		}
		if err := goleak.Find(before, goleak.IgnoreAnyFunction("database/sql.(*DB).connectionOpener"),
			goleak.IgnoreAnyFunction("github.com/go-sql-driver/mysql.(*mysqlConn).startWatcher.func1")); err != nil {
			t.Error(err)
		}
	})
}
