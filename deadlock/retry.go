package deadlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sethvargo/go-retry"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// RetryOptions shape [Retry]. The zero value, and nil, mean the defaults.
type RetryOptions struct {
	// Attempts is how often the transaction runs at most, the first time
	// included. Default: 10.
	Attempts int
	// Backoff bounds the pause after the first failure; the bound doubles with
	// each further one. The pause itself is drawn evenly from between zero and the
	// bound, so that transactions which failed together do not meet again.
	// Default: 10 ms.
	Backoff time.Duration
	// MaxBackoff is where the bound stops to grow. Default: 1 s.
	MaxBackoff time.Duration
	// Budget bounds the whole: no attempt begins later than this after the first began.
	// Default: no bound but Attempts and the context.
	Budget time.Duration
	// Timeouts starts again also after a wait that reached its limit on the server or a
	// WaitLimit, while ctx goes on: 55P03, 1205 of MySQL and MariaDB, 1222. It may last as
	// long again. A deadline of fn's own is none of them: it may have ended a commit, of
	// which nobody knows then whether it was done. Default: such a failure is passed on.
	Timeouts bool
	// Keys are what the transaction locks, for events and errors to name.
	Keys []dblock.Key
	// Observer hears an EventRetried before each pause.
	Observer dblock.Observer
}

// Validate returns [dblock.ErrInvalidOption] for values that cannot be meant.
func (o *RetryOptions) Validate() error {
	_, err := o.withDefaults()
	return err
}

func (o *RetryOptions) withDefaults() (RetryOptions, error) {
	if o == nil {
		o = &RetryOptions{}
	}
	filled := *o
	switch {
	case filled.Attempts < 0:
		return filled, dialect.Invalidf("Attempts is %d: at least 1, or 0 for the default", filled.Attempts)
	case filled.Backoff < 0:
		return filled, dialect.Invalidf("Backoff is %v: more than zero, or 0 for the default", filled.Backoff)
	case filled.MaxBackoff < 0:
		return filled, dialect.Invalidf("MaxBackoff is %v: more than zero, or 0 for the default", filled.MaxBackoff)
	case filled.Budget < 0:
		return filled, dialect.Invalidf("Budget is %v: more than zero, or 0 for no bound", filled.Budget)
	}
	if filled.Attempts == 0 {
		filled.Attempts = 10
	}
	if filled.Backoff == 0 {
		filled.Backoff = 10 * time.Millisecond
	}
	if filled.MaxBackoff == 0 {
		filled.MaxBackoff = max(time.Second, filled.Backoff)
	}
	if filled.MaxBackoff < filled.Backoff {
		return filled, dialect.Invalidf("MaxBackoff %v is less than Backoff %v", filled.MaxBackoff, filled.Backoff)
	}
	return filled, nil
}

// backoff is exponential with full jitter:
// https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func (o RetryOptions) backoff() retry.Backoff {
	b := retry.NewExponential(o.Backoff)
	b = retry.WithCappedDuration(o.MaxBackoff, b)
	b = retry.WithFullJitter(b)
	return retry.WithMaxRetries(uint64(o.Attempts-1), b)
}

// Retry runs fn, and runs it again after a deadlock or a serialization failure, and
// after a timeout if the options say so.
//
// fn performs one whole transaction: it begins it, ends it on every path (with a
// rollback where it fails), and returns the errors that it gets. It must be
// prepared to run several times.
//
// fn uses the context that it is given: a Retry that is called with it on the
// same db, inside fn, runs its own function once and passes the failure on, so
// that it is always the outermost transaction that starts again. So does a Retry
// inside the functions of rowlock.InTx, advisory.DoTx and advisory.InTx, and with
// the context of [WithTx], which says the same of a transaction of the caller's: dblock
// cannot know that fn works in one otherwise.
//
// A Retry on another db, inside fn, is about a transaction of its own, and starts that
// again by itself. What it has tried in vain no Retry around it tries further: attempts add
// up, and do not multiply. Each Budget counts by itself; a deadline of ctx bounds them all.
//
// Locks that are held around Retry, by advisory.Do for instance, stay held during its
// pauses: where the cycle can go through them, Retry belongs around them.
//
// An error of fn that another run cannot cure comes back as it is. After the last
// attempt, or when the budget is used up, the error says how many there were, and
// matches both [dblock.Error] and the driver's own. If ctx ends during a pause the error matches the cause of that
// and the last failure. Bad options: [dblock.ErrInvalidOption]. A panic of fn
// passes through.
func Retry(ctx context.Context, db dblock.DB, fn func(ctx context.Context) error, opts ...*RetryOptions) error {
	switch {
	case dialect.IsNil(db):
		return fmt.Errorf("dblock: retry: %w", dialect.Invalidf("db is nil"))
	case fn == nil:
		return fmt.Errorf("dblock: retry: %w", dialect.Invalidf("fn is nil"))
	case len(opts) > 1:
		return dblock.NewError("retry", db, nil, dialect.Invalidf("%d RetryOptions: at most one", len(opts)))
	}
	var o *RetryOptions
	if len(opts) == 1 {
		o = opts[0]
	}
	options, err := o.withDefaults()
	if err != nil {
		return dblock.NewError("retry", db, nil, err)
	}
	if ctx.Value(outermost{db}) != nil {
		return fn(ctx)
	}
	return run(ctx, db, fn, options)
}

// outermost marks the context of a function that Retry runs again.
type outermost struct{ db dblock.DB }

func run(ctx context.Context, db dblock.DB, fn func(ctx context.Context) error, o RetryOptions) error {
	var backoff retry.Backoff // made after a failure: its source of chance costs as much as a statement
	began := time.Now()
	marked := context.WithValue(ctx, outermost{db}, true)
	for attempt := 1; ; attempt++ {
		failure := fn(marked)
		if failure == nil || !o.cures(ctx, db, failure) {
			return failure
		}
		failure = classify(db, failure)
		if backoff == nil {
			backoff = o.backoff()
		}
		pause, stop := backoff.Next()
		if stop {
			return o.giveUp(db, attempt, fmt.Errorf("attempt %d of %d: %w", attempt, o.Attempts, failure))
		}
		if o.Budget > 0 && time.Since(began)+pause > o.Budget {
			return o.giveUp(db, attempt, fmt.Errorf("attempt %d, the budget of %v allows no other: %w", attempt, o.Budget, failure))
		}
		if o.Observer != nil {
			o.Observer.Observe(ctx, dblock.Event{
				Kind: dblock.EventRetried, Dialect: db.Name(), Keys: o.Keys, Duration: pause, Err: failure})
		}
		if err := wait(ctx, pause); err != nil {
			return o.giveUp(db, attempt, fmt.Errorf("%w before attempt %d of %d, after %w", err, attempt+1, o.Attempts, failure))
		}
	}
}

// gaveUp is a failure that a Retry has tried to cure in vain, as often as it may.
type gaveUp struct{ error }

func (g gaveUp) Unwrap() error { return g.error }

func (o RetryOptions) giveUp(db dblock.DB, attempt int, failure error) error {
	if attempt == 1 {
		return dblock.NewError("retry", db, o.Keys, failure)
	}
	return dblock.NewError("retry", db, o.Keys, gaveUp{failure})
}

// cures reports whether another run may succeed.
func (o RetryOptions) cures(ctx context.Context, db dblock.DB, failure error) bool {
	if errors.As(failure, new(gaveUp)) {
		return false
	}
	return IsRetryable(db, failure) || o.Timeouts && ctx.Err() == nil && IsTimeout(db, failure) && !hitDeadline(failure)
}

// hitDeadline: what the application did itself ended with a deadline, where a wait limit of
// dblock's has a class.
func hitDeadline(failure error) bool {
	return dialect.ClassOf(failure) == "" && errors.Is(failure, context.DeadlineExceeded)
}

func wait(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ended(ctx)
}

// ended is nil as long as ctx has not ended.
func ended(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	class := dblock.ErrCanceled
	if errors.Is(err, context.DeadlineExceeded) {
		class = dblock.ErrTimeout
	}
	if cause := context.Cause(ctx); !errors.Is(cause, err) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return &dialect.Error{Class: class, Err: err}
}
