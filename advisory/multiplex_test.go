package advisory_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

func numbered(i int) dblock.Key { return dblock.NewKey("key", strconv.Itoa(i)) }

func mustTry(t *testing.T, l *advisory.Locker, keys ...dblock.Key) *advisory.Lock {
	t.Helper()
	lock, err := l.TryLock(t.Context(), keys...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

func mustRelease(t *testing.T, lock *advisory.Lock) {
	t.Helper()
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestManyKeysShareASession(t *testing.T) {
	f := newFakeServer()
	f.room = 100
	l := newLocker(t, f, nil)
	var locks []*advisory.Lock
	for i := range 250 {
		locks = append(locks, mustTry(t, l, numbered(i)))
	}
	if f.held() != 250 || f.open() != 3 {
		t.Errorf("%d keys held by %d sessions", f.held(), f.open())
	}
	for _, lock := range locks {
		mustRelease(t, lock)
	}
	if f.held() != 0 {
		t.Errorf("%d keys left", f.held())
	}
}

func TestASessionPerLockIsAnOption(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, &advisory.Options{SessionPerLock: true})
	for i := range 5 {
		mustTry(t, l, numbered(i))
	}
	if f.open() != 5 {
		t.Errorf("%d sessions", f.open())
	}
	if _, err := l.TryLock(t.Context(), numbered(3)); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("a held key: %v", err)
	}
}

func TestEmptySessionsAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		f.room = 1
		l := newLocker(t, f, nil)
		a, b := mustTry(t, l, numbered(1)), mustTry(t, l, numbered(2))
		mustRelease(t, a)
		time.Sleep(30 * time.Second)
		if f.open() != 1 || b.Err() != nil {
			t.Errorf("%d sessions; %v", f.open(), b.Err())
		}
		mustRelease(t, b)
		time.Sleep(30 * time.Second)
		if f.open() != 0 {
			t.Errorf("%d sessions", f.open())
		}
	})
}

func TestASessionIsNotAskedTwiceForAKey(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	var inside, most, got atomic.Int64
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 200 {
				lock, err := l.TryLock(t.Context(), key)
				if errors.Is(err, dblock.ErrNotAcquired) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				got.Add(1)
				if n := inside.Add(1); n > most.Load() {
					most.Store(n)
				}
				inside.Add(-1)
				mustRelease(t, lock)
			}
		})
	}
	all.Wait()
	if most.Load() != 1 || got.Load() == 0 {
		t.Errorf("%d held it at once, %d in all", most.Load(), got.Load())
	}
}

func TestOperationsOfManyGoroutinesShareRoundTrips(t *testing.T) {
	f := newFakeServer()
	f.exchange = func() error { time.Sleep(time.Millisecond); return nil }
	l := newLocker(t, f, nil)
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			for range 10 {
				mustRelease(t, mustTry(t, l, numbered(i)))
			}
		})
	}
	all.Wait()
	if f.exchanges > 64*20/4 {
		t.Errorf("%d statements for %d operations", f.exchanges, 64*20)
	}
}

// Two keys whose hashes collide are one lock, of which a session must not ask twice.
func TestKeysThatCollideAreOneLock(t *testing.T) {
	f := newFakeServer()
	one, other := numbered(1), dblock.RawKey(numbered(1).ID())
	for _, fencing := range []bool{false, true} {
		l := newLocker(t, f, &advisory.Options{Fencing: fencing})
		lock := mustTry(t, l, one)
		if _, err := l.TryLock(t.Context(), other); !errors.Is(err, dblock.ErrNotAcquired) {
			t.Errorf("fencing %t: %v", fencing, err)
		}
		mustRelease(t, lock)
	}
}

// Many goroutines use few sessions where the server is near, and more of them where
// their statements take long.
func TestStatementsUnderWayFollowTheRoundTrip(t *testing.T) {
	for delay, sessions := range map[time.Duration][2]int{
		50 * time.Microsecond:  {1, 4},
		2 * time.Millisecond:   {6, 9},
		100 * time.Millisecond: {12, 16},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakeServer()
			f.delay = delay
			l := newLocker(t, f, nil)
			var all sync.WaitGroup
			for i := range 200 {
				all.Go(func() {
					for range 20 {
						mustRelease(t, mustTry(t, l, numbered(i)))
					}
				})
			}
			all.Wait()
			if n := f.open(); n < sessions[0] || n > sessions[1] {
				t.Errorf("%v: %d sessions", delay, n)
			}
		})
	}
}

// What a statement did before it failed is found out: nobody else on the session
// loses anything.
func TestAStatementThatFailedCostsNobodyElsesLock(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	bystander, leaving := mustTry(t, l, numbered(1)), mustTry(t, l, numbered(2))
	failure := &dialect.Error{Class: dialect.Canceled, Err: errors.New("cancelled by an administrator")}
	f.exchange = func() error { return failure }
	if _, err := l.TryLock(t.Context(), numbered(3)); !errors.Is(err, dblock.ErrCanceled) {
		t.Errorf("the try: %v", err)
	}
	if err := leaving.Release(t.Context()); err != nil {
		t.Errorf("the release: %v", err)
	}
	f.exchange = nil
	if f.held() != 1 || bystander.Err() != nil || bystander.Check(t.Context()) != nil {
		t.Errorf("%d keys held; %v", f.held(), bystander.Err())
	}
	mustRelease(t, mustTry(t, l, numbered(3)))
}

func TestALostSessionCostsOnlyItsOwnLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		f.room = 2
		l := newLocker(t, f, nil)
		a, b, c := mustTry(t, l, numbered(1)), mustTry(t, l, numbered(2)), mustTry(t, l, numbered(3))
		f.killHolder(numbered(1).ID())
		<-a.Done()
		<-b.Done()
		synctest.Wait()
		if !errors.Is(a.Err(), dblock.ErrLost) || !errors.Is(b.Err(), dblock.ErrLost) || c.Err() != nil {
			t.Errorf("%v, %v, %v", a.Err(), b.Err(), c.Err())
		}
		mustRelease(t, mustTry(t, l, numbered(1)))
		mustRelease(t, c)
	})
}

func TestAFullServerIsNotFilledFurther(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	f.room = 10
	for i := range 10 {
		mustTry(t, l, numbered(i))
	}
	f.mu.Lock()
	f.full = true
	f.mu.Unlock()
	if _, err := l.TryLock(t.Context(), numbered(10)); !errors.Is(err, dblock.ErrCapacity) {
		t.Errorf("%v", err)
	}
	few := newLocker(t, f, nil) // a few keys are always possible
	mustTry(t, few, numbered(11))
}

func TestADeadlineShorterThanConnectingSucceedsInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		f.slowOpen = time.Second
		l := newLocker(t, f, nil)
		for i := 0; ; i++ {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			lock, err := l.Lock(ctx, key)
			cancel()
			if err == nil {
				mustRelease(t, lock)
				break
			}
			if !errors.Is(err, dblock.ErrTimeout) || i > 20 {
				t.Fatalf("call %d: %v", i, err)
			}
		}
	})
}

// Those who wait get the key in the order in which they came.
func TestWaitersAreServedInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		first := mustLock(t, l, key)
		var order []int
		var all sync.WaitGroup
		for i := range 200 { // more than a cohort
			all.Go(func() {
				lock := mustLock(t, l, key)
				order = append(order, i)
				mustRelease(t, lock)
			})
			synctest.Wait()
		}
		mustRelease(t, first)
		all.Wait()
		for i, n := range order {
			if i != n {
				t.Fatalf("%d was served before %d", n, i)
			}
		}
		if f.mostWaiting > 1 {
			t.Errorf("%d sessions waited in the database", f.mostWaiting)
		}
	})
}

// beforeTheOthers is how many of a process are served, each for a time and again and
// again, before one of another process that came after them.
func beforeTheOthers(t *testing.T, goroutines int, hold time.Duration) (served int) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		here, there := newLocker(t, f, nil), newLocker(t, f, nil)
		held := mustLock(t, newLocker(t, f, nil), key)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range goroutines {
			all.Go(func() {
				for ctx.Err() == nil {
					if lock, err := here.Lock(ctx, key); err == nil {
						if ctx.Err() == nil {
							served++
						}
						time.Sleep(hold)
						mustRelease(t, lock)
					}
				}
			})
		}
		synctest.Wait()
		all.Go(func() {
			lock := mustLock(t, there, key)
			cancel()
			mustRelease(t, lock)
		})
		synctest.Wait()
		mustRelease(t, held)
		all.Wait()
	})
	return served
}

// A key that goes from hand to hand within the process goes back to the server once all
// who were there at the grant have had it, 64 of them or 100 ms at most: those of another
// process get their turn.
func TestACohortEnds(t *testing.T) {
	if n := beforeTheOthers(t, 3, time.Microsecond); n != 3 {
		t.Errorf("3 wait: %d were served before the other process", n)
	}
	if n := beforeTheOthers(t, 100, time.Microsecond); n != 64 {
		t.Errorf("100 wait: %d were served before the other process", n)
	}
	if n := beforeTheOthers(t, 50, 30*time.Millisecond); n != 4 {
		t.Errorf("50 wait, for 30 ms each: %d were served before the other process", n)
	}
}

func TestEveryHolderOfACohortHasAHigherNumber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, &advisory.Options{Fencing: true})
		other := newLocker(t, f, &advisory.Options{Fencing: true})
		latest := int64(0)
		use := func(lock *advisory.Lock) {
			if lock.Token() <= latest {
				t.Errorf("number %d after %d", lock.Token(), latest)
			}
			latest = lock.Token()
			mustRelease(t, lock)
		}
		first := mustLock(t, l, key)
		var all sync.WaitGroup
		for i := range 200 {
			locker := l
			if i%10 == 0 {
				locker = other
			}
			all.Go(func() { use(mustLock(t, locker, key)) })
			synctest.Wait()
		}
		use(first)
		all.Wait()
	})
}

func TestALostLockIsNotPassedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l, others := newLocker(t, f, nil), newLocker(t, f, nil)
		held := mustLock(t, others, key)
		granted := make(chan *advisory.Lock)
		for range 2 { // the second is in the cohort of the first
			go func() { granted <- mustLock(t, l, key) }()
		}
		synctest.Wait()
		mustRelease(t, held)
		first := <-granted
		f.kill()
		if err := first.Release(t.Context()); !errors.Is(err, dblock.ErrLost) {
			t.Errorf("%v", err)
		}
		next := <-granted
		if f.held() != 1 || next.Check(t.Context()) != nil {
			t.Errorf("%d keys held; %v", f.held(), next.Err())
		}
		mustRelease(t, next)
	})
}

// Whoever gives up leaves no wait behind, be it the first in the queue or the last.
func TestThoseWhoGiveUpLeaveNoWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		here, there := newLocker(t, f, nil), newLocker(t, f, nil)
		held := mustLock(t, there, key)
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+i*7%20)*time.Second)
				defer cancel()
				if _, err := here.Lock(ctx, key); !errors.Is(err, dblock.ErrTimeout) {
					t.Errorf("%v", err)
				}
			})
		}
		all.Wait()
		if n := f.waiters(); n != 0 {
			t.Errorf("%d sessions wait", n)
		}
		mustRelease(t, held)
		mustRelease(t, mustTry(t, here, key))
	})
}

func TestFewSessionsWaitForManyKeys(t *testing.T) {
	for _, fencing := range []bool{false, true} {
		t.Run(fmt.Sprintf("fencing %t", fencing), func(t *testing.T) { fewSessionsWait(t, fencing) })
	}
}

func fewSessionsWait(t *testing.T, fencing bool) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		f.delay = 20 * time.Millisecond // tries overlap
		here, there := newLocker(t, f, &advisory.Options{MaxWaits: 3, Fencing: fencing}), newLocker(t, f, nil)
		var held []*advisory.Lock
		for i := range 50 {
			held = append(held, mustTry(t, there, numbered(i)))
		}
		var all sync.WaitGroup
		for i := range 50 {
			all.Go(func() { mustRelease(t, mustLock(t, here, numbered(i))) })
		}
		time.Sleep(time.Minute)
		if n := f.mostWaiters(); n != 3 {
			t.Errorf("%d sessions waited", n)
		}
		const most = 3 + 2 // those that wait, one to try on, and the other locker's
		if fencing && f.opened > most {
			t.Errorf("%d sessions were opened", f.opened)
		}
		for _, lock := range held {
			mustRelease(t, lock)
		}
		all.Wait()
	})
}

// Calls for one and for several keys, tries, cancelled waits and lost sessions: nobody
// holds a key beside another, and everybody comes to an end.
func TestNobodyIsForgottenInTheQueues(t *testing.T) {
	f := newFakeServer()
	f.room = 3
	lockers := []*advisory.Locker{newLocker(t, f, nil), newLocker(t, f, &advisory.Options{MaxWaits: 1}), newLocker(t, f, &advisory.Options{Fencing: true})}
	const keys = 4
	var holders [keys]atomic.Pointer[advisory.Lock]
	var all sync.WaitGroup
	for g := range 24 {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 1))
			l := lockers[g%len(lockers)]
			for range 150 {
				wanted := random.Perm(keys)[:1+random.IntN(2)]
				var list []dblock.Key
				for _, i := range wanted {
					list = append(list, numbered(i))
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(3000))*time.Microsecond)
				acquire := l.Lock
				if random.IntN(3) == 0 {
					acquire = l.TryLock
				}
				lock, err := acquire(ctx, list...)
				cancel()
				switch {
				case err == nil:
				case errors.Is(err, dblock.ErrTimeout), errors.Is(err, dblock.ErrNotAcquired), errors.Is(err, dblock.ErrLost):
					continue
				default:
					t.Error(err)
					continue
				}
				for _, i := range wanted {
					if other := holders[i].Swap(lock); other != nil && other.Err() == nil && lock.Err() == nil && f.holds(numbered(i)) {
						t.Errorf("key %d has two holders", i)
					}
				}
				for _, i := range wanted {
					holders[i].CompareAndSwap(lock, nil)
				}
				if err := lock.Release(t.Context()); err != nil && !errors.Is(err, dblock.ErrLost) {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if f.held() != 0 || f.waiters() != 0 {
		t.Errorf("%d keys held, %d sessions wait", f.held(), f.waiters())
	}
	for i := range keys {
		for _, l := range lockers {
			mustRelease(t, mustTry(t, l, numbered(i)))
		}
	}
}

func TestMoreKeysThanASessionHasRoomForShareOne(t *testing.T) {
	f := newFakeServer()
	f.room = 2
	l := newLocker(t, f, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	lock, err := l.TryLock(ctx, numbered(1), numbered(2), numbered(3))
	if err != nil || f.open() != 1 {
		t.Fatalf("%v; %d sessions", err, f.open())
	}
	mustRelease(t, mustTry(t, l, numbered(4)))
	mustRelease(t, lock)
}

func TestChecksAndReleasesOfManyCostNobodyElsesLock(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	bystander := mustTry(t, l, numbered(0))
	for range 500 {
		lock := mustTry(t, l, numbered(1))
		var both sync.WaitGroup
		both.Go(func() { _ = lock.Check(t.Context()) })
		both.Go(func() { mustRelease(t, lock) })
		both.Wait()
	}
	if bystander.Err() != nil {
		t.Errorf("%v", bystander.Err())
	}
}

func TestReleasesBesideALossEndWell(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	var all sync.WaitGroup
	stop := make(chan struct{})
	for i := range 16 {
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if lock, err := l.TryLock(t.Context(), numbered(i)); err == nil {
					_ = lock.Release(t.Context())
				}
			}
		})
	}
	for range 300 {
		time.Sleep(time.Millisecond)
		f.kill()
	}
	close(stop)
	all.Wait()
}

func TestAWaitWithoutAConnectionPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		here, there := newLocker(t, f, nil), newLocker(t, f, nil)
		held := mustTry(t, there, key)
		mustTry(t, here, numbered(1))
		f.mu.Lock()
		f.openErr = &dialect.Error{Class: dialect.Capacity}
		f.exchange = func() error { time.Sleep(time.Millisecond); return nil }
		before := f.exchanges
		f.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if _, err := here.Lock(ctx, key); !errors.Is(err, dblock.ErrTimeout) {
			t.Errorf("%v", err)
		}
		if n := f.exchanges - before; n < 10 || n > 200 {
			t.Errorf("%d tries in 10 s", n)
		}
		mustRelease(t, held)
	})
}

// That a session is busy is no reason to close it.
func TestManyCallsForSeveralKeysOverASlowNetworkLoseNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		f.delay = 50 * time.Millisecond
		l := newLocker(t, f, nil)
		bystander := mustTry(t, l, numbered(1000))
		var all sync.WaitGroup
		for i := range 2000 {
			all.Go(func() {
				lock, err := l.Lock(t.Context(), numbered(2000+2*i), numbered(2001+2*i))
				if err != nil {
					t.Error(err)
					return
				}
				mustRelease(t, lock)
			})
		}
		all.Wait()
		if bystander.Err() != nil {
			t.Error(bystander.Err())
		}
		if f.opened < 2 {
			t.Errorf("%d session for all of them", f.opened)
		}
	})
}

func TestWaitsLeaveASessionToThoseWhoDoNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		here, there := newLocker(t, f, nil), newLocker(t, f, nil)
		held := mustTry(t, there, key)
		mustRelease(t, mustTry(t, here, numbered(1)))
		f.mu.Lock()
		f.openErr = &dialect.Error{Class: dialect.Capacity}
		f.mu.Unlock()
		var all sync.WaitGroup
		all.Go(func() { mustRelease(t, mustLock(t, here, key)) })
		time.Sleep(time.Second)
		mustRelease(t, mustTry(t, here, numbered(1)))
		mustRelease(t, held)
		all.Wait()
	})
}

// A call that has a key within the process asks the server for it later. Meanwhile the
// session that it will ask must not get the key for somebody else.
func TestASessionHoldsNoKeyBothSharedAndAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		a, b := numbered(1), numbered(2)
		if a.ID() > b.ID() {
			a, b = b, a
		}
		first := mustTry(t, l, b)
		f.mu.Lock()
		f.openErr = &dialect.Error{Class: dialect.Capacity}
		f.mu.Unlock()
		var inside, most atomic.Int64
		hold := func(lock *advisory.Lock) {
			most.Store(max(most.Load(), inside.Add(1)))
			time.Sleep(10 * time.Second)
			inside.Add(-1)
			mustRelease(t, lock)
		}
		var all sync.WaitGroup
		all.Go(func() { // has a, waits for b
			lock, err := l.Lock(t.Context(), a.Shared(), b)
			if err == nil {
				hold(lock)
			} else if !errors.Is(err, dblock.ErrCapacity) { // there is no second session
				t.Error(err)
			}
		})
		synctest.Wait()
		all.Go(func() { hold(mustLock(t, l, a)) })
		time.Sleep(time.Second)
		mustRelease(t, first)
		all.Wait()
		if most.Load() != 1 {
			t.Error("a key was held shared and alone")
		}
	})
}

func TestCloseTakesNoLongerForMoreSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		f.room = 1
		l := newLocker(t, f, nil)
		for i := range 10 {
			mustTry(t, l, numbered(i))
		}
		f.slowEnd = 5 * time.Second
		began := time.Now()
		if err := l.Close(); err != nil || time.Since(began) > 6*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}
