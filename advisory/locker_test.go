package advisory_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

var key = dblock.NewKey("job")

func newLocker(t *testing.T, f *fakeServer, o *advisory.Options) *advisory.Locker {
	t.Helper()
	l, err := advisory.New(f, o)
	if err != nil {
		t.Fatal(err)
	}
	f.checked.Do(func() {
		t.Cleanup(func() {
			if n := f.open(); n != 0 {
				t.Errorf("%d sessions left open after Close", n)
			}
		})
	})
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func mustLock(t *testing.T, l *advisory.Locker, keys ...dblock.Key) *advisory.Lock {
	t.Helper()
	lock, err := l.Lock(t.Context(), keys...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

func TestOptionsThatCannotBeMeant(t *testing.T) {
	f := newFakeServer()
	for _, opts := range [][]*advisory.Options{
		{{KeepAlive: -1}}, {{KeepAlive: time.Nanosecond}}, {{AnswerWithin: -1}}, {{AnswerWithin: time.Millisecond}}, {{WaitLimit: -time.Second}}, {{StatementGap: time.Millisecond}}, {{Isolation: 99}}, {{}, {}},
	} {
		if _, err := advisory.New(f, opts...); !errors.Is(err, dblock.ErrInvalidOption) {
			t.Errorf("%+v: %v", opts, err)
		}
	}
	for _, db := range []dblock.DB{nil, (*fakeServer)(nil)} {
		if _, err := advisory.New(db); !errors.Is(err, dblock.ErrInvalidOption) {
			t.Errorf("nil database: %v", err)
		}
	}
	if _, err := advisory.New(f, nil); err != nil {
		t.Errorf("nil options: %v", err)
	}
}

func TestASessionIsUsedAgainOnceItHoldsNothing(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	for range 10 {
		if err := mustLock(t, l, key).Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if f.opened != 1 {
		t.Errorf("%d sessions opened for 10 locks in a row", f.opened)
	}
}

func TestIdleSessionsAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		if err := mustLock(t, l, key).Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := f.open(); n != 0 {
			t.Errorf("%d sessions open after a minute without use", n)
		}
	})
}

func TestAGrantThatComesBackAsAnErrorIsNotKept(t *testing.T) {
	f := newFakeServer()
	f.acquired = func(*fakeSession) error {
		return &dialect.Error{Class: dialect.Canceled, Code: "57014"}
	}
	l := newLocker(t, f, nil)
	_, err := l.Lock(t.Context(), key)
	if !errors.Is(err, dblock.ErrCanceled) {
		t.Fatalf("%v", err)
	}
	if n := f.held(); n != 0 {
		t.Errorf("%d keys held after an acquire that failed", n)
	}
}

// A driver may report the success of a statement although it closed the
// connection when the context ended, and the lock went with it.
func TestAGrantAfterTheEndOfItsContextIsNotTrusted(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	ctx, cancel := context.WithCancel(t.Context())
	f.acquired = func(*fakeSession) error { cancel(); return nil }
	if _, err := l.Lock(ctx, key); !errors.Is(err, dblock.ErrCanceled) {
		t.Errorf("%v", err)
	}
	if f.held() != 0 {
		t.Error("held after an error")
	}
}

func TestCallsWithAnEndedContextUseUpNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for range 30 {
			if err := mustLock(t, l, key).Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(200 * time.Millisecond) // the monitor listens now
			if _, err := l.TryLock(ended, key); !errors.Is(err, dblock.ErrCanceled) {
				t.Fatalf("%v", err)
			}
		}
		if f.opened != 1 {
			t.Errorf("%d sessions opened", f.opened)
		}
	})
}

// The context ends while the call waits for its turn on an idle session.
func TestASessionThatWasNotAskedIsUsedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		if err := mustLock(t, l, key).Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.slowPing.Store(int64(time.Second)) // the monitor has the turn meanwhile
		time.Sleep(700 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := l.TryLock(ctx, key); !errors.Is(err, dblock.ErrTimeout) {
			t.Fatalf("%v", err)
		}
		if err := mustLock(t, l, key).Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if f.opened != 1 {
			t.Errorf("%d sessions opened", f.opened)
		}
	})
}

// The monitor's question is not answered in time, so the release is never sent.
func TestAReleaseThatDoesNotGetItsTurnLeavesNothingHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		lock := mustLock(t, l, key)
		f.cutOff.Store(true)
		time.Sleep(700 * time.Millisecond)
		if err := lock.Release(t.Context()); !errors.Is(err, dblock.ErrLost) {
			t.Errorf("%v", err)
		}
		if f.held() != 0 {
			t.Error("held after Release")
		}
	})
}

func TestCheckEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		lock := mustLock(t, l, key)
		f.slowPing.Store(int64(time.Second))
		time.Sleep(700 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if err := lock.Check(ctx); !errors.Is(err, dblock.ErrTimeout) || lock.Err() != nil {
			t.Errorf("%v; the lock: %v", err, lock.Err())
		}
	})
}

func TestLossIsNoticedWhileNobodyAsks(t *testing.T) {
	for name, hears := range map[string]bool{"heard": true, "by heartbeat": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeServer()
				f.hears = hears
				var events []dblock.Event
				l := newLocker(t, f, &advisory.Options{Observer: collect(&events)})
				lock := mustLock(t, l, key)
				time.Sleep(time.Minute)
				if err := lock.Err(); err != nil {
					t.Fatalf("lost without a reason: %v", err)
				}
				f.kill()
				died := time.Now()
				<-lock.Done()
				if bound := time.Since(died); bound > time.Second {
					t.Errorf("noticed after %v", bound)
				}
				for _, err := range []error{lock.Err(), context.Cause(lock.Context()), lock.Check(t.Context()), lock.Release(t.Context())} {
					if !errors.Is(err, dblock.ErrLost) || !errors.Is(err, errGone) {
						t.Errorf("%v", err)
					}
				}
				synctest.Wait()
				if last := events[len(events)-1]; last.Kind != dblock.EventLost || last.Duration < time.Minute {
					t.Errorf("last event %+v", last)
				}
			})
		})
	}
}

func TestSilenceIsNoticedWithinTheStatedBound(t *testing.T) {
	for name, o := range map[string]*advisory.Options{
		"default": {},
		"given":   {KeepAlive: 300 * time.Millisecond, AnswerWithin: 200 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeServer()
				l := newLocker(t, f, o)
				bound := o.KeepAlive + o.AnswerWithin
				if bound == 0 {
					bound = 500*time.Millisecond + 4*time.Second
				}
				lock := mustLock(t, l, key)
				time.Sleep(time.Minute)
				f.cutOff.Store(true)
				cut := time.Now()
				<-lock.Done()
				if took := time.Since(cut); took > bound || took < bound/3 {
					t.Errorf("noticed after %v, the bound is %v", took, bound)
				}
				if err := lock.Err(); !errors.Is(err, dblock.ErrLost) || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v", err)
				}
			})
		})
	}
}

func TestDoEndsWithTheLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		workErr := errors.New("work stopped")
		err := l.Do(t.Context(), func(ctx context.Context) error {
			f.kill()
			<-ctx.Done()
			if cause := context.Cause(ctx); !errors.Is(cause, dblock.ErrLost) {
				t.Errorf("cause %v", cause)
			}
			return workErr
		}, key)
		if !errors.Is(err, workErr) || !errors.Is(err, dblock.ErrLost) {
			t.Errorf("%v", err)
		}
		err = l.Do(t.Context(), func(context.Context) error { f.kill(); return nil }, key)
		if !errors.Is(err, dblock.ErrLost) {
			t.Errorf("work that may have run unguarded ended with %v", err)
		}
	})
}

func TestDoEndsWithItsContext(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	ctx, cancel := context.WithCancel(t.Context())
	err := l.Do(ctx, func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}, key)
	if !errors.Is(err, context.Canceled) || errors.Is(err, dblock.ErrLost) {
		t.Errorf("%v", err)
	}
	if f.held() != 0 {
		t.Error("held after Do with a cancelled context")
	}
}

func TestDoGivesItsFunctionTheLock(t *testing.T) {
	l := newLocker(t, newFakeServer(), &advisory.Options{Fencing: true})
	if _, ok := advisory.FromContext(t.Context()); ok {
		t.Error("a lock outside of Do")
	}
	err := l.Do(t.Context(), func(ctx context.Context) error {
		if lock, ok := advisory.FromContext(ctx); !ok || lock.Token() != 1 {
			t.Errorf("lock %+v, %v", lock, ok)
		}
		return nil
	}, key)
	if err != nil {
		t.Error(err)
	}
}

func TestPanicReleasesAndGoesOn(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	defer func() {
		if r := recover(); r != "boom" {
			t.Errorf("recovered %v", r)
		}
		if f.held() != 0 {
			t.Error("held after a panic")
		}
	}()
	_ = l.Do(t.Context(), func(context.Context) error { panic("boom") }, key)
}

func TestAPanickingObserverLeavesNothingHeld(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, &advisory.Options{Observer: dblock.ObserverFunc(func(context.Context, dblock.Event) { panic("boom") })})
	func() {
		defer func() {
			if r := recover(); r != "boom" {
				t.Errorf("recovered %v", r)
			}
		}()
		_, _ = l.Lock(t.Context(), key)
	}()
	if f.held() != 0 {
		t.Error("held by nobody")
	}
}

func TestDoWithoutAFunctionIsRefused(t *testing.T) {
	f := newFakeServer()
	if err := newLocker(t, f, nil).Do(t.Context(), nil, key); !errors.Is(err, dblock.ErrInvalidOption) || f.opened != 0 {
		t.Errorf("%v", err)
	}
}

func TestWaitLimitAndDeadlineAreTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		holder, err := f.OpenSession(t.Context(), dialect.SessionOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer holder.Close()
		if _, err := holder.Acquire(t.Context(), dialect.Request{Keys: []dialect.Key{{ID: key.ID()}}}); err != nil {
			t.Fatal(err)
		}

		var events []dblock.Event
		limited := newLocker(t, f, &advisory.Options{WaitLimit: 3 * time.Second, Observer: collect(&events)})
		began := time.Now()
		_, err = limited.Lock(t.Context(), key)
		if !errors.Is(err, dblock.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 3*time.Second {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		var details *dblock.Error
		if !errors.As(err, &details) || details.Blocker == nil || details.Blocker.Session != 1 {
			t.Errorf("who was in the way is missing: %+v", details)
		}
		if len(events) != 1 || events[0].Kind != dblock.EventWaiting || events[0].Blocker == nil {
			t.Errorf("events %+v", events)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := limited.Lock(ctx, key); !errors.Is(err, dblock.ErrTimeout) {
			t.Errorf("%v", err)
		}
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := limited.Lock(cancelled, key); !errors.Is(err, dblock.ErrCanceled) || !errors.Is(err, context.Canceled) || errors.Is(err, dblock.ErrTimeout) {
			t.Errorf("%v", err)
		}
	})
}

func TestReleaseWorksWithACancelledContextAndTwice(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	lock := mustLock(t, l, key)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 {
		if err := lock.Release(ctx); err != nil {
			t.Error(err)
		}
	}
	if !errors.Is(lock.Err(), dblock.ErrClosed) || lock.Context().Err() == nil {
		t.Errorf("after Release: %v", lock.Err())
	}
	if err := lock.Check(t.Context()); !errors.Is(err, dblock.ErrClosed) {
		t.Errorf("Check after Release: %v", err)
	}
}

func TestTheContextOfTheWaitIsNotThatOfTheLock(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	type tenant struct{}
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), tenant{}, "acme"))
	lock, err := l.Lock(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if lock.Err() != nil || lock.Context().Value(tenant{}) != "acme" {
		t.Errorf("err %v, value %v", lock.Err(), lock.Context().Value(tenant{}))
	}
	if err := lock.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCheckAndReleaseNoticeAKeyThatIsGone(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	lock := mustLock(t, l, key)
	f.steal(key.ID())
	if err := lock.Check(t.Context()); !errors.Is(err, dblock.ErrLost) {
		t.Errorf("Check: %v", err)
	}
	lock = mustLock(t, l, key)
	f.steal(key.ID())
	if err := lock.Release(t.Context()); !errors.Is(err, dblock.ErrNotHeld) {
		t.Errorf("Release: %v", err)
	}
}

func TestADeadIdleSessionCostsNoCall(t *testing.T) {
	f := newFakeServer()
	var events []dblock.Event
	l := newLocker(t, f, &advisory.Options{Observer: collect(&events)})
	if err := mustLock(t, l, key).Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.kill()
	lock := mustLock(t, l, key)
	defer lock.Release(t.Context())
	if f.opened != 2 {
		t.Errorf("%d sessions opened", f.opened)
	}
	if kinds := len(events); events[kinds-2].Kind != dblock.EventRetried {
		t.Errorf("events %+v", events)
	}
}

func TestCloseEndsHoldersAndWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		lock := mustLock(t, l, key)
		waiter := make(chan error)
		go func() {
			_, err := l.Lock(t.Context(), key)
			waiter <- err
		}()
		synctest.Wait()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-waiter; !errors.Is(err, dblock.ErrClosed) {
			t.Errorf("waiter: %v", err)
		}
		if !errors.Is(lock.Err(), dblock.ErrClosed) || !errors.Is(lock.Release(t.Context()), dblock.ErrClosed) {
			t.Errorf("holder: %v", lock.Err())
		}
		if _, err := l.TryLock(t.Context(), key); !errors.Is(err, dblock.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

func TestCloseRacingLockLeavesNothing(t *testing.T) {
	for range 200 {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		var calls sync.WaitGroup
		for i := range 4 {
			calls.Go(func() {
				lock, err := l.TryLock(t.Context(), dblock.RawKey(int64(i)))
				if err == nil {
					go lock.Check(t.Context())
					_ = lock.Release(t.Context())
				}
			})
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
		if f.held() != 0 || f.open() != 0 {
			t.Fatalf("%d held on %d sessions", f.held(), f.open())
		}
	}
}

func TestTokensBelongToTheirKeys(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, &advisory.Options{Fencing: true})
	a, b := dblock.RawKey(7), dblock.RawKey(3)
	first := mustLock(t, l, a)
	if first.Token() != 1 {
		t.Errorf("token %d", first.Token())
	}
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	both := mustLock(t, l, a, b, a)
	defer both.Release(t.Context())
	ofB, ok := both.TokenOf(b)
	if both.Token() != 1+dialect.FenceStride || ofB != 1 || !ok {
		t.Errorf("tokens %d and %d", both.Token(), ofB)
	}
	if _, ok := both.TokenOf(dblock.RawKey(8)); ok {
		t.Error("a token for a key of another lock")
	}
}

func TestTransactionLocksNeedADatabaseThatHasThem(t *testing.T) {
	l := newLocker(t, newFakeServer(), nil)
	if err := l.LockTx(t.Context(), nil, key); !errors.Is(err, dblock.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

func TestOpenFailureIsReported(t *testing.T) {
	f := newFakeServer()
	f.openErr = &dialect.Error{Class: dialect.Unavailable, Err: errors.New("connection refused")}
	l := newLocker(t, f, nil)
	if _, err := l.Lock(t.Context(), key); !errors.Is(err, dblock.ErrUnavailable) {
		t.Errorf("%v", err)
	}
}

// collect is an observer for tests that look at the events when all is quiet.
func collect(events *[]dblock.Event) dblock.Observer {
	var mu sync.Mutex
	return dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		mu.Lock()
		defer mu.Unlock()
		*events = append(*events, e)
	})
}
