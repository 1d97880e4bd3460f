package postgres_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/rowlock"
)

// A pgx.Tx is the same transaction in each adapter that is made of it.
func TestCheckerKnowsATransactionOfPgx(t *testing.T) {
	db := throughPgx(t)
	checker := deadlock.NewChecker(nil)
	rows := rowlock.New(db, &rowlock.Options{Checker: checker})
	a, b := dblock.NewKey("a"), dblock.NewKey("b")
	for range 2 {
		tx := begin(t, db, nil).Native().(pgx.Tx)
		for _, k := range []dblock.Key{a, b} {
			must(t, rows.Lock(t.Context(), postgres.Tx(tx), k))
		}
		must(t, tx.Rollback(t.Context()))
		a, b = b, a
	}
	if found := checker.Inversions(); len(found) != 1 {
		t.Errorf("%d inversions, want one: %v", len(found), found)
	}
}

func TestDeadlockTimeoutLastsAsLongAsItsTransaction(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		show := func(tx dialect.Tx, want string) {
			t.Helper()
			exec(t, tx, `DO $$ BEGIN ASSERT current_setting('deadlock_timeout') = '`+want+`', current_setting('deadlock_timeout'); END $$`)
		}
		tx := begin(t, db, nil)
		must(t, db.SetDeadlock(t.Context(), tx, dialect.DeadlockSettings{}))
		show(tx, "1s")
		must(t, db.SetDeadlock(t.Context(), tx, dialect.DeadlockSettings{Timeout: 1500*time.Microsecond + 1}))
		show(tx, "2ms")
		must(t, tx.Commit(t.Context()))
		show(begin(t, db, nil), "1s")
	})
}

func TestDeadlockTimeoutTakesAPrivilege(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		tx := begin(t, db, nil)
		exec(t, tx, `CREATE ROLE dblock_nobody`)
		exec(t, tx, `SET LOCAL ROLE dblock_nobody`)
		err := db.SetDeadlock(t.Context(), tx, dialect.DeadlockSettings{Timeout: time.Second})
		wantClass(t, err, dialect.Denied)
		if !strings.Contains(err.Error(), "GRANT SET ON PARAMETER deadlock_timeout") {
			t.Errorf("%v", err)
		}
	})
}
