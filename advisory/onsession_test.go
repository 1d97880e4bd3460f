package advisory_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

func TestWhileASessionIsLentNobodyElseUsesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, &advisory.Options{KeepAlive: time.Second, StatementGap: 10 * time.Second})
		err := advisory.OnSession(t.Context(), l, func(ctx context.Context, s *fakeSession) error {
			defer s.alone()() // panics if anything else is under way, and makes that panic
			time.Sleep(30 * time.Second)
			lock, ok := advisory.FromContext(ctx)
			if !ok {
				t.Error("the lock is not in the context")
			}
			for what, err := range map[string]error{"check": lock.Check(ctx), "release": lock.Release(ctx)} {
				if !errors.Is(err, dblock.ErrUnsupported) {
					t.Errorf("%s: %v", what, err)
				}
			}
			return nil
		}, key)
		if err != nil {
			t.Error(err)
		}
		if f.open() != 0 {
			t.Error("a session that others' statements ran on was kept")
		}
	})
}

func TestCloseEndsWorkOnASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeServer()
		l := newLocker(t, f, nil)
		started, result := make(chan struct{}), make(chan error)
		go func() {
			result <- advisory.OnSession(t.Context(), l, func(ctx context.Context, _ *fakeSession) error {
				close(started)
				<-ctx.Done()
				return context.Cause(ctx)
			}, key)
		}()
		<-started
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if err := <-result; !errors.Is(err, dblock.ErrClosed) {
			t.Errorf("%v", err)
		}
	})
}

func TestWorkOnASessionThatCannotBeMeant(t *testing.T) {
	f := newFakeServer()
	l := newLocker(t, f, nil)
	var none func(context.Context, *fakeSession) error
	for what, err := range map[string]error{
		"nil function on a session":   advisory.OnSession(t.Context(), l, none, key),
		"nil function in transaction": advisory.InTx(t.Context(), l, none, key),
		"nil locker on a session":     advisory.OnSession(t.Context(), nil, func(context.Context, *fakeSession) error { return nil }, key),
		"nil locker in a transaction": advisory.InTx(t.Context(), nil, func(context.Context, *fakeSession) error { return nil }, key),
	} {
		if !errors.Is(err, dblock.ErrInvalidOption) {
			t.Errorf("%s: %v", what, err)
		}
	}
	err := advisory.OnSession(t.Context(), l, func(context.Context, string) error { t.Error("called"); return nil }, key)
	if !errors.Is(err, dblock.ErrUnsupported) {
		t.Errorf("a type that the database does not have: %v", err)
	}
	if f.held() != 0 {
		t.Error("a key is still held")
	}
}

func TestAContextThatEndsWithTheGrantIsNamed(t *testing.T) {
	f := newFakeServer()
	refused := 0
	for refused < 3 { // either way is right
		ctx, cancel := context.WithCancel(t.Context())
		grant := dblock.ObserverFunc(func(context.Context, dblock.Event) { cancel() })
		l := newLocker(t, f, &advisory.Options{Observer: grant})
		began := false
		err := advisory.OnSession(ctx, l, func(context.Context, *fakeSession) error { began = true; return nil }, key)
		if began != (err == nil) || (err != nil && dialect.ClassOf(err) != dblock.ErrCanceled) {
			t.Fatalf("began: %t; %v", began, err)
		}
		if err != nil {
			refused++
		}
	}
}

func TestASessionThatEndsAfterTheWorkWasGivenUpIsNoLoss(t *testing.T) {
	f := newFakeServer()
	lost := 0
	l := newLocker(t, f, &advisory.Options{Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		if e.Kind == dblock.EventLost {
			lost++
		}
	})})
	gaveUp := errors.New("gave up")
	run := func(cancelled bool) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		return advisory.OnSession(ctx, l, func(context.Context, *fakeSession) error {
			if cancelled {
				cancel()
			}
			f.kill()
			return gaveUp
		}, key)
	}
	if err := run(true); !errors.Is(err, gaveUp) || errors.Is(err, dblock.ErrLost) || lost != 0 {
		t.Errorf("after the end of the context: %v, %d events of loss", err, lost)
	}
	if err := run(false); !errors.Is(err, gaveUp) || !errors.Is(err, dblock.ErrLost) || lost != 1 {
		t.Errorf("before: %v, %d events of loss", err, lost)
	}
}
