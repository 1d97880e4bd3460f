package rowlock

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/internal/transaction"
)

// OnceOptions shape a [Once]. The zero value, and nil, mean the defaults.
type OnceOptions struct {
	// Schema is where the table is; on MySQL and MariaDB that is a database. Default:
	// the connection's own.
	Schema string
	// Table keeps the marks: a lock table of their own, which migrations.Setup and
	// "dblock setup" create. Default: "once".
	Table string
	// Isolation is the isolation level of the transactions that [DoOnce] begins. Default:
	// the database's.
	Isolation sql.IsolationLevel
	// Retry says how often and how soon [DoOnce] starts again. Default: that of
	// deadlock.Retry. Its Keys are set by DoOnce, and its Observer is the one below
	// unless it has its own.
	Retry *deadlock.RetryOptions
	// Checker learns in which order messages are marked inside other locks, for development
	// and tests. The key that it sees of a message has Table as its first part, so that this
	// is the class of all marks, and then the message's. Default: none, which costs nothing.
	Checker *deadlock.Checker
	// Observer hears of waits that are not over soon and of retries. Default: none.
	Observer dblock.Observer
}

// Once remembers which messages were processed, for deliveries that can come more than
// once. It holds no connection and need not be closed; it is safe for concurrent use.
type Once struct{ marks *Locker }

// NewOnce returns a Once. A mistake in its arguments is returned by every call of it,
// as [dblock.ErrInvalidOption].
func NewOnce(db dblock.DB, opts ...*OnceOptions) *Once {
	var o OnceOptions
	if len(opts) > 0 && opts[0] != nil {
		o = *opts[0]
	}
	marks := New(db, &Options{Schema: o.Schema, Table: cmp.Or(o.Table, dialect.OnceTable),
		Isolation: o.Isolation, Retry: o.Retry, Checker: o.Checker, Observer: o.Observer})
	if len(opts) > 1 {
		marks.mistaken = dialect.Invalidf("%d OnceOptions: at most one", len(opts))
	}
	return &Once{marks}
}

// Mark marks a message as processed in the transaction that processes it, and reports
// whether it is the first to do so. If not, the message was processed before, by a
// transaction that is committed, or earlier in this one: do not process it again. The
// mark is committed with the work or rolled back with it, whatever happens to the
// process or the server in between.
//
// While another transaction that has marked the message is open, Mark waits for its
// end, until ctx ends or the server's own limit is reached; it is the first if that
// rolls back. This holds at every isolation level. Under REPEATABLE READ and
// SERIALIZABLE on PostgreSQL, and SNAPSHOT on SQL Server, a message that was processed
// after the transaction's snapshot is [dblock.ErrSerialization]: start the transaction
// again, as [DoOnce] does. There as on InnoDB, what the transaction has read before may
// be older than the work of the one before: mark first, read afterwards.
//
// Other errors are those of [Locker.Lock]; after any of them roll back.
func (o *Once) Mark(ctx context.Context, tx dblock.Tx, message dblock.Key) (first bool, err error) {
	marked, err := o.MarkEach(ctx, tx, message)
	return err == nil && marked[0], err
}

// MarkEach is [Once.Mark] for several messages, as many as dblock.MaxKeys: it reports
// for each, in the order of the call, whether this is the first time. Of a message that
// is named twice the second is none. Messages of one call are marked in one order for all
// callers, so that such calls cannot deadlock each other. After an error none counts
// as marked: roll back.
func (o *Once) MarkEach(ctx context.Context, tx dblock.Tx, messages ...dblock.Key) (first []bool, err error) {
	const op = "mark"
	l := o.marks
	if l.mistaken != nil {
		return nil, l.failed(op, messages, l.mistaken)
	}
	if err := checkTx(tx); err != nil {
		return nil, l.failed(op, messages, err)
	}
	first, _, err = o.mark(ctx, tx, messages)
	if err != nil {
		return nil, l.failed(op, messages, withRemains(l.db, err))
	}
	return first, nil
}

func (o *Once) mark(ctx context.Context, tx dblock.Tx, messages []dblock.Key) (first []bool, hold *deadlock.Hold, err error) {
	// What it checks of the keys is the same for marks; their rows are other ones.
	if _, err := deadlock.OrderRows(o.marks.db, messages...); err != nil {
		return nil, nil, err
	}
	keys := make([]dialect.Key, len(messages))
	for i, message := range messages {
		if message.Mode() != dblock.Exclusive {
			return nil, nil, dialect.Invalidf("message %s is shared: only one may process it", message)
		}
		keys[i] = message.ResolveDigest()
	}
	ordered := slices.Clone(keys)
	slices.SortFunc(ordered, byDigest)
	ordered = slices.CompactFunc(ordered, func(a, b dialect.Key) bool { return a.ID == b.ID && a.Name == b.Name })
	for i := range len(ordered) - 1 {
		if ordered[i].ID == ordered[i+1].ID {
			return nil, nil, dialect.Collides(ordered[i])
		}
	}
	hold = o.beginHold(ctx, tx, messages)
	stop := o.marks.announceWait(ctx, messages)
	marked, err := o.marks.db.MarkRows(ctx, tx, dialect.MarkRequest{Table: o.marks.table(), Keys: ordered})
	stop()
	if err != nil {
		return nil, nil, err
	}
	hold.Acquired()
	first = make([]bool, len(messages))
	for i, key := range keys {
		place, _ := slices.BinarySearchFunc(ordered, key, byDigest)
		first[i], marked[place] = marked[place], false
	}
	return first, hold, nil
}

// beginHold tells the Checker of a call, which marks in the order of digests.
func (o *Once) beginHold(ctx context.Context, tx dblock.Tx, messages []dblock.Key) *deadlock.Hold {
	checker := o.marks.options.Checker
	if checker == nil {
		return nil
	}
	sorted := slices.Clone(messages)
	slices.SortFunc(sorted, func(a, b dblock.Key) int { return byDigest(a.ResolveDigest(), b.ResolveDigest()) })
	sorted = slices.Compact(sorted)
	call := deadlock.Call{Kind: "mark", Tx: tx}
	for _, message := range sorted {
		parts := message.Parts()
		if len(parts) == 0 {
			parts = []string{message.String()}
		}
		key := dblock.NewKey(slices.Concat([]string{o.marks.table().String()}, parts)...)
		call.Keys, call.Order = append(call.Keys, key), append(call.Order, key.ResolveID())
	}
	return checker.Begin(ctx, call)
}

func byDigest(a, b dialect.Key) int { return cmp.Compare(a.ID, b.ID) }

// DoOnce begins a transaction, marks the message in it, runs fn if it is the first to do
// so, and commits. It reports whether the work of fn was committed; false without an
// error means that the message was processed before. All of it starts again after a
// deadlock or a serialization failure. What [InTx] says of fn, of its errors, and of a
// connection that is lost during the commit is true here too, but that calling again is
// safe: who does learns whether it happened.
func DoOnce[T any](ctx context.Context, o *Once, fn func(ctx context.Context, tx T) error, message dblock.Key) (first bool, err error) {
	const op = "once"
	if o == nil {
		return false, fmt.Errorf("dblock: %s: %w", op, dialect.Invalidf("the Once is nil"))
	}
	l, messages := o.marks, []dblock.Key{message}
	if l.mistaken != nil {
		return false, l.failed(op, messages, l.mistaken)
	}
	if fn == nil {
		return false, l.failed(op, messages, dialect.Invalidf("fn is nil"))
	}
	_, native := l.db.Natives()
	if err := transaction.Offers[T](native); err != nil {
		return false, l.failed(op, messages, err)
	}
	err = deadlock.Retry(ctx, l.db, func(ctx context.Context) error {
		tx, err := transaction.Begin(ctx, l.db, &sql.TxOptions{Isolation: l.options.Isolation}, deadlock.Settings{})
		if err != nil {
			return l.failed(op, messages, l.db.Classify(err))
		}
		var hold *deadlock.Hold
		defer func() { hold.Release() }()
		return transaction.Run(ctx, l.db, tx, messages, func() error {
			var marked []bool
			if marked, hold, err = o.mark(ctx, tx, messages); err != nil {
				return l.failed(op, messages, err)
			}
			if first = marked[0]; !first {
				return nil
			}
			return fn(hold.Context(ctx), transaction.As[T](tx))
		})
	}, transaction.Retries(l.options.Retry, messages, l.options.Observer))
	return first && err == nil, err
}

// Clean deletes the marks that are older than the Age of the options, and returns how
// many; it is [Locker.Clean] of the table of marks. A message that is delivered again
// later than that is processed again: Age must be longer than the broker, or whoever
// delivers, goes on to try. It counts from the mark, by the server's clock, which must
// not jump ahead by as much; marks of transactions that are open are never deleted.
func (o *Once) Clean(ctx context.Context, opts ...*CleanOptions) (deleted int64, err error) {
	return o.marks.Clean(ctx, opts...)
}
