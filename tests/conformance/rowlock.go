package conformance

import (
	"context"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

var rowlockClauses = []clause{
	{"rows exclude each other", rowsExclude},
	{"rows: a refused try leaves the transaction usable", rowsTryRefused},
	{"rows: a try does not wait for a creator", rowsTryAgainstCreator},
	{"rows: opposite orders do not deadlock", rowsOppositeOrders},
	{"rows: first use does not deadlock", rowsFirstUse},
	{"rows: the fencing number grows and survives", rowsFencing},
	{"rows: a cancelled wait leaves nothing", rowsCancelledWait},
	{"rows: a cancel at any moment leaves nothing", rowsCancelledAnytime},
	{"rows: the missing table is named", rowsMissingTable},
	{"rows: mistakes are told before anything is locked", rowsMistakes},
	{"rows: a table of another shape is named", rowsMistakenTable},
	{"rows: a pool smaller than the crowd", rowsSmallPool},
	{"rows: the last connection of a pool", rowsLastConnection},
	{"rows: a read-only transaction", rowsReadOnly},
	{"rows: an error or a panic of the function rolls back", rowsFailure},
	{"rows: the function ended the transaction", rowsEndedByFunction},
	{"rows: a lost session is no success", rowsLostSession},
	{"rows: fencing numbers never come again", rowsFencingForEver},
	{"rows: fencing numbers do not starve a small pool", rowsFencingSmallPool},
	{"rows: a fencing number on a pool of one connection", rowsFencingPoolOfOne},
	{"rows: a guard refuses who was overtaken", rowsGuard},
	{"rows: a guard holds against a paused transaction", rowsGuardPaused},
	{"rows: a guard behind an older snapshot", rowsGuardBehindSnapshot},
	{"rows: a guard refuses what cannot be meant", rowsGuardRefuses},
	{"rows: a fenced column refuses who was overtaken", rowsFencedColumn},
	{"rows: shared holders", rowsShared},
	{"rows: first use of shared keys", rowsSharedFirstUse},
	{"rows: shared and exclusive in one call", rowsMixedModes},
	{"rows: a wait ends with its limit", rowsWaitLimits},
	{"rows: an observer hears of a long wait", rowsWaitAnnounced},
	{"rows: first use in the caller's transaction", rowsFirstUseByCallers},
	{"rows: cleaning deletes what nobody uses", rowsClean},
	{"rows: cleaning beside lockers", rowsCleanBesideLockers},
	{"rows: cleaning names the privilege that it lacks", rowsCleanDenied},
	{"rows: no stale read follows the lock", rowsNoStaleRead},
	{"rows: no stale read decides what is inserted", rowsNoStaleReadBeforeInsert},
	{"once: a message is the first once", onceFirst},
	{"once: a second delivery waits for the first", onceWaits},
	{"once: deliveries in any order do not deadlock", onceDeadlocks},
	{"once: exactly once, whoever is killed", onceKilled},
	{"once: exactly once, though answers of commits are lost", onceUnansweredCommits},
	{"once: a transaction of dblock's", onceInTx},
	{"once: what cannot be marked is refused", onceRefuses},
	{"once: cleaning deletes old marks only", onceClean},
	{"once: cleaning beside deliveries", onceCleanBesideDeliveries},
}

// blocked counts the sessions on the database that wait for a row or a transaction.
var blocked = map[string]string{
	"postgres": `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock'`,
	"mysql":   innodbBlocked,
	"mariadb": innodbBlocked,
	"sqlserver": `SELECT count(*) FROM sys.dm_exec_requests
		WHERE database_id = DB_ID() AND blocking_session_id <> 0`,
}

const innodbBlocked = `SELECT count(*) FROM information_schema.innodb_trx t
	JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
	WHERE p.db = DATABASE() AND t.trx_state = 'LOCK WAIT'`

// openTransactions counts those on the database, but that of the question.
var openTransactions = map[string]string{
	"postgres": `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
		AND backend_type = 'client backend'`,
	"mysql":   innodbTransactions,
	"mariadb": innodbTransactions,
	"sqlserver": `SELECT count(*) FROM sys.dm_tran_session_transactions t
		JOIN sys.dm_exec_sessions s ON s.session_id = t.session_id
		WHERE s.database_id = DB_ID() AND s.session_id <> @@SPID AND t.is_user_transaction = 1`,
}

const innodbTransactions = `SELECT count(*) FROM information_schema.innodb_trx t
	JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
	WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()`

// number asks from outside.
func (d *Database) number(t testing.TB, query string) int {
	t.Helper()
	var n int
	if err := d.SQL.QueryRowContext(testContext(t), query).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

func (d *Database) awaitBlocked(t testing.TB, n int) {
	t.Helper()
	eventually(t, "sessions wait for rows", func() bool { return d.number(t, blocked[d.DB.Name()]) == n })
}

// checkNothingOpen fails if a transaction does not end, or if somebody holds a key.
func (d *Database) checkNothingOpen(t testing.TB, keys ...dblock.Key) {
	t.Helper()
	eventually(t, "no transaction is open", func() bool { return d.number(t, openTransactions[d.DB.Name()]) == 0 })
	tx := d.Begin(t, nil)
	defer rollback(t, tx)
	if err := rowlock.New(d.DB).TryLock(testContext(t), tx, keys...); err != nil {
		t.Errorf("a key is still held: %v", err)
	}
}

func rollback(t testing.TB, tx dialect.OwnedTx) {
	t.Helper()
	if err := tx.Rollback(context.Background()); err != nil {
		t.Errorf("rollback: %v", err)
	}
}

func commit(t testing.TB, tx dialect.OwnedTx) {
	t.Helper()
	if err := tx.Commit(testContext(t)); err != nil {
		t.Errorf("commit: %v", err)
	}
}

// mustExec runs a statement in a transaction of the test's own.
func mustExec(t testing.TB, tx dblock.Tx, statement string) {
	t.Helper()
	if err := execute(testContext(t), tx, statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func execute(ctx context.Context, tx dblock.Tx, statement string) error {
	_, err := tx.ExecContext(ctx, statement)
	return err
}

// crowd is how many connections the goroutines of a clause share.
const crowd = 16
