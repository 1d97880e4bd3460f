package postgres_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

func exchange(t testing.TB, s dialect.Session, tries, releases []dialect.Key) (granted, released []bool) {
	t.Helper()
	granted, released, err := s.Exchange(time.Now().Add(time.Minute), tries, releases)
	must(t, err)
	return granted, released
}

func TestExchangeSettlesEachKeyByItself(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		one, other := session(t, db), session(t, db)
		lock(t, other, keys(2))
		lock(t, other, shared(5))
		mixed := slices.Concat(keys(1, 2, 3, 5), shared(4))
		granted, _ := exchange(t, one, mixed, nil)
		if !slices.Equal(granted, []bool{true, false, true, false, true}) {
			t.Errorf("granted %v", granted)
		}
		granted, released := exchange(t, one, shared(5), slices.Concat(keys(1, 7), shared(4), keys(3)))
		if !slices.Equal(granted, []bool{true}) || !slices.Equal(released, []bool{true, false, true, true}) {
			t.Errorf("granted %v, released %v", granted, released)
		}
		for _, key := range [][]dialect.Key{keys(8), shared(9)} { // alone
			if granted, _ := exchange(t, one, key, nil); !granted[0] {
				t.Errorf("%v: refused", key)
			}
			if _, released := exchange(t, one, nil, key); !released[0] {
				t.Errorf("%v: not given back", key)
			}
			if _, released := exchange(t, one, nil, key); released[0] {
				t.Errorf("%v: given back twice", key)
			}
		}
		if ids := held(t, db, one.ID(), false); !slices.Equal(ids, []int64{5}) {
			t.Errorf("holds %v", ids)
		}
		must(t, one.Release(t.Context(), shared(5)))
		_, _, err := one.Exchange(time.Now(), nil, nil)
		wantClass(t, err, dialect.InvalidKey)
	})
}

// Behind a pooler that loses prepared statements people choose another mode; none of
// them needs a statement that was prepared in an earlier message.
func TestSessionsWorkInEveryModeOfPgx(t *testing.T) {
	server := servers.Postgres(t)
	dsn := server.Database(t)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			u, err := url.Parse(dsn)
			must(t, err)
			q := u.Query()
			q.Set("default_query_exec_mode", mode)
			u.RawQuery = q.Encode()
			db := opened(t)(overPgx(t, u.String()))
			table(t, db, dialect.Table{})
			s := session(t, db)
			if mode != "cache_statement" {
				exec(t, db.SQL(), "SELECT 1")
			}
			all := keys(-1<<63, -1, 0, 1, 1<<63-1)
			for range 3 {
				granted, _ := exchange(t, s, all, nil)
				if slices.Contains(granted, false) {
					t.Errorf("granted %v", granted)
				}
				ok, err := dialect.HoldsAll(t.Context(), s, all)
				must(t, err)
				if !ok {
					t.Error("not held")
				}
				if _, released := exchange(t, s, nil, all); slices.Contains(released, false) {
					t.Errorf("released %v", released)
				}
				_, err = s.Acquire(t.Context(), dialect.Request{Keys: all, Fence: &dialect.Table{}})
				must(t, err)
				must(t, s.Release(t.Context(), all))
			}
			prepared := value[int](t, db.SQL(), "SELECT count(*) FROM pg_prepared_statements")
			if mode != "cache_statement" && prepared != 0 {
				t.Errorf("%d prepared statements", prepared)
			}
		})
	}
}

// A statement that failed in its middle has done a part; Held tells which.
func TestHeldTellsWhatAFailedExchangeDid(t *testing.T) {
	server := servers.Start(t, servers.KindPostgres, "max_connections=12", "max_locks_per_transaction=10", "max_worker_processes=1", "max_wal_senders=0")
	db := opened(t)(overPgx(t, server.Database(t)))
	s := session(t, db)
	var all []dialect.Key
	for i := range 5000 {
		all = append(all, keys(int64(i))...)
	}
	_, _, err := s.Exchange(time.Now().Add(time.Minute), all, nil)
	wantClass(t, err, dialect.Capacity)
	is, err := s.Held(t.Context(), all)
	must(t, err)
	var taken []dialect.Key
	for i, k := range all {
		if is[i] {
			taken = append(taken, k)
		}
	}
	if len(taken) == 0 || len(taken) == len(all) {
		t.Fatalf("%d keys held", len(taken))
	}
	must(t, s.Release(t.Context(), taken))
	if ids := held(t, db, s.ID(), false); len(ids) > 0 {
		t.Errorf("still holds %d", len(ids))
	}
}

func TestAServersLockTableIsFilledToTheHalfOnly(t *testing.T) {
	server := servers.Start(t, servers.KindPostgres, "max_connections=20", "max_locks_per_transaction=10")
	db := opened(t)(overPgx(t, server.Database(t)))
	s := session(t, db)
	room, err := s.Room(t.Context())
	must(t, err)
	if room < 10 || room > 100 {
		t.Errorf("room for %d", room)
	}
	var all []dialect.Key
	for i := range room + 1 {
		all = append(all, keys(int64(i))...)
	}
	exchange(t, s, all, nil)
	_, err = s.Room(t.Context())
	wantClass(t, err, dialect.Capacity)
	wantText(t, err, "max_locks_per_transaction")
	t.Log(err)
	session(t, db) // others can still connect
}

func TestAliveSeesTheEndOfASession(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		s := session(t, db)
		lock(t, s, keys(1))
		for range 1000 {
			must(t, s.Alive(time.Now().Add(10*time.Second)))
		}
		exec(t, db.SQL(), fmt.Sprintf("SELECT pg_terminate_backend(%d)", s.ID()))
		eventually(t, "the end of the session", func() bool {
			return dialect.ClassOf(s.Alive(time.Now().Add(10*time.Second))) == dialect.Lost
		})
	})
}

// What arrives unasked is no end of the session.
func TestANoticeIsNoEnd(t *testing.T) {
	db := throughPgx(t)
	s := session(t, db)
	lock(t, s, keys(1))
	exec(t, db.SQL(), "ALTER SYSTEM SET application_name = 'x'")
	t.Cleanup(func() {
		_, err := db.SQL().ExecContext(context.Background(), "ALTER SYSTEM RESET application_name")
		must(t, err)
		_, err = db.SQL().ExecContext(context.Background(), "SELECT pg_reload_conf()")
		must(t, err)
	})
	for range 20 {
		exec(t, db.SQL(), "SELECT pg_reload_conf()")
		must(t, s.Alive(time.Now().Add(10*time.Second)))
	}
	must(t, s.Release(t.Context(), keys(1)))
}
