package rowlock

import (
	"context"
	"math"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// CleanOptions shape [Locker.Clean] and [Once.Clean]. The zero value, and nil, mean the defaults.
type CleanOptions struct {
	// Age is how long ago, by the server's clock, the latest fencing number of a key was
	// drawn when the rows that remember it may go, however often it has guarded since. So
	// a [Locker.Guard] refuses a holder who was overtaken for that long at least, and
	// perhaps no more afterwards: Age must be longer than any holder can be paused. The
	// present holder may be older than that: its guard passes all the same. No number is
	// given again. Of a mark of Once: how long ago it was made.
	// Default: 30 days.
	Age time.Duration
	// Batch is how many rows are looked at in one transaction. Default: 100.
	Batch int
	// Pause is the time between two batches. Default: none.
	Pause time.Duration
}

// Clean deletes the rows of the lock table that nobody uses, and returns how many.
// Locked rows are skipped: no lock is lost, and who comes to lock a row while it is
// being deleted waits a moment and creates it again. A program may call Clean as
// often as it likes, beside everything else; once a day is plenty.
//
// MySQL and MariaDB delete what an earlier call, at least two minutes before, found
// unused, if it was not used since: the first call deletes nothing.
//
// Under REPEATABLE READ and SERIALIZABLE on PostgreSQL, a transaction that comes to lock
// a row which was deleted after its snapshot gets [dblock.ErrSerialization]; [InTx]
// starts it again.
//
// Errors: [dblock.ErrInvalidOption], [dblock.ErrSetup], [dblock.ErrDenied] without the
// privilege DELETE. What was deleted before stays so.
func (l *Locker) Clean(ctx context.Context, opts ...*CleanOptions) (deleted int64, err error) {
	const op = "clean"
	if l.mistaken != nil {
		return 0, l.failed(op, nil, l.mistaken)
	}
	o, err := cleanOptions(opts)
	if err != nil {
		return 0, l.failed(op, nil, err)
	}
	r := dialect.CleanRequest{Table: l.table(), From: math.MinInt64, Rows: o.Batch, Age: o.Age}
	for {
		var page dialect.Cleaned
		err := deadlock.Retry(ctx, l.db, func(ctx context.Context) (err error) {
			page, err = l.db.CleanRows(ctx, r)
			return err
		})
		if err != nil {
			return deleted, l.failed(op, nil, err)
		}
		deleted += page.Deleted
		if !page.More || page.Last == math.MaxInt64 {
			return deleted, nil
		}
		r.From = page.Last + 1
		select {
		case <-time.After(o.Pause):
		case <-ctx.Done():
			return deleted, l.failed(op, nil, l.db.Classify(ctx.Err()))
		}
	}
}

func cleanOptions(opts []*CleanOptions) (o CleanOptions, err error) {
	switch {
	case len(opts) > 1:
		return o, dialect.Invalidf("%d CleanOptions: at most one", len(opts))
	case len(opts) == 1 && opts[0] != nil:
		o = *opts[0]
	}
	switch {
	case o.Age < 0:
		return o, dialect.Invalidf("Age is %v: must not be negative; 0 means the default", o.Age)
	case o.Batch < 0 || o.Batch > dblock.MaxKeys:
		return o, dialect.Invalidf("Batch is %d: 1 to %d, or 0 for the default", o.Batch, dblock.MaxKeys)
	case o.Pause < 0:
		return o, dialect.Invalidf("Pause is %v: must not be negative", o.Pause)
	}
	if o.Age == 0 {
		o.Age = 30 * 24 * time.Hour
	}
	if o.Batch == 0 {
		o.Batch = 100
	}
	return o, nil
}
