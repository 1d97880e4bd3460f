// Package advisory holds locks that the database keeps for a session
// (pg_advisory_lock, GET_LOCK, sp_getapplock) or, where it can, for a
// transaction. They guard what is not a row: a job that must run once, a
// projector, a file, a call to somebody else's system.
//
//	locks, err := advisory.New(db)
//	defer locks.Close()
//	err = locks.Do(ctx, func(ctx context.Context) error { … }, dblock.NewKey("projector", "orders"))
//
// # What a lock promises
//
// A [Lock] lives on a connection of the locker's own, which other locks share but
// no query of the application can get. As long as the server keeps that session, nobody else is
// granted the key. If the session ends (killed by an administrator, by a
// failover, by the network), the lock ends with it: the locker notices, cancels
// [Lock.Context] with a cause that matches dblock.ErrLost, and never takes the
// lock again behind the holder's back.
//
// Noticing takes time (see [Options.KeepAlive]), and a paused process notices
// only when it goes on. What must not be done twice even then belongs into a
// transaction that checks a fencing number ([Lock.Token]), or under a row lock
// (package rowlock), which ends with the transaction that does the work.
//
// Safest is to do the work on the session that holds the lock: [InTx] runs it in a
// transaction there, [OnSession] statement by statement. Losing the lock and
// losing the work are then one event, at whatever moment it happens, without
// fencing numbers. That is for work in the same database.
//
//	err = advisory.InTx(ctx, locks, func(ctx context.Context, tx pgx.Tx) error { … }, dblock.NewKey("projector", "orders"))
//
// Locks of a transaction end with its commit or rollback, and so cannot be lost
// without the work either, where the database has them: [DoTx] begins a transaction of
// the application's pool with them, [Locker.LockTx] takes them in one that has begun.
//
// An acquire that returns an error holds nothing. A session whose state is in
// doubt, after a cancelled wait for instance, is closed and never used again.
//
// # Locks are not re-entrant
//
// The same key taken twice, even by one goroutine, waits for itself: a holder
// that needs to know whether it holds a key keeps its Lock at hand. Keys of one
// call may repeat; they are taken once.
//
// # Locks inside of locks
//
// Take keys that are held together in one call: such calls cannot deadlock each other. Of
// nested calls no server sees the deadlock, since each waits on a connection of its own or
// in the process: it lasts until a context or [Options.WaitLimit] ends one of the waits,
// with dblock.ErrTimeout. [Options.Checker] finds such calls in development and in tests.
package advisory
