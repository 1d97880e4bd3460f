package postgres_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"net"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestTransactionBeginsWithItsLocks(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		for _, r := range []dialect.TxRequest{
			{Keys: keys(1)}, {Keys: shared(1)}, {Keys: append(shared(1), keys(2, 3)...)},
			{Keys: keys(1), Try: true}, {Keys: keys(1, 2), Try: true},
			{Keys: keys(1), Wait: time.Minute}, {Keys: keys(1, 2), Wait: time.Minute},
			{Keys: keys(math.MinInt64, -1, math.MaxInt64)},
		} {
			tx, err := db.BeginLocked(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted}, r)
			must(t, err)
			if got := held(t, db, pidOf(t, tx), false); len(got) != len(r.Keys) {
				t.Errorf("%+v: the transaction holds %v", r, got)
			}
			must(t, tx.Commit(t.Context()))
		}
		tx, err := db.BeginRows(t.Context(), nil, dialect.RowRequest{Keys: keys(math.MinInt64, -1, math.MaxInt64)})
		must(t, err)
		other := begin(t, db, nil)
		for _, id := range []int64{math.MinInt64, -1, math.MaxInt64} {
			_, err := db.LockRows(t.Context(), other, dialect.RowRequest{Keys: keys(id), Try: true})
			wantClass(t, err, dialect.NotAcquired)
		}
		must(t, tx.Commit(t.Context()))
		_, err = db.LockRows(t.Context(), other, dialect.RowRequest{Keys: keys(math.MinInt64, -1, math.MaxInt64), Try: true})
		must(t, err)
	})
}

func TestTransactionThatCannotBeginLockedLeavesNothing(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		lock(t, session(t, db), keys(20))
		holder := begin(t, db, nil)
		_, err := db.LockRows(t.Context(), holder, dialect.RowRequest{Keys: keys(20)})
		must(t, err)
		begins := func(r dialect.TxRequest) func(context.Context) (dialect.OwnedTx, error) {
			return func(ctx context.Context) (dialect.OwnedTx, error) { return db.BeginLocked(ctx, nil, r) }
		}
		for _, test := range []struct {
			name  string
			class dialect.Class
			begin func(context.Context) (dialect.OwnedTx, error)
		}{
			{"try", dialect.NotAcquired, begins(dialect.TxRequest{Keys: keys(20), Try: true})},
			{"try of several", dialect.NotAcquired, begins(dialect.TxRequest{Keys: keys(10, 20), Try: true})},
			{"bounded wait", dialect.Timeout, begins(dialect.TxRequest{Keys: keys(20), Wait: 20 * time.Millisecond})},
			{"bounded wait for several", dialect.Timeout, begins(dialect.TxRequest{Keys: keys(10, 20), Wait: 20 * time.Millisecond})},
			{"no key", dialect.InvalidKey, begins(dialect.TxRequest{})},
			{"isolation level", dialect.Unsupported, func(ctx context.Context) (dialect.OwnedTx, error) {
				return db.BeginLocked(ctx, &sql.TxOptions{Isolation: sql.LevelLinearizable}, dialect.TxRequest{Keys: keys(1)})
			}},
			{"missing table", dialect.Setup, func(ctx context.Context) (dialect.OwnedTx, error) {
				return db.BeginRows(ctx, nil, dialect.RowRequest{Table: dialect.Table{Name: "missing"}, Keys: keys(1)})
			}},
			{"read-only", dialect.Unsupported, func(ctx context.Context) (dialect.OwnedTx, error) {
				return db.BeginRows(ctx, &sql.TxOptions{ReadOnly: true}, dialect.RowRequest{Keys: keys(1)})
			}},
			{"canceled", dialect.Canceled, func(ctx context.Context) (dialect.OwnedTx, error) {
				ctx, cancel := context.WithCancel(ctx)
				var tx dialect.OwnedTx
				result := make(chan error)
				go func() {
					var err error
					tx, err = db.BeginLocked(ctx, nil, dialect.TxRequest{Keys: keys(10, 20)})
					result <- err
				}()
				eventuallyWaiting(t, db, 20)
				cancel()
				err := <-result
				return tx, err
			}},
			{"expired", dialect.Timeout, func(ctx context.Context) (dialect.OwnedTx, error) {
				ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
				defer cancel()
				return db.BeginRows(ctx, nil, dialect.RowRequest{Keys: keys(10, 20)})
			}},
		} {
			t.Run(test.name, func(t *testing.T) {
				tx, err := test.begin(t.Context())
				wantClass(t, err, test.class)
				wantOneLine(t, err)
				if tx != nil {
					t.Errorf("%v comes with a transaction", err)
				}
				eventually(t, "only the holder's transaction is open", func() bool {
					return value[int](t, db.SQL(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
						AND pid <> pg_backend_pid() AND xact_start IS NOT NULL AND backend_type = 'client backend'`) == 1
				})
			})
		}
	})
}

// A refusal does not cost the pool its connection.
func TestRefusedBeginKeepsTheConnection(t *testing.T) {
	pool, db, _ := counted(t)
	lock(t, session(t, db), keys(20))
	pid := func() (pid int64) {
		must(t, pool.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		return pid
	}
	before := pid()
	_, err := db.BeginLocked(t.Context(), nil, dialect.TxRequest{Keys: keys(20), Try: true})
	wantClass(t, err, dialect.NotAcquired)
	_, err = db.BeginLocked(t.Context(), nil, dialect.TxRequest{Keys: keys(20), Wait: time.Millisecond})
	wantClass(t, err, dialect.Timeout)
	_, err = db.BeginRows(t.Context(), nil, dialect.RowRequest{Table: dialect.Table{Name: "missing"}, Keys: keys(1)})
	wantClass(t, err, dialect.Setup)
	if after := pid(); after != before {
		t.Errorf("server process %d became %d", before, after)
	}
}

// By hand, or by a function of the application's that does not know better.
func TestLocksOfATransactionThatAStatementEndedAreRefused(t *testing.T) {
	pool, db, _ := counted(t)
	for name, call := range calls(db) {
		t.Run(name, func(t *testing.T) {
			tx, err := pool.Begin(t.Context())
			must(t, err)
			defer tx.Rollback(context.Background())
			_, err = tx.Exec(t.Context(), "COMMIT")
			must(t, err)
			err = call(t.Context(), postgres.Tx(tx))
			wantClass(t, err, dialect.Unsupported)
			wantText(t, err, "begin one")
		})
	}
}

// counted is a database over a pool of one connection that counts the messages to
// the server, which begin a round trip each.
func counted(t *testing.T) (*pgxpool.Pool, *postgres.DB, *atomic.Int64) {
	config, err := pgxpool.ParseConfig(servers.Postgres(t).Database(t))
	must(t, err)
	var messages atomic.Int64
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		return countedConn{c, &messages}, err
	}
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	db, err := postgres.New(t.Context(), pool)
	must(t, err)
	t.Cleanup(func() { must(t, db.Close()) })
	table(t, db, dialect.Table{})
	return pool, db, &messages
}

type countedConn struct {
	net.Conn
	messages *atomic.Int64
}

func (c countedConn) Write(b []byte) (int, error) {
	c.messages.Add(1)
	return c.Conn.Write(b)
}

func TestLocksOfATransactionTakeOneRoundTrip(t *testing.T) {
	pool, db, messages := counted(t)
	begins := map[string]func() (dialect.OwnedTx, error){
		"rows": func() (dialect.OwnedTx, error) {
			return db.BeginRows(t.Context(), nil, dialect.RowRequest{Keys: keys(1)})
		},
		"several rows": func() (dialect.OwnedTx, error) {
			return db.BeginRows(t.Context(), nil, dialect.RowRequest{Keys: keys(1, 2, 3)})
		},
	}
	for name, r := range map[string]dialect.TxRequest{
		"one key": {Keys: keys(1)}, "several keys": {Keys: keys(1, 2, 3)},
		"try": {Keys: keys(1), Try: true}, "try of several": {Keys: keys(1, 2, 3), Try: true},
		"bounded wait": {Keys: keys(1), Wait: time.Minute}, "bounded wait for several": {Keys: keys(1, 2, 3), Wait: time.Minute},
	} {
		begins[name] = func() (dialect.OwnedTx, error) {
			return db.BeginLocked(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted}, r)
		}
	}
	for name, begin := range begins {
		var taken, ended int64
		for range 2 { // the first time pgx prepares the statements
			start := messages.Load()
			tx, err := begin()
			must(t, err)
			taken = messages.Load() - start
			must(t, tx.Commit(t.Context()))
			ended = messages.Load() - start - taken
		}
		if taken != 1 || ended != 1 {
			t.Errorf("%s: %d messages to begin with the locks and %d to commit, want one each", name, taken, ended)
		}
	}

	inTransaction := calls(db)
	delete(inTransaction, "try of several") // releases its savepoint by another message
	for name, call := range inTransaction {
		var taken int64
		for range 2 {
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{})
			must(t, err)
			start := messages.Load()
			must(t, call(t.Context(), postgres.Tx(tx)))
			taken = messages.Load() - start
			must(t, tx.Commit(t.Context()))
		}
		if taken != 1 {
			t.Errorf("%s: %d messages in the caller's transaction, want 1", name, taken)
		}
	}
}

// A statement of the application's own, sent together with the lock, runs when it is
// granted, and sees what the holder before committed.
func TestLockThatIsQueuedBeforeAStatementGuardsIt(t *testing.T) {
	pool, db, _ := counted(t)
	other := opened(t)(overPgx(t, pool.Config().ConnString()))
	exec(t, db.SQL(), "CREATE TABLE account (balance int)")
	exec(t, db.SQL(), "INSERT INTO account VALUES (100)")
	for range 2 {
		holder, err := other.BeginLocked(t.Context(), nil, dialect.TxRequest{Keys: keys(1)})
		must(t, err)
		exec(t, holder, "UPDATE account SET balance = balance - 1")

		var batch pgx.Batch
		batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		batch.Queue("SELECT pg_advisory_xact_lock($1)", keys(1)[0].ID)
		var balance int
		batch.Queue("SELECT balance FROM account").QueryRow(func(row pgx.Row) error { return row.Scan(&balance) })
		result := make(chan error, 1)
		go func() {
			results := pool.SendBatch(t.Context(), &batch)
			result <- errors.Join(results.Close(), results.Tx().Commit(t.Context()))
		}()
		eventuallyWaiting(t, other, 1)
		must(t, holder.Commit(t.Context()))
		must(t, <-result)
		if want := value[int](t, other.SQL(), "SELECT balance FROM account"); balance != want {
			t.Errorf("read a balance of %d, want %d", balance, want)
		}
	}
}

func TestParametersAreWrittenOutLiterally(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		odd := keys(-7, 9)
		odd[0].Name, odd[1].Name = `$1 it's a \ $2`, `"quoted", {braces} and \"`
		for _, several := range [][]dialect.Key{odd, odd[:1]} {
			tx := begin(t, db, nil)
			_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Keys: several, Fence: true})
			must(t, err)
			must(t, tx.Commit(t.Context()))
			var names []string
			for _, k := range several {
				names = append(names, value[string](t, db.SQL(), fmt.Sprint("SELECT name FROM locks WHERE id = ", k.ID)))
			}
			if want := []string{odd[0].Name, odd[1].Name}[:len(several)]; !reflect.DeepEqual(names, want) {
				t.Errorf("names %q, want %q", names, want)
			}
		}
	})
}
