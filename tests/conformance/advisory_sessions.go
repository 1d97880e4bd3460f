package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// holders are the sessions that the server shows as holding keys of this database.
func (d *Database) holders(t testing.TB) map[int64]int {
	t.Helper()
	found, err := d.holdings()
	if err != nil {
		t.Fatalf("inspect: %v", err)
	}
	keys := map[int64]int{}
	for _, h := range found {
		if !h.Waiting {
			keys[h.Session]++
		}
	}
	return keys
}

func mustTry(t testing.TB, l *advisory.Locker, keys ...dblock.Key) *advisory.Lock {
	t.Helper()
	lock, err := l.TryLock(testContext(t), keys...)
	if err != nil {
		t.Fatalf("try %v: %v", keys, err)
	}
	return lock
}

func advisoryManyKeys(t *testing.T, h *Harness) {
	d := h.Database(t)
	l := newLocker(t, d.DB)
	const n = 700
	keys := accounts(n)
	locks := make([]*advisory.Lock, n)
	var all sync.WaitGroup
	for g := range 14 {
		all.Go(func() {
			for i := g; i < n; i += 14 {
				lock, err := l.TryLock(testContext(t), keys[i])
				if err != nil {
					t.Errorf("key %d: %v", i, err)
					return
				}
				locks[i] = lock
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	held := d.holders(t)
	total := 0
	for _, keys := range held {
		total += keys
	}
	if total != n || len(held) > 16 {
		t.Errorf("%d keys are held, by the sessions %v", total, held)
	}
	for i := 0; i < n; i += 50 {
		mustBeHeld(t, newLocker(t, d.Open(t)), keys[i])
		if err := locks[i].Check(testContext(t)); err != nil {
			t.Errorf("check: %v", err)
		}
	}
	for g := range 14 {
		all.Go(func() {
			for i := g; i < n; i += 14 {
				if err := locks[i].Release(testContext(t)); err != nil {
					t.Errorf("release: %v", err)
				}
			}
		})
	}
	all.Wait()
	d.nothingLeft(t)
}

// A session holds what several calls took. Its loss is theirs, and nobody else's.
func advisoryLossIsOfOneSession(t *testing.T, h *Harness) {
	d := h.Database(t)
	l, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	a, b, c := dblock.NewKey("a"), dblock.NewKey("b"), dblock.NewKey("c")
	together := []*advisory.Lock{mustTry(t, l, a), mustTry(t, l, b)}
	if d.holder(t, a) != d.holder(t, b) {
		t.Fatal("the keys do not share a session")
	}
	// What was waited for is on another session.
	before := mustTry(t, others, c)
	waited := make(chan *advisory.Lock, 1)
	go func() {
		lock, err := l.Lock(testContext(t), c)
		if err != nil {
			t.Errorf("%v", err)
		}
		waited <- lock
	}()
	d.waiting(t, c, 1)
	mustRelease(t, before)
	apart := <-waited
	if t.Failed() {
		t.FailNow()
	}

	d.kill(t, d.holder(t, a))
	for _, lock := range together {
		<-lock.Done()
		if !errors.Is(lock.Err(), dblock.ErrLost) {
			t.Errorf("%v: %v", lock.Keys(), lock.Err())
		}
	}
	if err := apart.Check(testContext(t)); err != nil {
		t.Errorf("the lock on the other session: %v", err)
	}
	mustRelease(t, apart)
	// The holders hear of the loss before their keys are free, in the process too.
	eventually(t, "free keys", func() bool {
		lock, err := l.TryLock(testContext(t), a, b)
		if err == nil {
			mustRelease(t, lock)
		}
		return err == nil
	})
	d.nothingLeft(t)
}

// An administrator ends statements, some of which are for several callers. Whose lock
// is not concerned keeps it; whoever hears of an error holds nothing.
func advisoryInterruptedStatements(t *testing.T, h *Harness) {
	if h.Interrupt == "" {
		t.Skip("an administrator of this server can end whole sessions only")
	}
	d := h.Database(t)
	l := newLocker(t, d.DB)
	bystander := mustTry(t, l, dblock.NewKey("bystander"))
	session := d.holder(t, dblock.NewKey("bystander"))
	ctx, cancel := context.WithCancel(testContext(t))
	var all sync.WaitGroup
	var granted, failed atomic.Int64
	for g, key := range accounts(8) {
		all.Go(func() {
			for ctx.Err() == nil {
				lock, err := l.TryLock(testContext(t), key)
				switch {
				case err == nil:
					granted.Add(1)
					if err := lock.Release(testContext(t)); err != nil {
						t.Errorf("goroutine %d: %v", g, err)
					}
				case errors.Is(err, dblock.ErrCanceled):
					failed.Add(1)
				default:
					t.Errorf("goroutine %d: %v", g, err)
				}
			}
		})
	}
	for range 300 {
		if _, err := d.SQL.ExecContext(t.Context(), fmt.Sprintf(h.Interrupt, session)); err != nil {
			t.Fatalf("interrupt: %v", err)
		}
	}
	cancel()
	all.Wait()
	t.Logf("%d granted, %d interrupted", granted.Load(), failed.Load())
	if err := bystander.Check(testContext(t)); err != nil {
		t.Errorf("the bystander: %v", err)
	}
	mustRelease(t, bystander)
	d.nothingLeft(t)
}

func advisoryOneWaiter(t *testing.T, h *Harness) {
	d := h.Database(t)
	here, there := newLocker(t, d.DB), newLocker(t, d.Open(t))
	key := dblock.NewKey("hot")
	held := mustLock(t, there, key)
	const n = 30
	var came sync.WaitGroup
	var served []int
	for i := range n {
		began := make(chan struct{})
		came.Go(func() {
			close(began)
			lock, err := here.Lock(testContext(t), key)
			if err != nil {
				t.Errorf("%v", err)
				return
			}
			served = append(served, i)
			if err := lock.Release(testContext(t)); err != nil {
				t.Errorf("%v", err)
			}
		})
		<-began
		time.Sleep(5 * time.Millisecond) // into the queue one after the other, mostly
	}
	d.waiting(t, key, 1)
	found, err := d.holdings(key)
	if err != nil || len(found) != 2 {
		t.Errorf("the server shows %+v, %v: want a holder and one waiter", found, err)
	}
	mustRelease(t, held)
	came.Wait()
	inversions := 0
	for i := 1; i < len(served); i++ {
		if served[i] < served[i-1] {
			inversions++
		}
	}
	if len(served) != n || inversions > n/4 {
		t.Errorf("served in the order %v", served)
	}
	d.nothingLeft(t)
}

// Those who wait in one process pass the key on; those of another have their turn
// all the same.
func advisoryTurns(t *testing.T, h *Harness) {
	d := h.Database(t)
	here, there := newLocker(t, d.DB), newLocker(t, d.Open(t))
	key := dblock.NewKey("hot")
	ctx, cancel := context.WithCancel(testContext(t))
	var all sync.WaitGroup
	var inside, served atomic.Int64
	use := func(l *advisory.Locker) bool {
		lock, err := l.Lock(ctx, key)
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("%v", err)
			}
			return false
		}
		if n := inside.Add(1); n != 1 {
			t.Errorf("%d hold the key", n)
		}
		inside.Add(-1)
		if err := lock.Release(context.Background()); err != nil {
			t.Errorf("%v", err)
		}
		return true
	}
	for range 16 {
		all.Go(func() {
			for ctx.Err() == nil {
				if use(here) {
					served.Add(1)
				}
			}
		})
	}
	most := int64(0)
	for range 20 {
		before := served.Load()
		use(there)
		most = max(most, served.Load()-before)
	}
	cancel()
	all.Wait()
	t.Logf("%d grants in one process, at most %d of them before the other's turn", served.Load(), most)
	d.nothingLeft(t)
}

func advisorySharedHolds(t *testing.T, h *Harness) {
	d := h.Database(t)
	l, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	key := dblock.NewKey("catalog")
	if !d.DB.Features().Shared {
		if _, err := l.TryLock(testContext(t), key.Shared()); !errors.Is(err, dblock.ErrUnsupported) {
			t.Errorf("%v", err)
		}
		return
	}
	var locks []*advisory.Lock
	for range 5 {
		locks = append(locks, mustTry(t, l, key.Shared()))
	}
	mustBeHeld(t, l, key)
	for _, lock := range locks {
		mustBeHeld(t, others, key)
		if err := lock.Check(testContext(t)); err != nil {
			t.Errorf("check: %v", err)
		}
		mustRelease(t, lock)
	}
	mustBeFree(t, others, key)

	reader := mustTry(t, l, key.Shared())
	writer := passes(testContext(t), l, key)
	d.waiting(t, key, 1)
	mustBeHeld(t, l, key.Shared()) // behind the writer
	mustRelease(t, reader)
	if err := <-writer; err != nil {
		t.Errorf("the writer: %v", err)
	}
	d.nothingLeft(t)
}

func advisorySessionPerLock(t *testing.T, h *Harness) {
	d := h.Database(t)
	l := newLocker(t, d.DB, &advisory.Options{SessionPerLock: true})
	keys := accounts(4)
	var locks []*advisory.Lock
	for _, key := range keys {
		locks = append(locks, mustTry(t, l, key))
	}
	if held := d.holders(t); len(held) != len(keys) {
		t.Errorf("the sessions %v", held)
	}
	mustBeHeld(t, l, keys[0])
	waiter := passes(testContext(t), l, keys[0])
	d.waiting(t, keys[0], 1)
	d.kill(t, d.holder(t, keys[1]))
	<-locks[1].Done()
	for _, i := range []int{0, 2, 3} {
		if err := locks[i].Release(testContext(t)); err != nil {
			t.Errorf("lock %d: %v", i, err)
		}
	}
	if err := <-waiter; err != nil {
		t.Errorf("the waiter: %v", err)
	}
	d.nothingLeft(t)
}
