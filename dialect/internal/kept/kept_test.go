package kept

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/dblock-go/dblock/dialect"
)

var errBroken = errors.New("broken")

// opener counts.
type opener struct{ opened, closed int }

func (o *opener) keep() *Conn[int] {
	return New(func(context.Context) (int, error) { o.opened++; return o.opened, nil },
		func(int) error { o.closed++; return nil },
		func(err error) bool { return errors.Is(err, errBroken) })
}

func TestOneConnectionServesAllInTurns(t *testing.T) {
	var o opener
	k := o.keep()
	inside := 0
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			err := k.Use(t.Context(), func(int) error {
				inside++
				defer func() { inside-- }()
				if inside != 1 {
					t.Error("two at once")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if err := k.Close(); err != nil || o != (opener{1, 1}) {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestBrokenConnectionIsReplacedOnce(t *testing.T) {
	var o opener
	k := o.keep()
	calls := 0
	breaks := func(int) error { calls++; return errBroken }
	if err := k.Use(t.Context(), breaks); !errors.Is(err, errBroken) || calls != 1 {
		t.Errorf("a new one that is broken: %d calls, %v", calls, err)
	}
	refused := errors.New("the statement is refused")
	if err := k.Use(t.Context(), func(int) error { return refused }); !errors.Is(err, refused) || o != (opener{2, 1}) {
		t.Errorf("%+v, %v", o, err)
	}
	err := k.Use(t.Context(), func(conn int) error {
		if conn == 2 {
			return errBroken
		}
		return nil
	})
	if err != nil || o != (opener{3, 2}) {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestWhoWaitsForATurnEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o opener
		k := o.keep()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- k.Use(t.Context(), func(int) error { <-ctx.Done(); return nil }) }()
		synctest.Wait()
		other, stop := context.WithCancel(t.Context())
		stop()
		if err := k.Use(other, func(int) error { t.Error("it is not its turn"); return nil }); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if err := k.Close(); !errors.Is(err, dialect.Capacity) {
			t.Errorf("closed under its user: %v", err)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := k.Close(); err != nil || o != (opener{1, 1}) {
			t.Errorf("%+v, %v", o, err)
		}
	})
}

// What Prepare waits for, users do not wait for; only one of them opens.
func TestPreparedConnectionServesOnceItIsThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o opener
		k := o.keep()
		slowly := make(chan int)
		slow := func(context.Context) (int, error) { return <-slowly, nil }
		prepared := make(chan struct{})
		go func() { defer close(prepared); k.Prepare(t.Context(), slow) }()
		synctest.Wait()
		k.Prepare(t.Context(), slow) // does not wait
		if err := k.Use(t.Context(), func(int) error { return nil }); err != nil || o != (opener{1, 0}) {
			t.Errorf("during it: %+v, %v", o, err)
		}
		slowly <- 7
		<-prepared
		if o != (opener{1, 1}) {
			t.Errorf("one too many: %+v", o)
		}
		if err := k.Use(t.Context(), func(int) error { return errBroken }); !errors.Is(err, errBroken) || o != (opener{2, 3}) {
			t.Errorf("%+v, %v", o, err)
		}
		go k.Prepare(t.Context(), slow)
		slowly <- 8
		synctest.Wait()
		var served int
		if err := k.Use(t.Context(), func(conn int) error { served = conn; return nil }); err != nil || served != 8 || o != (opener{2, 3}) {
			t.Errorf("%d, %+v, %v", served, o, err)
		}
	})
}
