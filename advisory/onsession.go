package advisory

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/internal/transaction"
)

// InTx runs fn in a transaction on the very session that holds the keys, then
// commits and releases, in that order. The lock cannot be lost without the work:
// whatever ends the session rolls the transaction back before anybody else is
// granted a key. That makes it the safest use of an advisory lock for work in the
// same database; it needs no fencing number.
//
// fn takes the transaction as the type it likes: *sql.Tx where the database was
// opened with a *sql.DB, pgx.Tx where with a pgx pool, or dblock.Tx everywhere;
// another type is refused with [dblock.ErrUnsupported]. It may let
// [Options.StatementGap] pass between two statements. While it runs nobody listens
// on its session: that the lock is lost shows in the next statement, at the latest
// in the commit. The context that it gets ends with ctx and with the locker;
// [FromContext] has the lock's fencing number, not its Check or Release. The session is
// set up as the pool's connections are (with pgx: AfterConnect), but has neither
// statement_timeout nor lock_timeout.
//
// InTx returns the error of fn, after a rollback, joined with that of the release. If
// the connection is lost during the commit nobody knows whether it happened, and
// InTx says so. Nothing is tried again: deadlock.Retry around InTx does that. Each
// call costs a connection, which nobody uses after fn.
func InTx[T any](ctx context.Context, l *Locker, fn func(ctx context.Context, tx T) error, keys ...dblock.Key) error {
	if l == nil || fn == nil {
		return fmt.Errorf("dblock: transaction: %w", errNil)
	}
	_, native := l.db.Natives()
	if err := transaction.Offers[T](native); err != nil {
		return dblock.NewError("transaction", l.db, keys, err)
	}
	return l.onSession(ctx, func(ctx context.Context, s *session) error {
		tx, err := s.conn.Begin(ctx, &sql.TxOptions{Isolation: l.options.Isolation})
		if err != nil {
			return dblock.NewError("begin", l.db, keys, l.db.Classify(err))
		}
		if err := transaction.Set(ctx, l.db, tx, l.options.Deadlock); err != nil {
			_, err = dialect.Begun(ctx, tx, err)
			return dblock.NewError("begin", l.db, keys, err)
		}
		if lock, ok := FromContext(ctx); ok {
			lock.hold.In(tx)
		}
		inside := deadlock.WithTx(ctx, l.db, tx)
		err = transaction.Run(ctx, l.db, tx, keys, func() error { return fn(inside, transaction.As[T](tx)) })
		if err == nil {
			s.settle()
		}
		return err
	}, keys)
}

// OnSession is [InTx] without a transaction: fn gets the connection that holds the
// keys, as a dblock.Conn or, where the database was opened with a pgx pool, a
// *pgx.Conn. Each statement then succeeds or fails together with the lock. fn ends
// what it begins: a transaction that is still open at its return is rolled back, rows
// that are still open cost the session and are an error, and the connection is
// closed whatever fn did to it.
func OnSession[C any](ctx context.Context, l *Locker, fn func(ctx context.Context, conn C) error, keys ...dblock.Key) error {
	if l == nil || fn == nil {
		return fmt.Errorf("dblock: on session: %w", errNil)
	}
	native, _ := l.db.Natives()
	if err := transaction.Offers[C](native); err != nil {
		return dblock.NewError("on session", l.db, keys, err)
	}
	return l.onSession(ctx, func(ctx context.Context, s *session) error {
		return fn(ctx, transaction.As[C](s.conn.Statements()))
	}, keys)
}

var errNil = dialect.Invalidf("the Locker or the function is nil")

func (l *Locker) onSession(ctx context.Context, work func(ctx context.Context, s *session) error, keys []dblock.Key) error {
	lock, err := l.acquireWith(ctx, "lock", false, keys, func(c *call) (*Lock, error) { return l.acquireAlone(c, l.openLendable) })
	if err != nil {
		return err
	}
	return lock.guard(ctx, func(ctx context.Context) error {
		began := false
		err := lock.session.lend(ctx, func(ctx context.Context, s *session) error {
			began = true
			return work(ctx, s)
		})
		if err != nil && !began { // ctx ended just after the grant
			err = dblock.NewError("lock", l.db, keys, l.db.Classify(err))
		}
		return err
	})
}

// openLendable opens a session of the kind that lend needs.
func (l *Locker) openLendable(ctx context.Context) (s *session, reused bool, err error) {
	if ctx.Err() != nil {
		return nil, false, context.Cause(ctx)
	}
	s, err = l.open(ctx, dialect.SessionOptions{StatementGap: l.options.StatementGap})
	return s, false, err
}

// lend lets the holder of the session use its connection until work returns.
func (s *session) lend(ctx context.Context, work func(ctx context.Context, s *session) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(context.Canceled)
	defer context.AfterFunc(s.locker.closing, func() { cancel(errLockerClosed) })()
	return s.use(ctx, func() error {
		s.setLent(true)
		defer s.setLent(false)
		defer func() {
			if ctx.Err() != nil { // for which a driver closes the connection
				s.settle()
			}
			s.reclaim(ctx)
		}()
		return work(ctx, s)
	})
}

// reclaim ends what work has left open before the keys are free. Where that is not
// possible the release closes the session, and the server ends all of it in this
// order.
func (s *session) reclaim(ctx context.Context) {
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.locker.options.AnswerWithin)
	defer cancel()
	s.doubt = s.conn.EndStatements(bounded)
}

// settle says that the session may end from now on: all that was to be done on it
// was done while it held the keys, or was given up.
func (s *session) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settled = true
}

func (s *session) isSettled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled
}

func (s *session) setLent(lent bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lent = lent
}

// refuseLent is for what would wait for the very function that calls it.
func (s *session) refuseLent(op string, keys []dblock.Key) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.lent {
		return nil
	}
	return dblock.NewError(op, s.locker.db, keys, &dialect.Error{Class: dblock.ErrUnsupported,
		Hint: "the session serves the function's own statements: each that succeeds shows that the lock is held, and it is released when the function returns"})
}
