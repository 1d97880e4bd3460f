package postgres_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

func lockOf(s *dialect.Snapshot, key string) (dialect.SnapshotLock, bool) {
	i := slices.IndexFunc(s.Locks, func(l dialect.SnapshotLock) bool { return l.Key == key })
	if i < 0 {
		return dialect.SnapshotLock{}, false
	}
	return s.Locks[i], true
}

// The server knows ids only; those of fenced locks have names in the lock table.
func TestSnapshotNamesKeysThatTheLockTableKnows(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		fenced, plain := dblock.NewKey("account", "42"), dblock.NewKey("account", "43")
		for _, test := range []struct {
			key  dblock.Key
			o    advisory.Options
			name string
		}{
			{fenced, advisory.Options{Fencing: true, Table: "named"}, fenced.Name("")},
			{plain, advisory.Options{}, ""},
		} {
			if exists, _ := db.CheckTable(t.Context(), dialect.Table{Name: "named"}); !exists {
				for _, statement := range db.Migrations(dialect.Table{Name: "named"})[0].Up {
					exec(t, db.SQL(), statement)
				}
			}
			locks, err := advisory.New(db, &test.o)
			must(t, err)
			defer locks.Close()
			lock, err := locks.Lock(t.Context(), test.key)
			must(t, err)
			defer lock.Release(t.Context())
			s, err := db.Snapshot(t.Context(), dialect.SnapshotRequest{Table: dialect.Table{Name: "named"}})
			must(t, err)
			if l, ok := lockOf(s, fmt.Sprint(test.key.ID())); !ok || l.Name != test.name {
				t.Errorf("%v: %+v", test.key, s.Locks)
			}
			// A lock table that is not there is no gap.
			s, err = db.Snapshot(t.Context(), dialect.SnapshotRequest{Table: dialect.Table{Name: "missing"}})
			must(t, err)
			if l, ok := lockOf(s, fmt.Sprint(test.key.ID())); !ok || l.Name != "" || len(s.Gaps) > 0 {
				t.Errorf("%v: %+v, %+v", test.key, l, s.Gaps)
			}
		}
	})
}

// Those of other locks are written there where the locker is asked to.
func TestSnapshotNamesKeysOfALockerThatWritesThem(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		table := dialect.Table{Name: "written"}
		if exists, _ := db.CheckTable(t.Context(), table); !exists {
			for _, statement := range db.Migrations(table)[0].Up {
				exec(t, db.SQL(), statement)
			}
		}
		locks, err := advisory.New(db, &advisory.Options{Names: true, Table: table.Name})
		must(t, err)
		defer locks.Close()
		key := dblock.NewKey("projector", t.Name(), "\"{\\',%\x00\n\xff\U0001f512"+strings.Repeat("x", 10_000))
		// Its id is the number of the row that has the name of key.
		other := dblock.RawKey(dialect.FenceRows([]dialect.Key{key.ResolveID()})[0].ID)
		for range 2 {
			lock, err := locks.Lock(t.Context(), key, dblock.RawKey(5), other)
			must(t, err)
			eventually(t, "the key has its name", func() bool {
				s, err := db.Snapshot(t.Context(), dialect.SnapshotRequest{Table: table})
				must(t, err)
				for _, k := range []dblock.Key{other, dblock.RawKey(5)} {
					if l, ok := lockOf(s, fmt.Sprint(k.ID())); !ok || l.Name != "" {
						t.Fatalf("%v: %+v", k, l)
					}
				}
				l, ok := lockOf(s, fmt.Sprint(key.ID()))
				return ok && l.Name == key.Name("")
			})
			must(t, lock.Release(t.Context()))
		}
	})
}

// statementCount is a tracer that counts statements.
type statementCount struct{ n atomic.Int64 }

func (c *statementCount) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (*statementCount) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// The server's views are read in one statement, and the lock table in another, however
// many locks and waiters there are.
func TestSnapshotTakesTwoStatements(t *testing.T) {
	const waiters = 10
	server := servers.Postgres(t)
	dsn := server.Database(t)
	config, err := pgxpool.ParseConfig(dsn)
	must(t, err)
	count := &statementCount{}
	config.ConnConfig.Tracer = count
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	db := opened(t)(postgres.New(t.Context(), pool))
	others := server.Open(t, dsn)
	holder, err := others.BeginTx(t.Context(), nil)
	must(t, err)
	defer func() { _ = holder.Rollback() }() // the pool may be closed
	_, err = holder.ExecContext(t.Context(), "SELECT pg_advisory_xact_lock(k) FROM generate_series(1, 100) AS k")
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	for i := range waiters {
		all.Go(func() { _, _ = others.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1)", 1+i%3) }) // ends with ctx
	}
	eventually(t, "all wait", func() bool {
		before := count.n.Load()
		s, err := db.Snapshot(t.Context(), dialect.SnapshotRequest{})
		must(t, err)
		if n := count.n.Load() - before; n != 2 {
			t.Fatalf("%d statements", n)
		}
		waiting := 0
		for _, l := range s.Locks {
			if l.Waiting {
				waiting++
			}
		}
		return waiting == waiters
	})
}

func TestSnapshotShowsKeysOfOtherSoftware(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		tx := begin(t, db, nil)
		exec(t, tx, "SELECT pg_advisory_xact_lock(-1, 2), pg_advisory_xact_lock_shared(-9223372036854775808)")
		s, err := db.Snapshot(t.Context(), dialect.SnapshotRequest{})
		must(t, err)
		for key, mode := range map[string]string{"(-1,2)": "exclusive", "-9223372036854775808": "shared"} {
			if l, ok := lockOf(s, key); !ok || l.Mode != mode || l.Kind != dialect.KindAdvisory || l.Since.IsZero() {
				t.Errorf("%s: %+v", key, s.Locks)
			}
		}
	})
}

func TestSnapshotLeavesProbesOut(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		s, err := db.OpenSession(t.Context(), dialect.SessionOptions{Application: "dblock probe"})
		must(t, err)
		defer s.Close()
		lock(t, s, keys(1))
		found, err := db.Snapshot(t.Context(), dialect.SnapshotRequest{})
		must(t, err)
		if len(found.Locks) > 0 || len(found.Sessions) > 0 {
			t.Errorf("%+v", found)
		}
	})
}

// A transaction that is prepared has no session, and blocks all the same.
func TestSnapshotShowsPreparedTransactions(t *testing.T) {
	server := servers.Start(t, servers.KindPostgres, "max_prepared_transactions=2")
	db := opened(t)(overPgx(t, server.Database(t)))
	exec(t, db.SQL(), "CREATE TABLE prepared (id int)")
	tx := begin(t, db, nil)
	exec(t, tx, "LOCK TABLE prepared")
	exec(t, tx, "PREPARE TRANSACTION 'left'")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = db.SQL().ExecContext(ctx, "SELECT * FROM prepared") // ends with ctx
	}()
	defer func() { cancel(); <-done }()
	var s *dialect.Snapshot
	eventually(t, "a wait", func() bool {
		var err error
		s, err = db.Snapshot(t.Context(), dialect.SnapshotRequest{})
		must(t, err)
		return len(s.Waits) == 1
	})
	if w := s.Waits[0]; w.Blocker != 0 || w.Waiter == 0 || w.Table != "prepared" || w.Kind != dialect.KindTable {
		t.Errorf("%+v", w)
	}
	if !slices.ContainsFunc(s.Sessions, func(x dialect.SnapshotSession) bool { return x.ID == 0 && x.State == "prepared transaction" }) {
		t.Errorf("%+v", s.Sessions)
	}
}
