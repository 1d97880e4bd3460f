// Package deadlock keeps transactions that lock more than one thing out of each
// other's way, starts those again that the server had to sacrifice, and shows who
// waits for whom.
//
// # Order
//
// Two transactions that lock the same things in different orders can each wait
// for the other. The calls of dblock that take several keys lock them in one
// global order, [Order] and [OrderRows], so they cannot; what an application
// locks in several calls, or by its own statements, still can. A [Checker] finds that in
// development and in tests, before it happens.
//
// Not every deadlock is seen by the server. Between locks of transactions it is. Advisory
// locks of sessions that are taken one inside the other each wait on a connection of
// their own, or within the process, so that no server sees the cycle: it lasts until a
// context or advisory.Options.WaitLimit ends one of the waits. MySQL and MariaDB see none
// that goes through an advisory lock and a row.
//
// # Retry
//
// A server that finds a cycle fails one of its transactions, the victim. Under
// REPEATABLE READ and SERIALIZABLE it also fails transactions that have seen data
// which others changed meanwhile. Both mean the same to the application: nothing
// was committed, and the whole transaction has to be started again.
//
//	err := deadlock.Retry(ctx, db, func(ctx context.Context) error {
//		tx, err := pool.BeginTx(ctx, nil)
//		if err != nil {
//			return err
//		}
//		defer tx.Rollback()
//		…
//		return tx.Commit()
//	})
//
// Always the whole and outermost transaction: after a deadlock InnoDB has rolled
// all of it back, so that statements which are repeated alone would run outside
// of any transaction, and without what came before them. rowlock.InTx and advisory.DoTx do
// all of this by themselves, and inside of a transaction Retry leaves it to whoever began
// that, see [WithTx]. [RetryOptions] bounds the attempts and the time.
//
// [Settings] let a transaction give way, or not, where the database has that.
//
// # Who waits for whom
//
// [Inspect] takes a snapshot of the locks of a database: advisory locks, and those
// of rows and tables that somebody waits for, as a graph of sessions. It names the
// sessions that block others without waiting themselves, and the deadlocks, also
// those that a database does not see. On MySQL and MariaDB that is every one that
// goes through an advisory lock and a row.
//
//	s, err := deadlock.Inspect(ctx, db)
//	fmt.Print(s.Text()) // or s.DOT(), s.Mermaid(), or s as JSON
//
// Where its user may not see everything the snapshot says what is missing, and
// which GRANT or plugin would show it.
//
// # Classes
//
// [IsDeadlock], [IsSerialization], [IsTimeout] and [IsLost] say what an error
// means, on every database, whether it comes from dblock or straight from the
// driver. [Remains] says what is left of the transaction:
//
//	what happened                PostgreSQL    MySQL         MariaDB       SQL Server
//	deadlock of rows             40P01         1213          1213          1205
//	                             aborted       nothing       nothing       nothing
//	deadlock of advisory locks   40P01         3058          1213          -3
//	                             aborted       usable        usable        usable
//	serialization failure        40001         –             –             3960
//	                             aborted                                   nothing
//	lock held, NOWAIT            55P03         3572          1205          1222
//	                             aborted       usable        usable        usable
//	lock wait timed out          55P03         1205          1205          1222
//	                             aborted       usable        usable        usable
//	statement cancelled          57014         1317, 3024    1317, 1969    –
//	                             aborted       usable        usable
//	session lost                 57P01, 25P03  –             –             –
//	                             nothing       nothing       nothing       nothing
//
// "aborted" is a transaction that keeps its locks and accepts nothing but a
// rollback, be it to a savepoint; dblock sets one around its own statements on
// PostgreSQL, and where that saved the transaction, its errors say "usable". A
// deadlock of advisory locks that MySQL and MariaDB report leaves the transaction
// alone and keeps every lock that the session already had: give them back before
// another try. 1213 names both kinds on MariaDB, so the raw code alone does not
// tell which it was. Under XACT_ABORT every error of SQL Server ends the
// transaction.
//
// The codes are documented in
// https://www.postgresql.org/docs/current/errcodes-appendix.html,
// https://dev.mysql.com/doc/mysql-errors/en/server-error-reference.html,
// https://mariadb.com/kb/en/mariadb-error-code-reference/ and
// https://learn.microsoft.com/sql/relational-databases/errors-events/database-engine-events-and-errors.
package deadlock
