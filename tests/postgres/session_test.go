package postgres_test

import (
	"context"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// terminate ends a session as an administrator would.
func terminate(t testing.TB, db *postgres.DB, pid int64) {
	t.Helper()
	if !value[bool](t, db.SQL(), "SELECT pg_terminate_backend($1)", pid) {
		t.Fatalf("process %d is not there", pid)
	}
}

// sessions are the kinds of connection that a session may have.
func sessions(t testing.TB, db *postgres.DB) map[string]dialect.Session {
	t.Helper()
	conn, err := db.SQL().Conn(t.Context())
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	borrowed, err := db.OnConn(t.Context(), conn)
	must(t, err)
	t.Cleanup(func() { must(t, borrowed.Close()) })
	return map[string]dialect.Session{"own": session(t, db), "borrowed": borrowed}
}

func TestInterruptedIdleLeavesTheSessionUsable(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		for name, s := range sessions(t, db) {
			t.Run(name, func(t *testing.T) {
				lock(t, s, keys(1))
				for range 2000 {
					ctx, cancel := context.WithCancel(t.Context())
					idle := make(chan error, 1)
					go func() { idle <- s.Idle(ctx) }()
					cancel()
					must(t, <-idle)
					must(t, s.Ping(t.Context()))
				}
				ended, cancel := context.WithCancel(t.Context())
				cancel()
				must(t, s.Idle(ended))
				ok, err := dialect.HoldsAll(t.Context(), s, keys(1))
				must(t, err)
				if !ok {
					t.Error("the lock is gone")
				}
				must(t, s.Release(t.Context(), keys(1)))
			})
		}
	})
}

func TestIdleHearsWhyTheServerEndedTheSession(t *testing.T) {
	db := throughPgx(t)
	for name, s := range sessions(t, db) {
		t.Run(name, func(t *testing.T) {
			idle := make(chan error, 1)
			go func() { idle <- s.Idle(t.Context()) }()
			terminate(t, db, s.ID())
			err := <-idle
			wantClass(t, err, dialect.Lost)
			wantText(t, err, "57P01")
			wantClass(t, s.Ping(t.Context()), dialect.Lost)
			wantClass(t, s.Idle(t.Context()), dialect.Lost)
			must(t, s.Close())
		})
	}
}

func TestServerEndsASessionThatKeepsSilent(t *testing.T) {
	db := throughPgx(t)
	s, err := db.OpenSession(t.Context(), dialect.SessionOptions{KeepAlive: 10 * time.Millisecond})
	must(t, err)
	err = s.Idle(t.Context())
	wantClass(t, err, dialect.Lost)
	wantText(t, err, "57P05")
	wantText(t, err, "idle_session_timeout")
	must(t, s.Close())
}

func TestEndedSessionIsLostOverEveryDriver(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		if hears := db.Features().HearsLoss; hears != (t.Name() != "TestEndedSessionIsLostOverEveryDriver/pq") {
			t.Errorf("HearsLoss is %t", hears)
		}
		for name, s := range sessions(t, db) {
			t.Run(name, func(t *testing.T) {
				lock(t, s, keys(s.ID())) // the server tells the client before it frees the key
				terminate(t, db, s.ID())
				_, err := dialect.HoldsAll(t.Context(), s, keys(s.ID()))
				wantClass(t, err, dialect.Lost)
				wantClass(t, s.Ping(t.Context()), dialect.Lost)
				must(t, s.Close())
				must(t, s.Close())
			})
		}
	})
}

// A trigger of the lock table tells: only a session itself knows its settings.
func TestSettingsOfASession(t *testing.T) {
	want := map[string]string{
		"application_name":                    "nightly",
		"lock_timeout":                        "20s", // while it asks for the key
		"statement_timeout":                   "0",
		"idle_in_transaction_session_timeout": "3s",
		"idle_session_timeout":                "3s",
		"default_transaction_isolation":       "read committed",
		"synchronous_commit":                  "on",
		"tcp_keepalives_idle":                 "3",
		"tcp_keepalives_interval":             "1",
		"tcp_keepalives_count":                "8",
		"tcp_user_timeout":                    "11000",
		"client_connection_check_interval":    "1s",
	}
	dsn := servers.Postgres(t).Database(t)
	admin := servers.Postgres(t).Open(t, dsn)
	database := value[string](t, admin, "SELECT quote_ident(current_database())")
	for _, setting := range []string{"lock_timeout = '10ms'", "statement_timeout = '10s'", "idle_session_timeout = '10s'",
		"idle_in_transaction_session_timeout = '10s'", "synchronous_commit = off", "default_transaction_isolation = 'serializable'"} {
		exec(t, admin, "ALTER DATABASE "+database+" SET "+setting)
	}
	db := opened(t)(overPgx(t, dsn))
	table(t, db, dialect.Table{})
	for _, statement := range []string{
		"CREATE TABLE seen AS SELECT name, setting FROM pg_settings WHERE false",
		`CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN INSERT INTO seen SELECT name, current_setting(name) FROM pg_settings; RETURN new; END'`,
		"CREATE TRIGGER see BEFORE INSERT ON locks FOR EACH ROW EXECUTE FUNCTION see()",
	} {
		exec(t, db.SQL(), statement)
	}
	s, err := db.OpenSession(t.Context(), dialect.SessionOptions{Application: "nightly", KeepAlive: time.Second})
	must(t, err)
	defer s.Close()
	_, err = s.Acquire(t.Context(), dialect.Request{Keys: keys(1), Fence: &dialect.Table{}})
	must(t, err)
	for name, setting := range want {
		if got := value[string](t, admin, "SELECT setting FROM seen WHERE name = $1", name); got != setting {
			t.Errorf("%s is %q, want %q", name, got, setting)
		}
	}
	_, err = db.OpenSession(t.Context(), dialect.SessionOptions{KeepAlive: -1})
	wantClass(t, err, dialect.InvalidOption)
	for _, keepAlive := range []time.Duration{1, math.MaxInt64} {
		s, err := db.OpenSession(t.Context(), dialect.SessionOptions{KeepAlive: keepAlive})
		must(t, err)
		must(t, s.Close())
	}
}

func TestBorrowedConnectionKeepsItsSettingsAndNoTransaction(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		conn, err := db.SQL().Conn(t.Context())
		must(t, err)
		defer conn.Close()
		const settings = "SELECT string_agg(name || '=' || setting, ';' ORDER BY name) FROM pg_settings"
		read := func() (all string) {
			must(t, conn.QueryRowContext(t.Context(), settings).Scan(&all))
			return all
		}
		before := read()
		s, err := db.OnConn(t.Context(), conn)
		must(t, err)
		lock(t, s, keys(1, 2))
		if after := read(); after != before {
			t.Errorf("settings\n%s became\n%s", before, after)
		}
		if state := value[string](t, db.SQL(), "SELECT state FROM pg_stat_activity WHERE pid = $1", s.ID()); state != "idle" {
			t.Errorf("between its calls the session is %s", state)
		}
		must(t, s.Release(t.Context(), keys(1, 2)))
		must(t, conn.Close())
	})
}

// A database/sql pool over a pgx pool gives a connection back to it even if told
// that it is bad.
func TestClosedSessionIsNeverGivenBackToAPool(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		for name, s := range sessions(t, db) {
			t.Run(name, func(t *testing.T) {
				lock(t, s, keys(1))
				must(t, s.Close())
				eventually(t, "the server ended the session", func() bool {
					return value[int](t, db.SQL(), "SELECT count(*) FROM pg_stat_activity WHERE pid = $1", s.ID()) == 0
				})
			})
		}
	})
}

func TestCloseAfterACancelledAcquireLeavesNoWaiter(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		holder := session(t, db)
		lock(t, holder, keys(1))
		for name, s := range sessions(t, db) {
			t.Run(name, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				result := make(chan error, 1)
				go func() {
					_, err := s.Acquire(ctx, dialect.Request{Keys: keys(0, 1)})
					result <- err
				}()
				eventuallyWaiting(t, db, 1)
				cancel()
				wantClass(t, <-result, dialect.Canceled)
				must(t, s.Close())
				gone := func() bool { return len(held(t, db, s.ID(), false))+len(held(t, db, s.ID(), true)) == 0 }
				if db.Features().HearsLoss {
					if !gone() { // pgx waits until the server hangs up
						t.Error("Close returned before the server knew")
					}
				} else {
					eventually(t, "nothing is left of the session", gone)
				}
			})
		}
	})
}

// The statement takes keys one after the other, whatever the planner does.
func TestSeveralKeysAreTakenInTheirOrder(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		holder := session(t, db)
		order := keys(30, -10, 20, 25)
		order[0].Mode = dialect.Shared
		for i, k := range order {
			lock(t, holder, []dialect.Key{{ID: k.ID}})
			s := session(t, db)
			tx := begin(t, db, nil)
			results := make(chan error, 2)
			go func() {
				_, err := s.Acquire(t.Context(), dialect.Request{Keys: order})
				results <- err
			}()
			eventuallyWaiting(t, db, k.ID)
			if got := held(t, db, s.ID(), false); len(got) != i {
				t.Errorf("before key %d of %v the session holds %v", i, order, got)
			}
			must(t, holder.Release(t.Context(), []dialect.Key{{ID: k.ID}}))
			must(t, <-results)
			pid := pidOf(t, tx)
			must(t, s.Release(t.Context(), order))

			lock(t, holder, []dialect.Key{{ID: k.ID}})
			go func() { results <- db.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: order}) }()
			eventuallyWaiting(t, db, k.ID)
			if got := held(t, db, pid, false); len(got) != i {
				t.Errorf("before key %d of %v the transaction holds %v", i, order, got)
			}
			must(t, holder.Release(t.Context(), []dialect.Key{{ID: k.ID}}))
			must(t, <-results)
			must(t, tx.Rollback(t.Context()))
		}
	})
}

func TestRefusedTryHoldsNothingAndWritesNoNumber(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		holder, s := session(t, db), session(t, db)
		lock(t, holder, keys(20))
		mixed := append(shared(10), keys(15, 20, 30)...)
		for _, fence := range []*dialect.Table{nil, {}} {
			_, err := s.Acquire(t.Context(), dialect.Request{Keys: mixed, Try: true, Fence: fence})
			wantClass(t, err, dialect.NotAcquired)
			if got := held(t, db, s.ID(), false); len(got) != 0 {
				t.Errorf("the loser holds %v", got)
			}
		}
		if n := value[int](t, db.SQL(), "SELECT count(*) FROM locks"); n != 0 {
			t.Errorf("%d numbers were written", n)
		}
		// What the session held before is kept: locks are counted.
		lock(t, s, shared(10))
		_, err := s.Acquire(t.Context(), try(mixed))
		wantClass(t, err, dialect.NotAcquired)
		must(t, s.Release(t.Context(), shared(10)))
	})
}

// If a refused try went on to the keys behind, two of them could refuse each
// other. There are so many keys that the calls overtake each other.
func TestOneOfSeveralTriesForTheSameKeysWins(t *testing.T) {
	db := throughPgx(t)
	ids := make([]int64, 1000)
	for i := range ids {
		ids[i] = int64(i)
	}
	same := keys(ids...)
	all := []dialect.Session{session(t, db), session(t, db), session(t, db), session(t, db)}
	for round := range 30 {
		winners := make(chan dialect.Session, len(all))
		start := make(chan struct{})
		var ended sync.WaitGroup
		for _, s := range all {
			ended.Go(func() {
				<-start
				_, err := s.Acquire(t.Context(), try(same))
				switch dialect.ClassOf(err) {
				case "":
					winners <- s
				case dialect.NotAcquired:
				default:
					t.Error(err)
				}
			})
		}
		close(start)
		ended.Wait()
		if len(winners) != 1 {
			t.Fatalf("round %d: %d of %d won", round, len(winners), len(all))
		}
		must(t, (<-winners).Release(t.Context(), same))
	}
}

// The waiting statement began before the holder's number was written.
func TestFencingNumberGrowsWithEveryGrant(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		request := dialect.Request{Keys: keys(-1, 7), Fence: &dialect.Table{}}
		holder := session(t, db)
		lock(t, holder, keys(-1))
		waiters := []dialect.Session{session(t, db), session(t, db), session(t, db)}
		type grant struct {
			s       dialect.Session
			numbers []int64
			err     error
		}
		grants := make(chan grant, len(waiters))
		for _, s := range waiters {
			go func() {
				numbers, err := s.Acquire(t.Context(), request)
				grants <- grant{s, numbers, err}
			}()
		}
		eventually(t, "all wait", func() bool {
			holdings, err := db.Inspect(t.Context(), keys(-1)...)
			must(t, err)
			return len(holdings) == 1+len(waiters)
		})
		must(t, holder.Release(t.Context(), keys(-1)))
		last := []int64{0, 0}
		for i := range len(waiters) {
			g := <-grants
			must(t, g.err)
			if len(g.numbers) != 2 || g.numbers[0] < last[0]+dialect.FenceStride || g.numbers[1] < last[1]+dialect.FenceStride {
				t.Fatalf("grant %d got the numbers %v after %v", i+1, g.numbers, last)
			}
			last = g.numbers
			if n := value[int64](t, db.SQL(), "SELECT min(fence) FROM locks"); n < min(last[0], last[1]) {
				t.Errorf("number %d was returned before it was committed", n)
			}
			must(t, g.s.Release(t.Context(), request.Keys))
		}
		request.Keys = shared(7)
		numbers, err := holder.Acquire(t.Context(), request)
		must(t, err)
		if len(numbers) != 1 || numbers[0] <= last[1] {
			t.Errorf("the shared grant got %v after %d", numbers, last[1])
		}
		must(t, holder.Release(t.Context(), request.Keys))
	})
}

func TestFencingWithoutATableNamesTheSetupAndHoldsNothing(t *testing.T) {
	db := throughPgx(t)
	s := session(t, db)
	_, err := s.Acquire(t.Context(), dialect.Request{Keys: keys(1), Fence: &dialect.Table{Name: "missing"}})
	wantClass(t, err, dialect.Setup)
	wantText(t, err, "dblock setup")
	if got := held(t, db, s.ID(), false); len(got) != 0 {
		t.Errorf("the session holds %v", got)
	}
}

func TestReleaseNamesTheKeysThatWereNotHeld(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		s := session(t, db)
		for _, wrong := range [][]dialect.Key{keys(1), shared(1)} {
			err := s.Release(t.Context(), wrong)
			wantClass(t, err, dialect.NotHeld)
			wantText(t, err, "key/a")
		}
		lock(t, s, append(keys(1), shared(2)...))
		ok, err := dialect.HoldsAll(t.Context(), s, append(keys(1), shared(2)...))
		must(t, err)
		wrongMode, err := dialect.HoldsAll(t.Context(), s, keys(2))
		must(t, err)
		if !ok || wrongMode {
			t.Errorf("held %t, in another mode %t", ok, wrongMode)
		}
		err = s.Release(t.Context(), keys(1, 2, 3))
		wantClass(t, err, dialect.NotHeld)
		wantText(t, err, "key/b, key/c")
		must(t, s.Release(t.Context(), shared(2)))
	})
}

func TestManyKeysInOneCall(t *testing.T) {
	db := throughPgx(t)
	s := session(t, db)
	ids := make([]int64, 1000)
	for i := range ids {
		ids[i] = int64(i) - 500
	}
	numbers, err := s.Acquire(t.Context(), dialect.Request{Keys: keys(ids...), Fence: &dialect.Table{}})
	must(t, err)
	if len(numbers) != len(ids) {
		t.Errorf("%d numbers", len(numbers))
	}
	ok, err := dialect.HoldsAll(t.Context(), s, keys(ids...))
	must(t, err)
	if !ok {
		t.Error("not all are held")
	}
	must(t, s.Release(t.Context(), keys(ids...)))
	must(t, db.AcquireTx(t.Context(), begin(t, db, nil), dialect.TxRequest{Keys: keys(ids...)}))
	_, err = db.LockRows(t.Context(), begin(t, db, nil), dialect.RowRequest{Keys: keys(ids...), Fence: true})
	must(t, err)
}

func TestLocksBeyondTheServersTableAreACapacityError(t *testing.T) {
	server := servers.Start(t, servers.KindPostgres, "max_locks_per_transaction=10", "max_connections=10")
	db := opened(t)(overPgx(t, server.Database(t)))
	s := session(t, db)
	for next := int64(0); ; next += 500 {
		ids := make([]int64, 500)
		for i := range ids {
			ids[i] = next + int64(i)
		}
		if _, err := s.Acquire(t.Context(), dialect.Request{Keys: keys(ids...)}); err != nil {
			wantClass(t, err, dialect.Capacity)
			wantText(t, err, "max_locks_per_transaction")
			// The failed call keeps nothing, and so there is room to ask who does.
			if kept := held(t, db, s.ID(), false); int64(len(kept)) != next {
				t.Errorf("%d keys are held instead of %d", len(kept), next)
			}
			break
		}
	}
	must(t, s.Close())
	eventually(t, "the server has room again", func() bool {
		again, err := db.OpenSession(t.Context(), dialect.SessionOptions{})
		if err != nil {
			return false
		}
		_, err = again.Acquire(t.Context(), try(keys(1)))
		must(t, again.Close())
		return err == nil
	})
}

func TestOwnSessionsDoNotCountAgainstAPgxPool(t *testing.T) {
	dsn := servers.Postgres(t).Database(t)
	pool := servers.Postgres(t).Open(t, dsn)
	pool.SetMaxOpenConns(1)
	db := opened(t)(postgres.NewSQL(t.Context(), pool))
	for range 3 {
		session(t, db)
	}
	conn, err := pool.Conn(t.Context())
	must(t, err)
	session(t, db)
	must(t, conn.Close())
}

// A statement that waits holds a snapshot. The waiter's is renewed every 20 s.
func TestWaiterDoesNotHoldUpAnIndexThatIsBuiltConcurrently(t *testing.T) {
	t.Parallel()
	db := opened(t)(overPgx(t, servers.Postgres(t).Database(t)))
	exec(t, db.SQL(), "CREATE TABLE entries (id int)")
	holder := session(t, db)
	lock(t, holder, keys(1, 2))
	granted := make(chan error)
	for _, wanted := range [][]dialect.Key{keys(1), shared(2), keys(0, 1, 2)} {
		waiter := session(t, db)
		go func() {
			_, err := waiter.Acquire(t.Context(), dialect.Request{Keys: wanted})
			if err == nil {
				err = waiter.Release(t.Context(), wanted)
			}
			granted <- err
		}()
	}
	eventuallyWaiting(t, db, 1)
	eventuallyWaiting(t, db, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err := db.SQL().ExecContext(ctx, "CREATE INDEX CONCURRENTLY ON entries (id)")
	must(t, err)
	select {
	case err := <-granted:
		t.Errorf("a waiter went away: %v", err)
	default:
	}
	must(t, holder.Release(t.Context(), keys(1, 2)))
	for range 3 {
		must(t, <-granted)
	}
}
