package advisory_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

type outcome struct {
	lock *advisory.Lock
	err  error
}

// renewing has a locker hold a key on a session that waited for it, with somebody in its
// queue who came after the grant.
func renewing(t *testing.T, f *fakeServer, ctx context.Context) (l, others *advisory.Locker, first *advisory.Lock, later chan outcome) {
	l, others = newLocker(t, f, nil), newLocker(t, f, nil)
	before := mustLock(t, others, key)
	granted := make(chan *advisory.Lock)
	go func() { granted <- mustLock(t, l, key) }()
	synctest.Wait()
	mustRelease(t, before)
	first = <-granted
	later = make(chan outcome, 1)
	go func() {
		lock, err := l.Lock(ctx, key)
		later <- outcome{lock, err}
	}()
	synctest.Wait()
	return l, others, first, later
}

func mustBeGranted(t *testing.T, o outcome) *advisory.Lock {
	t.Helper()
	if o.err != nil {
		t.Fatal(o.err)
	}
	return o.lock
}

// A session that gives a key back for those who came later waits for it again itself,
// behind those of other processes, and the release waits for nobody.
func TestThoseWhoCameLaterWaitOnTheHoldersSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		_, others, first, later := renewing(t, f, t.Context())
		f.delay = time.Second
		next := make(chan *advisory.Lock)
		go func() { next <- mustLock(t, others, key) }()
		time.Sleep(10 * time.Second)
		opened, began := f.opens(), time.Now()
		mustRelease(t, first)
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the release took %v", waited)
		}
		theirs := <-next
		select {
		case o := <-later:
			t.Fatalf("granted beside another holder: %+v", o)
		case <-time.After(10 * time.Second):
		}
		mustRelease(t, theirs)
		mustRelease(t, mustBeGranted(t, <-later))
		if n := f.opens(); n != opened {
			t.Errorf("%d sessions were opened, %d before the release", n, opened)
		}
	})
}

func TestARenewedWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		ctx, cancel := context.WithCancel(t.Context())
		_, others, first, later := renewing(t, f, ctx)
		go func() {
			theirs := mustLock(t, others, key)
			time.Sleep(time.Minute)
			mustRelease(t, theirs)
		}()
		synctest.Wait()
		mustRelease(t, first)
		synctest.Wait()
		cancel()
		if o := <-later; !errors.Is(o.err, dblock.ErrCanceled) {
			t.Errorf("%v", o.err)
		}
		if n := f.waiters(); n != 0 {
			t.Errorf("%d sessions wait", n)
		}
		time.Sleep(2 * time.Minute)
		if n := f.held(); n != 0 {
			t.Errorf("%d keys are held", n)
		}
	})
}

// Nobody holds anything on a session that waits: its loss is no error.
func TestALossDuringARenewedWaitCostsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l, others, first, later := renewing(t, f, t.Context())
		next := make(chan *advisory.Lock)
		go func() { next <- mustLock(t, others, key) }()
		synctest.Wait()
		mustRelease(t, first)
		theirs := <-next
		synctest.Wait()
		f.killWaiter(key.ID())
		mustRelease(t, theirs)
		mustRelease(t, mustBeGranted(t, <-later))
		mustRelease(t, mustLock(t, l, key))
	})
}

func TestARenewalAsksALivingSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		_, _, first, later := renewing(t, f, t.Context())
		f.killHolder(key.ID())
		if err := first.Release(t.Context()); !errors.Is(err, dblock.ErrLost) {
			t.Errorf("%v", err)
		}
		mustRelease(t, mustBeGranted(t, <-later))
	})
}

func TestCloseEndsARenewedWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l, others, first, later := renewing(t, f, t.Context())
		go func() { _ = mustLock(t, others, key) }()
		synctest.Wait()
		mustRelease(t, first)
		synctest.Wait()
		go func() {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}()
		if o := <-later; !errors.Is(o.err, dblock.ErrClosed) {
			t.Errorf("%v", o.err)
		}
	})
}

// A session that others share never waits.
func TestASharedSessionDoesNotRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l, others := newLocker(t, f, nil), newLocker(t, f, nil)
		first := mustTry(t, l, key)
		theirs, later := make(chan *advisory.Lock), make(chan *advisory.Lock)
		go func() { theirs <- mustLock(t, others, key) }()
		go func() { later <- mustLock(t, l, key) }()
		synctest.Wait()
		mustRelease(t, first)
		held := <-theirs
		mustRelease(t, mustTry(t, l, numbered(1)))
		mustRelease(t, held)
		mustRelease(t, <-later)
	})
}
