// Package rowlock locks keys inside the transaction that they protect.
//
// Each key is a row of a lock table, which the database locks as it locks any
// row (SELECT … FOR UPDATE). So a lock needs no connection of its own, it is
// given back by the commit or the rollback and by nothing else, it cannot leak
// into a pool, it works behind transaction poolers, and losing it means losing
// the work that it protected too: there is no moment in which a transaction can
// still commit without its locks. Prefer it to package advisory for everything
// that is one transaction.
//
// # Setup
//
// The lock table must exist before the first use: migrations.Setup creates it, as
// does the command "dblock setup". Calls without it return [dblock.ErrSetup].
//
// # In a transaction of the caller's
//
//	rows := rowlock.New(db)
//	err := rows.Lock(ctx, tx, dblock.NewKey("account", from), dblock.NewKey("account", to))
//
// [Locker.Lock] waits until ctx ends, [Locker.LockWithin] for a limited time at most,
// [Locker.TryLock] does not wait, and [Locker.Fence] also returns fencing numbers. Keys
// are held exclusively unless they are [dblock.Key.Shared]. tx is a *sql.Tx, a *sql.Conn on
// which a transaction was begun, a transaction of sqlx or ent, a pgx.Tx by way of
// postgres.Tx(tx), or, of a *gorm.DB in a transaction, its
// Statement.ConnPool.(dblock.Tx). Name all keys in one call where possible: they are
// locked in one global order, so that such calls cannot deadlock each other.
//
// # In a transaction of dblock's
//
//	err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx *sql.Tx) error {
//		…
//	}, dblock.NewKey("account", "42"))
//
// [InTx] begins, locks, runs the function, commits, and starts all of it again
// when the server chose the transaction as the victim of a deadlock or could not
// serialize it.
//
// # Rows of the application's own
//
//	accounts := rowlock.NewRows(db, rowlock.RowsOptions{Table: "account", Key: []string{"id"}})
//	err := accounts.Lock(ctx, tx, rowlock.PK(from), rowlock.PK(to))
//
// [Rows] locks rows of any table by their primary key, of one column or several, and
// needs no lock table. [Rows.Lock] waits, [Rows.TryLock] does not,
// [Rows.LockWithin] waits for some time; a row that does not exist is
// [dblock.ErrNotFound], with its key in the text. Rows of one call are locked in the
// order and by the equality that the database has for the key's columns, so that
// such calls cannot deadlock each other, however their values are written.
//
//	jobs := rowlock.NewRows(db, rowlock.RowsOptions{Table: "job", Key: []string{"id"}})
//	claimed, err := jobs.Claim(ctx, tx, rowlock.ClaimOptions{Limit: 100, Where: "state = 'new'"})
//
// [Rows.Claim] takes rows that nobody has locked, for workers that share a table of
// work.
//
// # Messages that are delivered more than once
//
//	once := rowlock.NewOnce(db)
//	first, err := once.Mark(ctx, tx, dblock.NewKey("message", id))
//
// [Once.Mark] marks a message as processed in the transaction that processes it, and
// tells whether that was done before; [Once.MarkEach] does so for several. [DoOnce]
// begins, marks, runs a function for a message that is new, and commits. A second
// delivery waits for the first one's transaction. The marks are rows of a lock table of
// their own, "once", with the time of the mark as fence; [Once.Clean] deletes old ones,
// of messages that can come no more.
//
// PostgreSQL marks with one INSERT. InnoDB and SQL Server create the row of a new message
// on a second connection before, which costs a commit more, for many messages of one call
// on InnoDB about one in a hundred.
//
// # What works where
//
//	                                PostgreSQL    MySQL, MariaDB    SQL Server
//	Lock, TryLock, Fence, InTx      yes           yes               yes
//	shared keys, LockWithin         yes           yes               yes
//	Guard, Clean                    yes           yes               yes
//	Once, DoOnce                    yes           yes               yes
//	after TryLock was refused       goes on       goes on           goes on, not under XACT_ABORT
//	after a limit ended a wait      goes on       goes on           goes on, not under XACT_ABORT
//	after Lock met a deadlock       goes on       rolled back       rolled back
//	after ctx ended during Lock     roll back     roll back         roll back
//	behind a transaction pooler     AllowUnsafe   yes               yes
//	Rows: Lock, TryLock, LockWithin yes           yes               yes
//	ForNoKeyUpdate                  yes           as ForUpdate      as ForUpdate
//	ForShare                        yes           yes               yes
//	after LockWithin timed out      goes on       goes on           goes on, not under XACT_ABORT
//	Claim                           yes           yes               not under SERIALIZABLE, SNAPSHOT
//	of rows that are missing        no trace      see below         their places stay locked
//
// PostgreSQL behind such a pooler is opened with Options.AllowUnsafe, for the sake
// of advisory locks.
//
// An error of a call in the caller's transaction ends with what is left of the
// transaction; deadlock.Remains tells a program. Where it is "goes on", the keys
// of earlier calls are still held. Of several keys of the failed call itself,
// PostgreSQL gives back those that were granted; MySQL, MariaDB and SQL Server
// keep a row locked until the transaction ends, so that rolling back frees others
// sooner.
//
// MySQL, MariaDB and SQL Server create the row of a key that is used for the
// first time on a second connection of the pool, so that first users cannot
// deadlock. Where the pool has none left, a call with a new key can be refused
// with [dblock.ErrCapacity]. Shared keys are created beside the transaction on
// PostgreSQL too, and fencing numbers drawn there on every database, so that the first
// user does not exclude the others and no rollback gives a number again: PostgreSQL
// through pgx has a connection of its own for that, lib/pq keeps one of the pool.
//
// First users of a key do not deadlock, at any isolation level, also if some of them
// roll back. Under REPEATABLE READ and SERIALIZABLE PostgreSQL lets no transaction lock
// a row that is newer than its snapshot, because it was created or because a holder at
// these levels has committed: [Locker.Lock] in a transaction of the caller's then
// returns [dblock.ErrSerialization], and the transaction is to be started again.
// [InTx] does that.
//
// Under REPEATABLE READ and SERIALIZABLE, InnoDB locks the gap in which a missing row
// would be: others wait to insert there. After a deadlock, which leaves nothing of
// the transaction, MySQL would let an *sql.Tx lock rows for no longer than the
// statement; MariaDB and PostgreSQL refuse it. So do not go on after a deadlock.
//
// # What the transaction sees
//
// Under READ COMMITTED a statement that follows the lock sees all that former
// holders committed. REPEATABLE READ and SERIALIZABLE read from a snapshot, which
// may be older than the lock: of the moment of the transaction's first statement
// on PostgreSQL, of its first plain SELECT on InnoDB. A holder that had waited
// could read what its predecessor has replaced. PostgreSQL does not let it
// overwrite that (a serialization failure, which InTx cures by starting again),
// InnoDB does. So: lock first, read afterwards, and read rows that are going to be
// written with SELECT … FOR UPDATE, which sees the newest state at every level;
// or use READ COMMITTED, see [Options].Isolation.
//
// The pattern that reads nothing stale is [InTx], with one isolation level for all who
// lock a key: it locks with the first statement of the transaction, and fn reads and
// writes afterwards. On PostgreSQL an exclusive lock at those two levels writes its row,
// so that who has waited for such a holder is refused and starts again, whatever it
// would go on to read; the row of a holder under READ COMMITTED, and of shared ones, is
// only locked, and tells a waiter at those levels nothing. SQL Server under SNAPSHOT
// refuses to overwrite what is newer than the snapshot, and no more. Where many wait
// for one key at those levels, each start again costs one of Options.Retry's Attempts;
// READ COMMITTED has none.
//
// # Fencing
//
// The fencing number of a key grows with every grant, to [Locker.Fence] or to an
// advisory lock with advisory.Options.Fencing: a key has one sequence. The numbers are
// committed as they are drawn, so that neither a rollback nor a crash gives one twice,
// and begin at the server's clock in microseconds since 1970, so that they go on
// growing when the rows, or the table, were deleted, unless the clock was put back
// meanwhile. They are below 2^53.
//
// Handed on to a resource outside of the database, a number lets that resource refuse
// a writer that has been overtaken: one whose number is below the highest seen. In
// the database itself, [Locker.Guard] does so inside of the transaction that writes,
// for the holder of an advisory lock for example:
//
//	err = rowlock.InTx(ctx, rows, func(ctx context.Context, tx *sql.Tx) error {
//		if err := rows.Guard(ctx, tx, key, lock.Token()); err != nil {
//			return err // dblock.ErrNotHeld: somebody else has the key by now
//		}
//		…
//	}, another)
//
// and [Fenced] guards a row of the user's by a column of its own. A transaction that
// holds its row lock to the end does not need either.
//
// # Housekeeping
//
// The lock table keeps a row for each key that was ever locked, of about 100 bytes.
// [Locker.Clean] deletes those that nobody uses, beside everything else that goes on.
package rowlock
