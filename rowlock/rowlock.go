package rowlock

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// Options shape a [Locker]. The zero value, and nil, mean the defaults.
type Options struct {
	// Schema is where the lock table is; on MySQL and MariaDB that is a database.
	// Default: the connection's own.
	Schema string
	// Table is the lock table. Default: "locks".
	Table string
	// Isolation is the isolation level of the transactions that [InTx] begins; a
	// level that the database does not have fails there. Default: the database's.
	Isolation sql.IsolationLevel
	// WaitLimit bounds every wait for keys, of Lock, Fence and InTx, in addition to its
	// context, on every database to the millisecond. When it ends a wait the
	// transaction goes on, as far as the table in the documentation of the package
	// says, while the end of a context may cost the connection. InTx waits for its
	// connection besides. Default: no limit.
	WaitLimit time.Duration
	// Deadlock makes the transactions that [InTx] begins more or less likely victims of
	// deadlocks, where the database has that. It costs a round trip or two for each.
	// Default: the server's.
	Deadlock deadlock.Settings
	// Retry says how often and how soon [InTx] starts again. Default: that of
	// deadlock.Retry. Its Keys are set by InTx, and its Observer is the one below
	// unless it has its own.
	Retry *deadlock.RetryOptions
	// Checker learns in which order keys are locked inside one another, for development and
	// tests. Default: none, which costs nothing.
	Checker *deadlock.Checker
	// Observer hears of waits that are not over soon, when keys were acquired, of
	// retries, and of the release at the end of transactions that [InTx] began.
	Observer dblock.Observer
}

// Locker locks rows of one lock table. It holds no connection and need not be
// closed; it is safe for concurrent use.
type Locker struct {
	db       dblock.DB
	options  Options
	mistaken error // what was wrong with the arguments of New
}

// New returns a Locker. A mistake in its arguments is returned by every call of
// the Locker, as [dblock.ErrInvalidOption], or [dblock.ErrUnsupported] for what the
// database does not have.
func New(db dblock.DB, opts ...*Options) *Locker {
	l := &Locker{db: db}
	if len(opts) > 0 && opts[0] != nil {
		l.options = *opts[0]
	}
	switch isolation := l.options.Isolation; {
	case dialect.IsNil(db):
		l.mistaken = dialect.Invalidf("db is nil")
	case len(opts) > 1:
		l.mistaken = dialect.Invalidf("%d Options: at most one", len(opts))
	case isolation < sql.LevelDefault || isolation > sql.LevelLinearizable:
		l.mistaken = dialect.Invalidf("Isolation is %d: use a level of database/sql", isolation)
	case l.options.WaitLimit < 0:
		l.mistaken = dialect.Invalidf("WaitLimit is %v: must not be negative; 0 means no limit", l.options.WaitLimit)
	default:
		l.mistaken = cmp.Or(l.options.Retry.Validate(), l.options.Deadlock.Check(db))
	}
	return l
}

// Lock locks the keys for the rest of the transaction. It waits for other holders
// until ctx ends, or [Options.WaitLimit], or the server's own limit is reached
// (innodb_lock_wait_timeout, lock_timeout), and holds all of the keys or returns an
// error. Keys that are [dblock.Key.Shared] are held beside other shared holders; of
// a key that is named in both modes, the exclusive one counts.
//
// Errors: [dblock.ErrTimeout], [dblock.ErrCanceled], [dblock.ErrDeadlock],
// [dblock.ErrSerialization], [dblock.ErrSetup], [dblock.ErrInvalidKey],
// [dblock.ErrUnsupported] for a tx that is no transaction. The text ends with what is
// left of the transaction.
func (l *Locker) Lock(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
	_, err := l.callers(ctx, "lock", tx, keys, dialect.RowRequest{Wait: l.options.WaitLimit})
	return err
}

// LockWithin is [Locker.Lock] with a limit of its own, more than zero, instead of
// [Options.WaitLimit]: [dblock.ErrTimeout] if the keys could not be had in that time.
func (l *Locker) LockWithin(ctx context.Context, tx dblock.Tx, limit time.Duration, keys ...dblock.Key) error {
	const op = "lock within"
	if l.mistaken == nil && limit <= 0 {
		return l.failed(op, keys, dialect.Invalidf("the limit is %v: more than zero, or use TryLock", limit))
	}
	_, err := l.callers(ctx, op, tx, keys, dialect.RowRequest{Wait: limit})
	return err
}

// TryLock is [Locker.Lock] without waiting: if somebody else holds one of the
// keys, or is just creating or cleaning away its row, the error is
// [dblock.ErrNotAcquired] and none is held.
func (l *Locker) TryLock(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error {
	_, err := l.callers(ctx, "try", tx, keys, dialect.RowRequest{Try: true})
	return err
}

// Fence is [Locker.Lock] and returns the fencing number of each key, in the order
// of the call: a number that grows with every grant of that key, whether to Fence or
// to an advisory lock. A key given twice gets the same number twice.
//
// The numbers are committed beside the transaction, on a second connection, so that
// neither a rollback nor a crash gives one again. PostgreSQL through pgx has that
// connection of its own, the others take it from the pool, and return
// [dblock.ErrCapacity] where the pool has none: lib/pq for the first call only, if the
// transactions are those of [InTx], which set one apart from then on.
func (l *Locker) Fence(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) ([]int64, error) {
	fences, err := l.callers(ctx, "fence", tx, keys, dialect.RowRequest{Fence: true, Wait: l.options.WaitLimit})
	if err != nil {
		return nil, err
	}
	inCall := make([]int64, len(keys))
	for i, k := range keys {
		inCall[i] = fences[k.ID()]
	}
	return inCall, nil
}

// callers locks in the caller's transaction, which goes on afterwards or does not.
func (l *Locker) callers(ctx context.Context, op string, tx dblock.Tx, keys []dblock.Key, r dialect.RowRequest) (map[int64]int64, error) {
	if l.mistaken != nil {
		return nil, l.failed(op, keys, l.mistaken)
	}
	if err := checkTx(tx); err != nil {
		return nil, l.failed(op, keys, err)
	}
	fences, err := l.lock(ctx, tx, keys, r)
	if err != nil {
		return nil, l.failed(op, keys, withRemains(l.db, err))
	}
	return fences, nil
}

// lock returns the fencing numbers, if the request asks for them, by the key's id.
func (l *Locker) lock(ctx context.Context, tx dblock.Tx, keys []dblock.Key, r dialect.RowRequest) (map[int64]int64, error) {
	ordered, err := deadlock.OrderRows(l.db, keys...)
	if err != nil {
		return nil, err
	}
	r.Table = l.table()
	r.Keys = ordered
	start := time.Now()
	hold := l.beginHold(ctx, deadlock.Call{Kind: "row", Keys: keys, Order: ordered, Try: r.Try, Tx: tx})
	stop := func() {}
	if !r.Try {
		stop = l.announceWait(ctx, keys)
	}
	numbers, err := l.db.LockRows(ctx, tx, r)
	stop()
	if err != nil {
		return nil, err
	}
	hold.Acquired()
	l.observe(ctx, dblock.EventAcquired, keys, time.Since(start))
	if !r.Fence {
		return nil, nil
	}
	fences := make(map[int64]int64, len(ordered))
	for i, k := range ordered {
		fences[k.ID] = numbers[i]
	}
	return fences, nil
}

// beginHold tells the Checker of a call, and keeps the locks of different tables apart.
func (l *Locker) beginHold(ctx context.Context, c deadlock.Call) *deadlock.Hold {
	if l.options.Checker == nil {
		return nil
	}
	if table := l.table().String(); table != (dialect.Table{}).String() {
		c.Kind = table + " " + c.Kind
	}
	return l.options.Checker.Begin(ctx, c)
}

func (l *Locker) table() dialect.Table {
	return dialect.Table{Schema: l.options.Schema, Name: l.options.Table}
}

// checkTx refuses what would give a lock back as soon as it is granted.
func checkTx(tx dblock.Tx) error {
	if dialect.IsNil(tx) {
		return &dialect.Error{Class: dblock.ErrUnsupported, Hint: "the transaction is nil: pass the one that the lock protects, or use rowlock.InTx"}
	}
	if _, pool := tx.(*sql.DB); pool {
		return &dialect.Error{Class: dblock.ErrUnsupported,
			Hint: "a row lock lasts as long as its transaction, and *sql.DB is none: pass a *sql.Tx, or use rowlock.InTx"}
	}
	return nil
}

// withRemains tells the caller, whose transaction it is, what is left of it.
func withRemains(db dblock.DB, err error) error {
	switch dialect.ClassOf(err) {
	case dblock.ErrInvalidKey, dblock.ErrInvalidOption, dblock.ErrUnsupported:
		if dialect.ClassOf(err) != dblock.ErrInvalidKey || deadlock.Remains(db, err) != dialect.RemainsAborted {
			return err // found out before the transaction was touched
		}
	case dblock.ErrNotHeld:
		return err // the transaction is of no use, whatever the server thinks of it
	case dblock.ErrClosed:
		return fmt.Errorf("%w; the transaction has ended: lock before that", err)
	}
	switch deadlock.Remains(db, err) {
	case dialect.RemainsUsable:
		return fmt.Errorf("%w; the transaction goes on without these keys", err)
	case dialect.RemainsAborted:
		return fmt.Errorf("%w; the transaction accepts only a rollback", err)
	case dialect.RemainsNothing:
		return fmt.Errorf("%w; the server has rolled back the transaction: start it again", err)
	default:
		return fmt.Errorf("%w; roll back the transaction", err)
	}
}

func (l *Locker) failed(op string, keys []dblock.Key, err error) error {
	if dialect.IsNil(l.db) {
		return fmt.Errorf("dblock: %s: %w", op, err)
	}
	return dblock.NewError(op, l.db, keys, err)
}

// waitingAfter is how long a wait may take before the observer is told of it.
const waitingAfter = 200 * time.Millisecond

// announceWait tells the observer of a wait that is not over soon. The function
// that it returns ends that.
func (l *Locker) announceWait(ctx context.Context, keys []dblock.Key) (stop func()) {
	if l.options.Observer == nil {
		return func() {}
	}
	done := make(chan struct{})
	timer := time.AfterFunc(waitingAfter, func() {
		defer close(done)
		l.observe(ctx, dblock.EventWaiting, keys, waitingAfter)
	})
	return func() {
		if !timer.Stop() {
			<-done
		}
	}
}

func (l *Locker) observe(ctx context.Context, kind dblock.EventKind, keys []dblock.Key, d time.Duration) {
	if l.options.Observer != nil {
		l.options.Observer.Observe(ctx, dblock.Event{Kind: kind, Dialect: l.db.Name(), Keys: keys, Duration: d})
	}
}
