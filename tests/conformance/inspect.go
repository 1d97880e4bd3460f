package conformance

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

var inspectClauses = []clause{
	{"inspect/holder and waiter of an advisory lock", inspectAdvisory},
	{"inspect/holder and waiter of a row of the lock table, by name", inspectLockTable},
	{"inspect/a chain of three has one root", inspectChain},
	{"inspect/a change of a table waits for an idle transaction", inspectTable},
	{"inspect/a cycle that the database does not see is a deadlock", inspectCycle},
	{"inspect/a key that changes hands all the time is no deadlock", inspectHandOffs},
	{"inspect/a key and a row that change hands are no deadlock, and the key has one holder", inspectHandOverHand},
	{"inspect/who looks without a pause sees waits begin and end", inspectWithoutPause},
	{"inspect/the values of statements are not shown", inspectStatements},
	{"inspect/what a user may not see is a gap, and its remedy closes it", inspectGaps},
}

// seen is a snapshot that shows what is wanted of it: other clauses use the server, too.
func (d *Database) seen(t testing.TB, what string, condition func(s *deadlock.Snapshot) bool) *deadlock.Snapshot {
	t.Helper()
	var last *deadlock.Snapshot
	defer func() {
		if t.Failed() && last != nil {
			t.Logf("%s", last.Text())
		}
	}()
	eventually(t, what, func() bool {
		var err error
		if last, err = deadlock.Inspect(testContext(t), d.DB); err != nil {
			t.Fatal(err)
		}
		return condition(last)
	})
	if len(last.Gaps) > 0 {
		t.Errorf("gaps: %+v", last.Gaps)
	}
	return last
}

// waitOf finds what a session waits for, and for whom.
func waitOf(s *deadlock.Snapshot, waiter, blocker int64) (deadlock.Wait, bool) {
	i := slices.IndexFunc(s.Waits, func(w deadlock.Wait) bool { return w.Waiter == waiter && w.Blocker == blocker })
	if i < 0 {
		return deadlock.Wait{}, false
	}
	return s.Waits[i], true
}

func waits(waiter, blocker int64) func(s *deadlock.Snapshot) bool {
	return func(s *deadlock.Snapshot) bool { _, ok := waitOf(s, waiter, blocker); return ok }
}

func sessionIn(t testing.TB, s *deadlock.Snapshot, id int64) deadlock.Session {
	t.Helper()
	i := slices.IndexFunc(s.Sessions, func(x deadlock.Session) bool { return x.ID == id })
	if i < 0 {
		t.Fatalf("session %d is not in the snapshot", id)
	}
	return s.Sessions[i]
}

// conn is a plain session, with its id. It is closed at the end.
func (d *Database) conn(t testing.TB) (*sql.Conn, int64) {
	t.Helper()
	c, err := d.SQL.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	var id int64
	ask := map[string]string{"postgres": "SELECT pg_backend_pid()", "sqlserver": "SELECT CONVERT(bigint, @@SPID)"}[d.DB.Name()]
	if ask == "" {
		ask = "SELECT CONNECTION_ID()"
	}
	if err := c.QueryRowContext(t.Context(), ask).Scan(&id); err != nil {
		t.Fatal(err)
	}
	return c, id
}

// inBackground runs a statement that will wait, and ends it with the test.
func inBackground(t testing.TB, c *sql.Conn, statements ...string) {
	ctx, cancel := context.WithCancel(testContext(t))
	var done sync.WaitGroup
	done.Go(func() {
		for _, s := range statements {
			if _, err := c.ExecContext(ctx, s); err != nil {
				return // the test has ended it
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		done.Wait()
	})
}

func (d *Database) mustRun(t testing.TB, c *sql.Conn, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := c.ExecContext(testContext(t), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

func inspectAdvisory(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("inspect", "1")
	lock := mustLock(t, newLocker(t, d.DB, &advisory.Options{Application: "billing"}), key)
	holder := d.holder(t, key)
	before := time.Now().Add(-2 * time.Second) // the server counts in seconds, by a clock of its own
	granted := passes(testContext(t), newLocker(t, d.Open(t)), key)
	d.waiting(t, key, 1)
	waiter := d.waiter(t, key)

	s := d.seen(t, "the wait", waits(waiter, holder))
	w, _ := waitOf(s, waiter, holder)
	want := dialect.Target{Kind: dialect.KindAdvisory, Key: key.Name(d.DB.Features().Scope)}
	if !d.DB.Features().ByName {
		want.Key = fmt.Sprint(key.ID())
	}
	if w.Target != want {
		t.Errorf("waits for %+v, want %+v", w.Target, want)
	}
	var locks []deadlock.Lock
	for _, l := range s.Locks {
		if l.Target == want {
			locks = append(locks, l)
		}
	}
	if len(locks) != 2 || locks[0].Waiting || locks[0].Session != holder || !locks[1].Waiting || locks[1].Session != waiter {
		t.Fatalf("locks %+v", locks)
	}
	if since := locks[1].Since; since.Before(before) || time.Until(since) > 2*time.Second {
		t.Errorf("waits since %v, seen at %v", since, s.Taken)
	}
	if locks[0].Mode != "exclusive" || locks[1].Mode != "exclusive" {
		t.Errorf("modes of %+v", locks)
	}
	if !slices.Contains(s.Roots, holder) || slices.Contains(s.Roots, waiter) {
		t.Errorf("roots %v, want %d", s.Roots, holder)
	}
	if x := sessionIn(t, s, holder); x.User == "" || d.DB.Name() != "mariadb" && x.Application != "billing" {
		t.Errorf("the holder is %+v", x)
	}
	mustRelease(t, lock)
	if err := <-granted; err != nil {
		t.Error(err)
	}
	d.seen(t, "nobody waits any more", func(s *deadlock.Snapshot) bool { return !waits(waiter, holder)(s) })
}

func inspectLockTable(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	rows := rowlock.New(d.DB)
	key := dblock.NewKey("account", "42")
	if err := rowlock.InTx(testContext(t), rows, func(context.Context, dblock.Tx) error { return nil }, key); err != nil {
		t.Fatal(err) // creates the row
	}
	holder, waiter := d.Begin(t, nil), d.Begin(t, nil)
	if err := rows.Lock(testContext(t), holder, key); err != nil {
		t.Fatal(err)
	}
	waiterID := d.sessionOf(t, waiter)
	result := make(chan error, 1)
	go func() { result <- rows.Lock(testContext(t), waiter, key) }()
	s := d.seen(t, "the wait", waits(waiterID, d.sessionOf(t, holder)))
	w, _ := waitOf(s, waiterID, d.sessionOf(t, holder))
	if w.Kind != dialect.KindRow || !strings.HasSuffix(w.Table, "locks") || w.Row == "" {
		t.Errorf("waits for %+v", w.Target)
	}
	if want := key.Name(""); d.DB.Name() != "sqlserver" && w.Name != want {
		t.Errorf("the key is called %q, want %q", w.Name, want)
	}
	held := slices.ContainsFunc(s.Locks, func(l deadlock.Lock) bool {
		return l.Target == w.Target && !l.Waiting && l.Session == w.Blocker
	})
	if !held {
		t.Errorf("the holder's lock is not listed: %+v", s.Locks)
	}
	if x := sessionIn(t, s, w.Blocker); x.State != "idle in transaction" || x.Began.IsZero() {
		t.Errorf("the holder is %+v", x)
	}
	rollback(t, holder)
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// rowsOf are statements that lock a row of accounts and begin, as the database
// writes it.
func (d *Database) beginWith(account int) []string {
	begin := "BEGIN"
	if d.DB.Name() == "sqlserver" {
		begin = "BEGIN TRANSACTION"
	}
	return []string{begin, fmt.Sprintf("UPDATE accounts SET balance = balance + 1 WHERE id = %d", account)}
}

func inspectChain(t *testing.T, h *Harness) {
	d := bank(t, h, 2)
	first, firstID := d.conn(t)
	second, secondID := d.conn(t)
	third, thirdID := d.conn(t)
	d.mustRun(t, first, d.beginWith(0)...)
	d.mustRun(t, second, d.beginWith(1)...)
	inBackground(t, second, "UPDATE accounts SET balance = 7 WHERE id = 0")
	d.seen(t, "the second waits", waits(secondID, firstID))
	inBackground(t, third, d.beginWith(1)...)
	s := d.seen(t, "the third waits", waits(thirdID, secondID))
	for _, pair := range [][2]int64{{secondID, firstID}, {thirdID, secondID}} {
		w, ok := waitOf(s, pair[0], pair[1])
		if !ok || w.Kind != dialect.KindRow || !strings.Contains(w.Table, "accounts") {
			t.Errorf("%d waits for %d: %+v", pair[0], pair[1], w)
		}
	}
	if !slices.Contains(s.Roots, firstID) || slices.Contains(s.Roots, secondID) || slices.Contains(s.Roots, thirdID) {
		t.Errorf("roots %v, want %d", s.Roots, firstID)
	}
	if waits(thirdID, firstID)(s) {
		t.Error("the third waits for the first, too")
	}
	if len(cyclesOf(s, firstID, secondID, thirdID)) != 0 {
		t.Errorf("cycles %v", s.Cycles)
	}
	d.mustRun(t, first, "ROLLBACK")
}

// cyclesOf are those through any of the sessions.
func cyclesOf(s *deadlock.Snapshot, ids ...int64) (found [][]int64) {
	for _, c := range s.Cycles {
		if slices.ContainsFunc(ids, func(id int64) bool { return slices.Contains(c, id) }) {
			found = append(found, c)
		}
	}
	return found
}

func inspectTable(t *testing.T, h *Harness) {
	d := bank(t, h, 2)
	idle, idleID := d.conn(t)
	alter, alterID := d.conn(t)
	reader, readerID := d.conn(t)
	d.mustRun(t, idle, d.beginWith(0)...)
	inBackground(t, alter, "ALTER TABLE accounts ADD note INT")
	s := d.seen(t, "the change waits", waits(alterID, idleID))
	w, _ := waitOf(s, alterID, idleID)
	if w.Kind != dialect.KindTable || !strings.HasSuffix(w.Table, "accounts") {
		t.Errorf("waits for %+v", w.Target)
	}
	if x := sessionIn(t, s, idleID); x.State != "idle in transaction" {
		t.Errorf("the holder is %+v", x)
	}
	inBackground(t, reader, "SELECT balance FROM accounts WHERE id = 1")
	s = d.seen(t, "a reader waits behind the change", waits(readerID, alterID))
	if !slices.Contains(s.Roots, idleID) || waits(readerID, idleID)(s) {
		t.Errorf("roots %v, waits %+v", s.Roots, s.Waits)
	}
	d.mustRun(t, idle, "ROLLBACK")
}

func inspectCycle(t *testing.T, h *Harness) {
	d := bank(t, h, 2)
	a, b := "SELECT GET_LOCK('inspect_"+d.name(t)+"', 60)", "SELECT balance FROM accounts WHERE id = 0 FOR UPDATE"
	switch d.DB.Name() {
	case "sqlserver":
		t.Skip("the server sees every cycle within 5 s")
	case "postgres":
		// It looks for a cycle when a wait has lasted for so long.
		d.exec(t, "ALTER DATABASE "+d.name(t)+" SET deadlock_timeout = '60s'")
		d.SQL.SetMaxIdleConns(0)
		d.SQL.SetMaxIdleConns(2) // new connections
		a, b = "SELECT pg_advisory_lock(7)", "SELECT pg_advisory_lock(8)"
	}
	one, oneID := d.conn(t)
	other, otherID := d.conn(t)
	d.mustRun(t, one, "BEGIN", a)
	d.mustRun(t, other, "BEGIN", b)
	inBackground(t, one, b)
	inBackground(t, other, a)
	s := d.seen(t, "each waits for the other", func(s *deadlock.Snapshot) bool {
		return waits(oneID, otherID)(s) && waits(otherID, oneID)(s)
	})
	want := []int64{min(oneID, otherID), max(oneID, otherID)}
	if got := cyclesOf(s, oneID); len(got) != 1 || !slices.Equal(got[0], want) {
		t.Errorf("cycles %v, want %v", got, want)
	}
	if slices.Contains(s.Roots, oneID) || slices.Contains(s.Roots, otherID) {
		t.Errorf("roots %v", s.Roots)
	}
	if text := s.Text(); !strings.Contains(text, fmt.Sprintf("DEADLOCK: %d waits for %d waits for %[1]d", want[0], want[1])) {
		t.Errorf("the text does not tell:\n%s", text)
	}
}

// handOffs are statements that take and give back a key.
func (d *Database) handOffs(t testing.TB) (lock, unlock string) {
	switch d.DB.Name() {
	case "postgres":
		return "SELECT pg_advisory_lock(77)", "SELECT pg_advisory_unlock(77)"
	case "sqlserver":
		return "EXEC sp_getapplock '77', 'Exclusive', 'Session'", "EXEC sp_releaseapplock '77', 'Session'"
	}
	name := "'inspect_" + d.name(t) + "'"
	return "DO GET_LOCK(" + name + ", 60)", "DO RELEASE_LOCK(" + name + ")"
}

// handOver runs the statements on n sessions, again and again, and looks meanwhile for a
// few seconds. No session may seem to be in a deadlock.
func (d *Database) handOver(t *testing.T, n int, check func(s *deadlock.Snapshot), statements ...string) {
	ctx, cancel := context.WithCancel(testContext(t))
	var done sync.WaitGroup
	defer done.Wait()
	defer cancel()
	var ids []int64
	for range n {
		c, id := d.conn(t)
		ids = append(ids, id)
		done.Go(func() {
			for ctx.Err() == nil {
				for _, s := range statements {
					if _, err := c.ExecContext(ctx, s); err != nil {
						if ctx.Err() == nil {
							t.Error(err)
						}
						return
					}
				}
			}
		})
	}
	for began := time.Now(); time.Since(began) < 4*time.Second; {
		s, err := deadlock.Inspect(ctx, d.DB)
		if err != nil {
			t.Fatal(err)
		}
		if found := cyclesOf(s, ids...); len(found) > 0 {
			t.Errorf("a deadlock where there is none: %v", found)
		}
		if check(s); t.Failed() {
			t.Fatalf("%s", s.Text())
		}
	}
}

func inspectHandOffs(t *testing.T, h *Harness) {
	d := h.Database(t)
	lock, unlock := d.handOffs(t)
	d.handOver(t, 20, func(*deadlock.Snapshot) {}, lock, unlock)
}

// The key is always taken before the row, and the row is given back after it: views
// that are read one after the other could show that as a cycle.
func inspectHandOverHand(t *testing.T, h *Harness) {
	d := bank(t, h, 1)
	lock, unlock := d.handOffs(t)
	row := d.beginWith(0)
	d.handOver(t, 4, func(s *deadlock.Snapshot) {
		holders := map[string]int{}
		for _, l := range s.Locks {
			if l.Kind == dialect.KindAdvisory && !l.Waiting {
				holders[l.Key]++
			}
		}
		for key, n := range holders {
			if n > 1 {
				t.Errorf("%s has %d holders", key, n)
			}
		}
	}, lock, row[0], row[1], unlock, "COMMIT")
}

func inspectWithoutPause(t *testing.T, h *Harness) {
	d := bank(t, h, 1)
	holder, holderID := d.conn(t)
	waiter, waiterID := d.conn(t)
	until := func(what string, condition func(s *deadlock.Snapshot) bool) {
		t.Helper()
		for began := time.Now(); ; {
			s, err := deadlock.Inspect(testContext(t), d.DB)
			if err != nil {
				t.Fatal(err)
			}
			if condition(s) {
				return
			}
			if time.Since(began) > 30*time.Second {
				t.Fatalf("not seen: %s\n%s", what, s.Text())
			}
		}
	}
	for range 3 {
		until("nobody waits", func(s *deadlock.Snapshot) bool { return !waits(waiterID, holderID)(s) })
		d.mustRun(t, holder, d.beginWith(0)...)
		done := make(chan error, 1)
		go func() {
			_, err := waiter.ExecContext(testContext(t), "UPDATE accounts SET balance = 7 WHERE id = 0")
			done <- err
		}()
		until("the wait", waits(waiterID, holderID))
		d.mustRun(t, holder, "ROLLBACK")
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

// name is that of the database.
func (d *Database) name(t testing.TB) string {
	t.Helper()
	u, err := url.Parse(d.DSN)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimPrefix(u.Path, "/")
}

func inspectStatements(t *testing.T, h *Harness) {
	d := bank(t, h, 1)
	d.exec(t, "ALTER TABLE accounts ADD secret VARCHAR(100)")
	holder, holderID := d.conn(t)
	waiter, waiterID := d.conn(t)
	d.mustRun(t, holder, d.beginWith(0)...)
	// Too long for a part of a time or an id, of which a snapshot has many.
	const statement = "UPDATE accounts SET secret = 'hunter2 it''s 47114711471147' WHERE id = 0 /* password 31337313373133 */"
	inBackground(t, waiter, statement)
	s := d.seen(t, "the wait", waits(waiterID, holderID))
	all, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	for what, text := range map[string]string{"JSON": string(all), "text": s.Text(), "DOT": s.DOT(), "Mermaid": s.Mermaid()} {
		if !strings.Contains(text, "UPDATE accounts SET secret") {
			t.Errorf("%s lacks the statement: %s", what, text)
		}
		for _, secret := range []string{"hunter2", "47114711471147", "31337313373133"} {
			if strings.Contains(text, secret) {
				t.Errorf("%s has %q in it: %s", what, secret, text)
			}
		}
	}
	full, err := deadlock.Inspect(testContext(t), d.DB, &deadlock.InspectOptions{FullStatements: true})
	if err != nil {
		t.Fatal(err)
	}
	if x := sessionIn(t, full, waiterID); !strings.Contains(x.Statement, "'hunter2 it''s 47114711471147'") {
		t.Errorf("the whole statement is %q", x.Statement)
	}
	d.mustRun(t, holder, "ROLLBACK")
}

func inspectGaps(t *testing.T, h *Harness) {
	d := h.Database(t)
	key := dblock.NewKey("inspect", "gaps")
	lock := mustLock(t, newLocker(t, d.DB), key)
	defer mustRelease(t, lock)
	dsn := d.Server.User(t, d.DSN)
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	user := map[string]string{"postgres": "%s", "sqlserver": "%s"}[d.DB.Name()]
	if user == "" {
		user = "'%s'@'%%'"
	}
	user = fmt.Sprintf(user, u.User.Username())
	look := func() *deadlock.Snapshot {
		db, err := d.h.Open(t, dsn, 0)
		if err != nil {
			t.Fatal(err)
		}
		s, err := deadlock.Inspect(testContext(t), db)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := look()
	if len(s.Gaps) == 0 {
		t.Fatalf("no gaps: %+v", s)
	}
	granted := map[string]bool{}
	for _, g := range s.Gaps {
		if !strings.Contains(s.Text(), g.Remedy) || g.What == "" {
			t.Errorf("the text does not tell of %+v", g)
		}
		grant, _, _ := strings.Cut(g.Remedy, ";")
		grant = strings.NewReplacer("this user", user, "the login", user).Replace(grant)
		grant, _, _ = strings.Cut(grant, ", on Azure")
		if !granted[grant] {
			d.exec(t, grant)
			granted[grant] = true
		}
	}
	t.Logf("granted: %v", granted)
	if s = look(); len(s.Gaps) > 0 {
		t.Errorf("gaps are left: %+v", s.Gaps)
	}
	if !slices.ContainsFunc(s.Locks, func(l deadlock.Lock) bool { return l.Session == d.holder(t, key) }) {
		t.Errorf("the lock is not seen: %+v", s.Locks)
	}
}
