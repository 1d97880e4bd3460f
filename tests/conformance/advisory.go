package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

var advisoryClauses = []clause{
	{"advisory/excludes other sessions", advisoryExclusion},
	{"advisory/a try says who holds the key", advisoryBlocker},
	{"advisory/errors read well and lead to their causes", advisoryTexts},
	{"advisory/is not re-entrant", advisoryReentry},
	{"advisory/shared holds stand side by side", advisoryShared},
	{"advisory/several keys, all or nothing", advisorySeveralTry},
	{"advisory/several keys in opposite orders do not deadlock", advisorySeveralOrders},
	{"advisory/keys whose hashes collide cost waiting only", advisoryCollision},
	{"advisory/distinct keys never merge", advisoryDistinct},
	{"advisory/an empty key is refused", advisoryEmptyKey},
	{"advisory/databases on one server do not share keys", advisoryScope},
	{"advisory/a wait ends with its context", advisoryContext},
	{"advisory/a wait limit is neither rounded to for ever nor to a try", advisoryLimits},
	{"advisory/a grant that crosses the cancel is not kept", crossing(byCancel)},
	{"advisory/a grant that crosses the deadline is not kept", crossing(byDeadline)},
	{"advisory/a grant that crosses the wait limit is not kept", crossing(byWaitLimit)},
	{"advisory/a grant that crosses an administrator's cancel is not kept", crossing(byAdministrator)},
	{"advisory/an interrupted wait holds nothing when it returns", advisoryFailedWait},
	{"advisory/a call without its fencing numbers holds nothing when it returns", advisoryFailedFencing},
	{"advisory/a deadlock's victim gives back what the call was granted", advisoryFailedDeadlock},
	{"advisory/a cancel at any moment leaves no write outside of its transaction", advisoryCancelledAnytime},
	{"advisory/a cancel at any moment leaves nothing of a transaction with locks of its own", advisoryTransactionCancelledAnytime},
	{"advisory/a cancelled waiter is out of the queue", advisoryCancelledWaiter},
	{"advisory/a killed session is noticed and never replaced", advisoryKilled},
	{"advisory/idle holds are kept alive", advisoryKeepAlive},
	{"advisory/no query of the application gets the lock's connection", advisoryOwnConnection},
	{"advisory/a pool of one connection is not starved", advisoryStarvation},
	{"advisory/a pool of as many connections as keys are held is not starved", advisoryStarvationSeveral},
	{"advisory/a busy pool that keeps no connection leaves each hold its session", advisoryBusyPool},
	{"advisory/many keys share few sessions", advisoryManyKeys},
	{"advisory/a lost session costs only its own locks", advisoryLossIsOfOneSession},
	{"advisory/a statement that is interrupted costs nobody else's lock", advisoryInterruptedStatements},
	{"advisory/the callers of one process wait with one session", advisoryOneWaiter},
	{"advisory/a key that is passed on within a process comes back to the others", advisoryTurns},
	{"advisory/shared holds of one process count each", advisorySharedHolds},
	{"advisory/a session per lock is an option", advisorySessionPerLock},
	{"advisory/what a session takes three times it gives back three times", advisoryCounting},
	{"advisory/fencing numbers grow with every grant", advisoryFencing},
	{"advisory/fencing waits for no row lock", advisoryFencingBesideRows},
	{"advisory/fencing without its table is refused", advisoryFencingSetup},
	{"advisory/a stale holder's guarded write is refused", advisoryStaleHolder},
	{"advisory/locks of a transaction end with it", advisoryTransaction},
	{"advisory/a transaction that begins with its locks ends with them", advisoryDoTx},
	{"advisory/a wait to begin with locks ends with its context or its limit", advisoryDoTxWait},
	{"advisory/a deadlock starts the whole transaction with its locks again", advisoryDoTxDeadlock},
	{"advisory/work in a transaction that begins with its locks is lost with them", advisoryDoTxLost},
	{"advisory/a cancel at any moment leaves nothing of a transaction that begins with its locks", advisoryDoTxCancelledAnytime},
	{"advisory/a failed acquire leaves the transaction usable", advisoryTransactionFailure},
	{"advisory/work in a transaction on the lock's session ends with the lock", advisoryInTx},
	{"advisory/work in a transaction on the lock's session is lost with the lock", advisoryInTxLost},
	{"advisory/a context that ends during the work is no loss", advisoryInTxCancelled},
	{"advisory/statements on the lock's session are lost with the lock", advisoryOnSession},
	{"advisory/rows that a function leaves open cost the session only", advisoryOpenRows},
	{"advisory/a pause longer than StatementGap ends lock and work", advisoryStatementGap},
	{"advisory/a wait limit in a transaction is neither rounded to for ever nor to a try", advisoryTransactionLimits},
	{"advisory/a transaction that is refused hears who holds the key", advisoryTransactionBlocker},
	{"advisory/a panic releases", advisoryPanic},
	{"advisory/close ends holders and waiters", advisoryClose},
	{"advisory/a killed process frees its keys", advisoryProcess},
}

// newLocker makes a locker and closes it at the end; it then checks that the
// server shows nothing held by it.
func newLocker(t testing.TB, db dblock.DB, opts ...*advisory.Options) *advisory.Locker {
	t.Helper()
	l, err := advisory.New(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return l
}

func mustLock(t testing.TB, l *advisory.Locker, keys ...dblock.Key) *advisory.Lock {
	t.Helper()
	lock, err := l.Lock(testContext(t), keys...)
	if err != nil {
		t.Fatalf("lock %v: %v", keys, err)
	}
	return lock
}

func mustRelease(t testing.TB, lock *advisory.Lock) {
	t.Helper()
	if err := lock.Release(testContext(t)); err != nil {
		t.Fatalf("release: %v", err)
	}
}

// passes starts a call that waits for the keys and gives them back at once.
func passes(ctx context.Context, l *advisory.Locker, keys ...dblock.Key) <-chan error {
	result := make(chan error, 1)
	go func() {
		lock, err := l.Lock(ctx, keys...)
		if err == nil {
			err = lock.Release(ctx)
		}
		result <- err
	}()
	return result
}

// mustBeFree shows that others get the keys now.
func mustBeFree(t testing.TB, l *advisory.Locker, keys ...dblock.Key) {
	t.Helper()
	lock, err := l.TryLock(testContext(t), keys...)
	if err != nil {
		t.Fatalf("not free: %v", err)
	}
	mustRelease(t, lock)
}

// mustBeHeld shows that others do not get the key.
func mustBeHeld(t testing.TB, l *advisory.Locker, keys ...dblock.Key) error {
	t.Helper()
	lock, err := l.TryLock(testContext(t), keys...)
	if err == nil {
		mustRelease(t, lock)
		t.Fatalf("%v: free, should be held", keys)
	}
	if !errors.Is(err, dblock.ErrNotAcquired) {
		t.Fatalf("%v: %v, want ErrNotAcquired", keys, err)
	}
	return err
}

// nothingLeft waits until the server's own view shows no advisory lock of the
// database: neither held nor waited for.
func (d *Database) nothingLeft(t testing.TB) {
	t.Helper()
	var last []dialect.Holding
	var err error
	eventually(t, "an empty lock view", func() bool {
		last, err = d.holdings()
		return err == nil && len(last) == 0
	})
}

// holdings are what the server shows of this database. Lock names are shared by
// the whole server where the database has a scope; others' are left out.
func (d *Database) holdings(keys ...dblock.Key) ([]dialect.Holding, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	resolved := make([]dialect.Key, len(keys))
	for i, k := range keys {
		resolved[i] = k.Resolve(d.DB.Features().Scope)
	}
	found, err := d.DB.Inspect(ctx, resolved...)
	if err != nil || len(keys) > 0 || d.DB.Features().Scope == "" {
		return found, err
	}
	here, err := d.sessions(ctx)
	return slices.DeleteFunc(found, func(h dialect.Holding) bool { return !slices.Contains(here, h.Session) }), err
}

// sessions are those on the database of MySQL or MariaDB.
func (d *Database) sessions(ctx context.Context) (ids []int64, err error) {
	rows, err := d.SQL.QueryContext(ctx, "SELECT id FROM information_schema.processlist WHERE db = DATABASE()")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

// waiting waits until the server shows n waiters for the key.
func (d *Database) waiting(t testing.TB, key dblock.Key, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d waiters for %s", n, key), func() bool {
		found, err := d.holdings(key)
		if err != nil {
			t.Fatalf("inspect: %v", err)
		}
		waiters := 0
		for _, h := range found {
			if h.Waiting {
				waiters++
			}
		}
		return waiters >= n
	})
}

// kill ends a session by the server's own means.
func (d *Database) kill(t testing.TB, session int64) {
	t.Helper()
	if _, err := d.SQL.ExecContext(t.Context(), fmt.Sprintf(d.h.Kill, session)); err != nil {
		t.Fatalf("kill session %d: %v", session, err)
	}
}

// holder is the session that the server shows as holding the key.
func (d *Database) holder(t testing.TB, key dblock.Key) int64 {
	t.Helper()
	found, err := d.holdings(key)
	if err != nil {
		t.Fatalf("inspect: %v", err)
	}
	for _, h := range found {
		if !h.Waiting {
			return h.Session
		}
	}
	t.Fatalf("the server shows no holder of %s: %+v", key, found)
	return 0
}
