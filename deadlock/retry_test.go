package deadlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// failing fails the first n times.
func failing(n int, err error) (fn func(context.Context) error, runs *int) {
	runs = new(int)
	return func(context.Context) error {
		*runs++
		if *runs <= n {
			return err
		}
		return nil
	}, runs
}

func TestRetryRunsAgain(t *testing.T) {
	for _, class := range []dialect.Class{dialect.Deadlock, dialect.Serialization} {
		t.Run(string(class), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fn, runs := failing(3, driverError{class})
				if err := deadlock.Retry(t.Context(), &fakeDB{}, fn); err != nil {
					t.Fatal(err)
				}
				if *runs != 4 {
					t.Errorf("%d runs, want 4", *runs)
				}
			})
		})
	}
}

func TestRetryPassesOtherErrorsOn(t *testing.T) {
	for _, failure := range []error{errors.New("not enough money"), driverError{dialect.Lost}, driverError{dialect.Timeout}} {
		fn, runs := failing(1, failure)
		if err := deadlock.Retry(t.Context(), &fakeDB{}, fn); err != failure {
			t.Errorf("%v, want %v itself", err, failure)
		}
		if *runs != 1 {
			t.Errorf("%v: %d runs, want 1", failure, *runs)
		}
	}
}

func TestRetryGivesUp(t *testing.T) {
	for _, test := range []struct {
		options *deadlock.RetryOptions
		runs    int
		text    string
	}{
		{nil, 10, "attempt 10 of 10"},
		{&deadlock.RetryOptions{}, 10, "attempt 10 of 10"},
		{&deadlock.RetryOptions{Attempts: 3}, 3, "attempt 3 of 3"},
		{&deadlock.RetryOptions{Attempts: 1}, 1, "attempt 1 of 1"},
	} {
		synctest.Test(t, func(t *testing.T) {
			fn, runs := failing(100, driverError{dialect.Deadlock})
			err := deadlock.Retry(t.Context(), &fakeDB{}, fn, test.options)
			if *runs != test.runs {
				t.Errorf("%d runs, want %d", *runs, test.runs)
			}
			if !strings.Contains(err.Error(), test.text) {
				t.Errorf("%q does not contain %q", err, test.text)
			}
			if !errors.Is(err, dblock.ErrDeadlock) || !errors.Is(err, driverError{dialect.Deadlock}) {
				t.Errorf("%v does not match both the class and the driver's error", err)
			}
			var e *dblock.Error
			if !errors.As(err, &e) || e.Dialect != "fake" || e.Code != "12345" {
				t.Errorf("%#v is not a complete dblock.Error", err)
			}
		})
	}
}

func TestRetryBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pauses []time.Duration
		keys := []dblock.Key{dblock.NewKey("account", "1")}
		options := &deadlock.RetryOptions{
			Attempts: 8, Backoff: 100 * time.Millisecond, MaxBackoff: time.Second, Keys: keys,
			Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
				if e.Kind != dblock.EventRetried || e.Dialect != "fake" || len(e.Keys) != 1 || !errors.Is(e.Err, dblock.ErrDeadlock) {
					t.Errorf("unexpected event %+v", e)
				}
				pauses = append(pauses, e.Duration)
			}),
		}
		start := time.Now()
		fn, _ := failing(7, driverError{dialect.Deadlock})
		if err := deadlock.Retry(t.Context(), &fakeDB{}, fn, options); err != nil {
			t.Fatal(err)
		}
		limit, sum := 100*time.Millisecond, time.Duration(0)
		for i, pause := range pauses {
			if pause < 0 || pause >= limit {
				t.Errorf("pause %d is %v, not below %v", i, pause, limit)
			}
			limit = min(2*limit, time.Second)
			sum += pause
		}
		if len(pauses) != 7 {
			t.Errorf("%d pauses, want 7", len(pauses))
		}
		if waited := time.Since(start); waited != sum {
			t.Errorf("waited %v, announced %v", waited, sum)
		}
	})
}

// The options are shared by all calls and must not carry state from one to the next.
func TestRetryOptionsAreNotUsedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		options := &deadlock.RetryOptions{Attempts: 3}
		for range 5 {
			fn, _ := failing(2, driverError{dialect.Deadlock})
			if err := deadlock.Retry(t.Context(), &fakeDB{}, fn, options); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestRetryEndsWithItsContext(t *testing.T) {
	because := errors.New("shutting down")
	for _, test := range []struct {
		name  string
		ctx   func(context.Context) context.Context
		after time.Duration
		class error
		cause error
	}{
		{"cancelled", func(ctx context.Context) context.Context {
			ctx, cancel := context.WithCancelCause(ctx)
			time.AfterFunc(time.Second, func() { cancel(because) })
			return ctx
		}, time.Second, dblock.ErrCanceled, because},
		{"deadline", func(ctx context.Context) context.Context {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			context.AfterFunc(ctx, cancel)
			return ctx
		}, time.Second, dblock.ErrTimeout, context.DeadlineExceeded},
		{"ended before", func(ctx context.Context) context.Context {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx
		}, 0, dblock.ErrCanceled, context.Canceled},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				fn, _ := failing(1000, driverError{dialect.Deadlock})
				// Full jitter draws short pauses too; a thousand hours make one within the second unlikely.
				err := deadlock.Retry(test.ctx(t.Context()), &fakeDB{}, fn,
					&deadlock.RetryOptions{Attempts: 1000, Backoff: 1000 * time.Hour, MaxBackoff: 1000 * time.Hour})
				if waited := time.Since(start); waited != test.after {
					t.Errorf("returned after %v, want %v", waited, test.after)
				}
				if !errors.Is(err, test.class) || !errors.Is(err, test.cause) {
					t.Errorf("%v does not match %v and %v", err, test.class, test.cause)
				}
				if !errors.Is(err, driverError{dialect.Deadlock}) || !strings.Contains(err.Error(), "deadlock") {
					t.Errorf("%v hides the last failure", err)
				}
			})
		})
	}
}

func TestNestedRetryRestartsTheOutermost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, other := &fakeDB{}, &fakeDB{}
		var outer, inner, others int
		err := deadlock.Retry(t.Context(), db, func(ctx context.Context) error {
			outer++
			if err := deadlock.Retry(ctx, other, func(context.Context) error {
				others++
				if others == 1 {
					return driverError{dialect.Deadlock}
				}
				return nil
			}); err != nil {
				return err
			}
			return deadlock.Retry(ctx, db, func(context.Context) error {
				inner++
				if inner < 3 {
					return driverError{dialect.Deadlock}
				}
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		if outer != 3 || inner != 3 {
			t.Errorf("the outer function ran %d times, the inner %d: want 3 of each", outer, inner)
		}
		if others != 4 {
			t.Errorf("on another database: %d runs, want one retry and 4 runs", others)
		}
	})
}

func TestNestedRetriesOfSeveralDatabasesAddUpTheirAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		attempts := func(n int) *deadlock.RetryOptions { return &deadlock.RetryOptions{Attempts: n} }
		for _, test := range []struct {
			inner *deadlock.RetryOptions
			runs  int
			text  string
		}{
			{attempts(4), 4, "attempt 4 of 4"},
			{attempts(1), 5, "attempt 5 of 5"}, // which leaves it to the outer one
		} {
			runs := 0
			err := deadlock.Retry(t.Context(), &fakeDB{}, func(ctx context.Context) error {
				err := deadlock.Retry(ctx, &fakeDB{remains: dialect.RemainsUsable}, func(context.Context) error {
					runs++
					return driverError{dialect.Deadlock}
				}, test.inner)
				return fmt.Errorf("the other database: %w", err)
			}, attempts(5))
			if runs != test.runs || !errors.Is(err, dblock.ErrDeadlock) || !strings.Contains(err.Error(), test.text) {
				t.Errorf("%d runs, %v: want %d, %s", runs, err, test.runs, test.text)
			}
		}
	})
}

func TestRetryPanicPassesThrough(t *testing.T) {
	defer func() {
		if got := recover(); got != "boom" {
			t.Errorf("recovered %v", got)
		}
	}()
	_ = deadlock.Retry(t.Context(), &fakeDB{}, func(context.Context) error { panic("boom") })
	t.Error("no panic")
}

func TestRetryRefusesBadOptions(t *testing.T) {
	never := func(context.Context) error {
		t.Error("fn ran")
		return nil
	}
	for name, options := range map[string][]*deadlock.RetryOptions{
		"Attempts":                    {{Attempts: -1}},
		"Backoff":                     {{Backoff: -1}},
		"MaxBackoff":                  {{MaxBackoff: -1}},
		"Budget":                      {{Budget: -1}},
		"is less than Backoff 1m":     {{Backoff: time.Minute, MaxBackoff: time.Second}},
		"2 RetryOptions":              {nil, nil},
		"1ns is less than Backoff 1s": {{Backoff: time.Second, MaxBackoff: 1}},
	} {
		err := deadlock.Retry(t.Context(), &fakeDB{}, never, options...)
		if !errors.Is(err, dblock.ErrInvalidOption) {
			t.Errorf("%s: %v", name, err)
		} else if !strings.Contains(err.Error(), name) {
			t.Errorf("%q does not name %q", err, name)
		}
	}
	if err := deadlock.Retry(t.Context(), nil, never); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("no db: %v", err)
	}
	if err := deadlock.Retry(t.Context(), &fakeDB{}, nil); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("no function: %v", err)
	}
	if err := (&deadlock.RetryOptions{Backoff: time.Hour}).Validate(); err != nil {
		t.Errorf("a Backoff above the default MaxBackoff: %v", err)
	}
}

func TestRetryAfterTimeoutsIfAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn, runs := failing(3, driverError{dialect.Timeout})
		if err := deadlock.Retry(t.Context(), &fakeDB{}, fn, &deadlock.RetryOptions{Timeouts: true}); err != nil {
			t.Fatal(err)
		}
		if *runs != 4 {
			t.Errorf("%d runs, want 4", *runs)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		runs = new(int)
		err := deadlock.Retry(ctx, &fakeDB{}, func(ctx context.Context) error {
			*runs++
			<-ctx.Done()
			return driverError{dialect.Timeout}
		}, &deadlock.RetryOptions{Timeouts: true})
		if *runs != 1 || err != (driverError{dialect.Timeout}) {
			t.Errorf("after its own deadline: %d runs, %v", *runs, err)
		}
	})
}

// committedLate may have been done.
type committedLate struct{}

func (committedLate) Error() string { return "commit: context deadline exceeded" }
func (committedLate) Unwrap() []error {
	return []error{context.DeadlineExceeded, driverError{dialect.Timeout}}
}

func TestRetryDoesNotRepeatWhatMayHaveBeenCommitted(t *testing.T) {
	fn, runs := failing(1, committedLate{})
	err := deadlock.Retry(t.Context(), &fakeDB{}, fn, &deadlock.RetryOptions{Timeouts: true})
	if *runs != 1 || err != (committedLate{}) {
		t.Errorf("%d runs, %v", *runs, err)
	}
	fn, runs = failing(1, &dialect.Error{Class: dialect.Timeout, Err: context.DeadlineExceeded}) // as of a WaitLimit
	if err := deadlock.Retry(t.Context(), &fakeDB{}, fn, &deadlock.RetryOptions{Timeouts: true}); err != nil || *runs != 2 {
		t.Errorf("after a wait limit: %d runs, %v", *runs, err)
	}
}

func TestRetryKeepsItsBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const budget = 10 * time.Second
		began := time.Now()
		runs := 0
		err := deadlock.Retry(t.Context(), &fakeDB{}, func(context.Context) error {
			if late := time.Since(began); late > budget {
				t.Errorf("an attempt began after %v", late)
			}
			runs++
			time.Sleep(time.Second)
			return driverError{dialect.Deadlock}
		}, &deadlock.RetryOptions{Attempts: 1000, Budget: budget})
		if runs < 2 || runs > 10 {
			t.Errorf("%d runs of a second each in %v", runs, budget)
		}
		if !errors.Is(err, dblock.ErrDeadlock) || !strings.Contains(err.Error(), "budget of 10s") {
			t.Errorf("%v", err)
		}
	})
}

func TestRetryInsideATransactionRunsOnce(t *testing.T) {
	db := &fakeDB{}
	fn, runs := failing(1, driverError{dialect.Deadlock})
	err := deadlock.Retry(deadlock.WithTx(t.Context(), db, nil), db, fn)
	if *runs != 1 || err != (driverError{dialect.Deadlock}) {
		t.Errorf("%d runs, %v: want the failure itself after one", *runs, err)
	}
	fn, runs = failing(1, driverError{dialect.Deadlock})
	if err := deadlock.Retry(deadlock.WithTx(t.Context(), db, nil), &fakeDB{}, fn); err != nil || *runs != 2 {
		t.Errorf("on another database: %d runs, %v", *runs, err)
	}
}
