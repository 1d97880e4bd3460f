package mysql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// manyKeys have names as long as they get.
func manyKeys(n int, scope string) []dialect.Key {
	keys := make([]dialect.Key, n)
	for i := range keys {
		name := fmt.Sprintf("%s/%06d/", scope, i)
		for len(name) < 64 {
			name += "x"
		}
		keys[i] = key(name, int64(i))
	}
	return keys
}

// holder is the session that holds the key, as another one sees it, 0 if none does.
func (e *env) holder(t *testing.T, k dialect.Key) int64 {
	t.Helper()
	return value[int64](t, e.ctx, e.admin, fmt.Sprintf("SELECT COALESCE(IS_USED_LOCK('%s'), 0)", k.Name))
}

func all(n int, b bool) []bool { return slices.Repeat([]bool{b}, n) }

func TestExchangeMixesTriesAndReleases(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		keys := manyKeys(6, db.Features().Scope)
		one, other := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
		if err := errors.Join(acquire(one, e.ctx, true, keys[0], keys[1]), acquire(other, e.ctx, true, keys[3])); err != nil {
			t.Fatal(err)
		}
		// A refused try leaves the ones after it granted, a release of what is not
		// held (nobody's, then somebody else's) the others done.
		granted, released, err := one.Exchange(time.Now().Add(time.Minute), keys[2:5], []dialect.Key{keys[0], keys[5]})
		if err != nil || !slices.Equal(granted, []bool{true, false, true}) || !slices.Equal(released, []bool{true, false}) {
			t.Fatalf("granted %t, released %t, %v", granted, released, err)
		}
		granted, released, err = one.Exchange(time.Now().Add(time.Minute), keys[:1], []dialect.Key{keys[3], keys[1]})
		if err != nil || !slices.Equal(granted, []bool{true}) || !slices.Equal(released, []bool{false, true}) {
			t.Fatalf("granted %t, released %t, %v", granted, released, err)
		}
		want := []bool{true, false, true, false, true, false}
		if held, err := one.Held(e.ctx, keys); err != nil || !slices.Equal(held, want) {
			t.Errorf("held %t, %v", held, err)
		}
		for i, k := range keys {
			if seen := e.holder(t, k) == one.ID(); seen != want[i] {
				t.Errorf("key %d: held %t, as another session sees it", i, seen)
			}
		}
		if granted, released, err := one.Exchange(time.Now().Add(time.Minute), nil, nil); err != nil || len(granted)+len(released) > 0 {
			t.Errorf("of nothing: %v, %v, %v", granted, released, err)
		}
		_, _, err = one.Exchange(time.Now().Add(time.Minute), []dialect.Key{{Name: "É"}}, nil)
		wantClass(t, err, dialect.InvalidKey)
		_, _, err = one.Exchange(time.Now().Add(time.Minute), nil, []dialect.Key{{Name: "É"}})
		wantClass(t, err, dialect.InvalidKey)
	})
}

// The servers' limit of 4,096 columns is one of tables, and what a statement of
// many calls takes of MariaDB's stack does not grow with them.
func TestAThousandKeysInOneCall(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		for _, n := range []int{1000, 5000} {
			keys := manyKeys(n, db.Features().Scope)
			s, other := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
			if granted, _, err := s.Exchange(time.Now().Add(time.Minute), keys, nil); err != nil || !slices.Equal(granted, all(n, true)) {
				t.Fatalf("%d tries: %v", n, err)
			}
			if granted, _, err := other.Exchange(time.Now().Add(time.Minute), keys, nil); err != nil || !slices.Equal(granted, all(n, false)) {
				t.Fatalf("%d tries for what is held: %v", n, err)
			}
			if held, err := s.Held(e.ctx, keys); err != nil || !slices.Equal(held, all(n, true)) {
				t.Fatalf("%d keys held: %v", n, err)
			}
			if _, released, err := s.Exchange(time.Now().Add(time.Minute), nil, keys); err != nil || !slices.Equal(released, all(n, true)) {
				t.Fatalf("%d releases: %v", n, err)
			}
			for _, try := range []bool{true, false} {
				if err := acquire(s, e.ctx, try, keys...); err != nil {
					t.Fatal(err)
				}
				wantClass(t, acquire(other, e.ctx, true, keys...), dialect.NotAcquired)
				if err := s.Release(e.ctx, keys); err != nil {
					t.Fatal(err)
				}
			}
			// The last key is held: a try takes and gives back all the others.
			if err := acquire(other, e.ctx, true, keys[n-1]); err != nil {
				t.Fatal(err)
			}
			wantClass(t, acquire(s, e.ctx, true, keys...), dialect.NotAcquired)
			if held, err := s.Held(e.ctx, keys); err != nil || !slices.Equal(held, all(n, false)) {
				t.Fatalf("after a refused try: %v", err)
			}
			if err := other.Release(e.ctx, keys[n-1:]); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestSeveralFreeKeysAreOneStatement(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		keys := manyKeys(20, db.Features().Scope)
		conn := e.conn(t)
		s, err := db.OnConn(e.ctx, conn)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		other := e.session(t, db, dialect.SessionOptions{})
		statements := func(call func() error, class dialect.Class) int {
			t.Helper()
			before := e.questions(t, conn)
			if err := call(); dialect.ClassOf(err) != class {
				t.Fatalf("got %v, want class %q", err, class)
			}
			return e.questions(t, conn) - before - 1
		}
		exchange := func() error { _, _, err := s.Exchange(time.Now().Add(time.Minute), keys[:10], keys[10:]); return err }
		for what, n := range map[string]int{
			"a try":       statements(func() error { return acquire(s, e.ctx, true, keys...) }, ""),
			"a release":   statements(func() error { return s.Release(e.ctx, keys) }, ""),
			"a lock":      statements(func() error { return acquire(s, e.ctx, false, keys...) }, ""),
			"a question":  statements(func() error { _, err := s.Held(e.ctx, keys); return err }, ""),
			"an exchange": statements(exchange, ""),
			"a look":      statements(func() error { return s.Alive(time.Now().Add(10 * time.Second)) }, "") + 1,
		} {
			if n != 1 {
				t.Errorf("%s: %d statements", what, n)
			}
		}
		if err := s.Release(e.ctx, append(keys[:10:10], keys[:10]...)); err != nil { // the exchange counted them
			t.Fatal(err)
		}
		if err := acquire(other, e.ctx, true, keys[7]); err != nil {
			t.Fatal(err)
		}
		if n := statements(func() error { return acquire(s, e.ctx, true, keys...) }, dialect.NotAcquired); n != 2 {
			t.Errorf("a refused try: %d statements", n)
		}
	})
}

// questions is how many statements a connection has sent, this one included.
func (e *env) questions(t *testing.T, conn *sql.Conn) int {
	t.Helper()
	schema := "performance_schema"
	if e.mariadb() {
		schema = "information_schema"
	}
	return value[int](t, e.ctx, conn, "SELECT variable_value FROM "+schema+".session_status WHERE variable_name = 'Questions'")
}

// A wait for several keys waits for one after the other, and the server shows which.
func TestWaitForSeveralKeys(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		keys := manyKeys(5, db.Features().Scope)
		holder, waiter := e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})
		busy := []dialect.Key{keys[0], keys[2], keys[4]}
		if err := acquire(holder, e.ctx, true, busy...); err != nil {
			t.Fatal(err)
		}
		result := make(chan error, 1)
		go func() { result <- acquire(waiter, e.ctx, false, keys...) }()
		for _, k := range busy {
			e.awaitStatement(t, waiter.ID(), "SELECT %GET_LOCK(''"+k.Name+"%", 0)
			e.awaitWaiter(t, db, k, waiter.ID())
			if err := holder.Release(e.ctx, []dialect.Key{k}); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-result; err != nil {
			t.Fatal(err)
		}
		if held, err := waiter.Held(e.ctx, keys); err != nil || !slices.Equal(held, all(5, true)) {
			t.Errorf("held %t, %v", held, err)
		}
		if err := waiter.Release(e.ctx, keys); err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			if !e.free(t, k) {
				t.Errorf("%s was counted twice", k.Name)
			}
		}
	})
}

func (e *env) awaitWaiter(t *testing.T, db dialect.DB, k dialect.Key, session int64) {
	t.Helper()
	for {
		holdings, err := db.Inspect(e.ctx, k)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(holdings, func(h dialect.Holding) bool { return h.Waiting && h.Session == session && h.Name == k.Name }) {
			return
		}
		select {
		case <-e.ctx.Done():
			t.Fatalf("the waiter never showed: %+v", holdings)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Of two tries for the same keys at once one always wins.
func TestCrossingTriesHaveAWinner(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		keys := manyKeys(20, db.Features().Scope)
		sessions := []dialect.Session{e.session(t, db, dialect.SessionOptions{}), e.session(t, db, dialect.SessionOptions{})}
		refused := 0
		for round := range 500 {
			var errs [2]error
			var both sync.WaitGroup
			for i, s := range sessions {
				both.Go(func() { errs[i] = acquire(s, e.ctx, true, keys...) })
			}
			both.Wait()
			winners := 0
			for i, err := range errs {
				switch {
				case err == nil:
					winners++
					if err := sessions[i].Release(e.ctx, keys); err != nil {
						t.Fatal(err)
					}
				case dialect.ClassOf(err) == dialect.NotAcquired:
					refused++
				default:
					t.Fatal(err)
				}
			}
			if winners == 0 {
				t.Fatalf("round %d: %v", round, errs)
			}
		}
		t.Logf("%d of 500 rounds crossed", refused)
	})
}

// Whatever KILL QUERY interrupts, an answer is true, and after an error Held tells
// what was done.
func TestInterruptedExchange(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		keys := manyKeys(300, db.Features().Scope)
		s := e.session(t, db, dialect.SessionOptions{})
		ctx, stop := context.WithCancel(e.ctx)
		killing := make(chan struct{})
		go func() {
			defer close(killing)
			for ctx.Err() == nil {
				_, _ = e.admin.ExecContext(ctx, fmt.Sprintf("KILL QUERY %d", s.ID())) // its context may end it
				select {
				case <-ctx.Done():
				case <-time.After(rand.N(6 * time.Millisecond)):
				}
			}
		}()
		defer func() { stop(); <-killing }()
		// held asks until the question is not interrupted.
		held := func() []bool {
			for {
				held, err := s.Held(e.ctx, keys)
				if err == nil {
					return held
				}
				wantClass(t, err, dialect.Canceled)
			}
		}
		interrupted, partly := 0, 0
		had := all(len(keys), false)
		for round := 0; round < 1000 && interrupted < 20; round++ {
			var tries, releases []dialect.Key
			for i, k := range keys {
				if had[i] {
					releases = append(releases, k)
				} else {
					tries = append(tries, k)
				}
			}
			granted, released, err := s.Exchange(time.Now().Add(time.Minute), tries, releases)
			has := held()
			if err == nil {
				if !slices.Equal(granted, all(len(tries), true)) || !slices.Equal(released, all(len(releases), true)) {
					t.Fatalf("round %d: granted %t, released %t", round, granted, released)
				}
				for i := range has {
					if has[i] == had[i] {
						t.Fatalf("round %d: key %d was not exchanged", round, i)
					}
				}
			} else {
				wantClass(t, err, dialect.Canceled)
				interrupted++
				if !slices.Equal(has, had) {
					partly++
				}
			}
			had = has
		}
		stop()
		<-killing
		t.Logf("%d exchanges were interrupted, %d of them after a part was done", interrupted, partly)
		if interrupted == 0 {
			t.Error("nothing was interrupted")
		}
		has := held()
		for i, k := range keys {
			if seen := e.holder(t, k) == s.ID(); seen != has[i] {
				t.Errorf("key %d: held %t, as another session sees it %t", i, has[i], seen)
			}
		}
	})
}

// What the server has ended shows without a round trip, and a look changes nothing.
func TestAliveLooksAtTheConnection(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.wrap(t, with(t, e.dsn, "readTimeout", "1s"), 0)
		k := key("alive/"+db.Features().Scope, 1)
		s := e.session(t, db, dialect.SessionOptions{})
		if err := acquire(s, e.ctx, true, k); err != nil {
			t.Fatal(err)
		}
		if err := s.Alive(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		<-time.After(1500 * time.Millisecond) // longer than the deadline that the look has set
		for range 3 {
			if err := s.Alive(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
		}
		if held, err := s.Held(e.ctx, []dialect.Key{k}); err != nil || !held[0] {
			t.Fatalf("after a look: held %v, %v", held, err)
		}
		e.exec(t, e.admin, fmt.Sprintf("KILL %d", s.ID()))
		e.awaitGone(t, s.ID())
		for s.Alive(time.Now().Add(10*time.Second)) == nil && e.ctx.Err() == nil { // word is on its way
			<-time.After(time.Millisecond)
		}
		wantClass(t, s.Alive(time.Now().Add(10*time.Second)), dialect.Lost)
	})
}

func TestRoomHoldsTenThousandKeysInFewSessions(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		s := e.session(t, db, dialect.SessionOptions{})
		most := 2
		if e.mariadb() {
			most = 10
		}
		room, err := s.Room(e.ctx)
		if err != nil || room*most < 10_000 {
			t.Fatalf("room for %d, %v", room, err)
		}
		keys := manyKeys(room, db.Features().Scope)
		for chunk := range slices.Chunk(keys, 500) {
			if granted, _, err := s.Exchange(time.Now().Add(time.Minute), chunk, nil); err != nil || !slices.Equal(granted, all(len(chunk), true)) {
				t.Fatalf("granted %t, %v", granted, err)
			}
		}
	})
}
