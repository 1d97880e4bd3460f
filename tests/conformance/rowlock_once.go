package conformance

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
	"github.com/dblock-go/dblock/tests/proxy"
)

func message(parts ...any) dblock.Key {
	texts := make([]string, len(parts))
	for i, part := range parts {
		texts[i] = fmt.Sprint(part)
	}
	return dblock.NewKey(append([]string{"message"}, texts...)...)
}

// atEveryLevel runs a test at each isolation level.
func (d *Database) atEveryLevel(t *testing.T, test func(t *testing.T, isolation sql.IsolationLevel)) {
	levels := []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
	if d.DB.Name() == "sqlserver" {
		d.exec(t, `ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION ON`)
		levels = append(levels, sql.LevelSnapshot)
	}
	for _, isolation := range levels {
		t.Run(isolation.String(), func(t *testing.T) { test(t, isolation) })
	}
}

// refusesNewer is true where a transaction must not act on what is newer than its
// snapshot.
func (d *Database) refusesNewer(isolation sql.IsolationLevel) bool {
	switch d.DB.Name() {
	case "postgres":
		return isolation != sql.LevelReadCommitted
	case "sqlserver":
		return isolation == sql.LevelSnapshot
	}
	return false
}

func onceFirst(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE other (n INT)`)
	once := rowlock.NewOnce(d.DB)
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		begin := func() dialect.OwnedTx { return d.Begin(t, &sql.TxOptions{Isolation: isolation}) }
		m := func(n int) dblock.Key { return message(isolation, n) }

		tx := begin()
		mustMark(t, once, tx, true, m(1))
		mustMark(t, once, tx, false, m(1)) // in the same transaction
		rollback(t, tx)
		tx = begin()
		mustMark(t, once, tx, true, m(1))
		commit(t, tx)
		tx = begin()
		mustMark(t, once, tx, false, m(1))
		rollback(t, tx)

		tx = begin()
		first, err := once.MarkEach(ctx, tx, m(3), m(1), m(2), m(3), m(2))
		if want := []bool{true, false, true, false, false}; err != nil || !slices.Equal(first, want) {
			t.Errorf("%v, %v, want %v", first, err, want)
		}
		commit(t, tx)

		many := make([]dblock.Key, dblock.MaxKeys)
		for i := range many {
			many[i] = m(i)
		}
		tx = begin()
		first, err = once.MarkEach(ctx, tx, many...)
		if err != nil {
			t.Fatal(err)
		}
		for i, isFirst := range first {
			if isFirst != (i == 0 || i > 3) {
				t.Errorf("message %d of many: %t", i, isFirst)
			}
		}
		commit(t, tx)

		// A transaction whose snapshot is older than the mark.
		old := begin()
		if _, err := readInt(ctx, old, `SELECT count(*) FROM other`); err != nil {
			t.Fatal(err)
		}
		tx = begin()
		mustMark(t, once, tx, true, message(isolation, "newer"))
		commit(t, tx)
		isFirst, err := once.Mark(ctx, old, message(isolation, "newer"))
		switch {
		case isFirst:
			t.Error("a stale read said that it is the first")
		case d.refusesNewer(isolation) && !errors.Is(err, dblock.ErrSerialization),
			!d.refusesNewer(isolation) && err != nil:
			t.Errorf("behind an old snapshot: %v", err)
		}
		rollback(t, old)
	})
}

func mustMark(t testing.TB, once *rowlock.Once, tx dblock.Tx, want bool, m dblock.Key) {
	t.Helper()
	if first, err := once.Mark(testContext(t), tx, m); err != nil || first != want {
		t.Errorf("%s: %t, %v, want %t", m, first, err, want)
	}
}

// Of two deliveries at once the second waits for the first one's end.
func onceWaits(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	once := rowlock.NewOnce(d.DB)
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		for _, committed := range []bool{true, false} {
			m := message(isolation, committed)
			one, other := d.Begin(t, &sql.TxOptions{Isolation: isolation}), d.Begin(t, &sql.TxOptions{Isolation: isolation})
			if first, err := once.Mark(ctx, one, m); !first || err != nil {
				t.Fatalf("%t, %v", first, err)
			}
			type result struct {
				first bool
				err   error
			}
			second := make(chan result, 1)
			go func() {
				first, err := once.Mark(ctx, other, m)
				second <- result{first, err}
			}()
			d.awaitBlocked(t, 1)
			if committed {
				commit(t, one)
			} else {
				rollback(t, one)
			}
			got := <-second
			if committed && d.refusesNewer(isolation) && errors.Is(got.err, dblock.ErrSerialization) {
				got.err = nil
			}
			if got.err != nil || got.first == committed {
				t.Errorf("after the first one's end (committed: %t): first %t, %v", committed, got.first, got.err)
			}
			rollback(t, other)
		}
	})
}

// 50 mark the same few messages, in any order, and others of their own between them. Half
// of them roll back.
func onceDeadlocks(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	db := d.OpenMax(t, crowd)
	once := rowlock.NewOnce(db)
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		const rounds, goroutines = 2, 50
		for round := range rounds {
			var all sync.WaitGroup
			var committed [3]atomic.Int32
			for i := range goroutines {
				shared := []dblock.Key{message(isolation, round, i%3), message(isolation, round, (i+1)%3)}
				own := []dblock.Key{message(isolation, round, "own", i, 1), message(isolation, round, "own", i, 2)}
				attempt := func() error {
					tx, err := db.Begin(ctx, &sql.TxOptions{Isolation: isolation})
					if err != nil {
						return err
					}
					first, err := once.MarkEach(ctx, tx, append(shared, own[0])...)
					if err == nil {
						_, err = once.Mark(ctx, tx, own[1]) // in the gaps of what others have marked
					}
					if err != nil || i%2 == 0 {
						return errors.Join(err, tx.Rollback(ctx))
					}
					if err := tx.Commit(ctx); err != nil {
						return err
					}
					for n := range shared {
						if first[n] {
							committed[(i+n)%3].Add(1)
						}
					}
					return nil
				}
				all.Go(func() {
					err := attempt()
					for d.refusesNewer(isolation) && errors.Is(err, dblock.ErrSerialization) {
						err = attempt()
					}
					if err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			for n := range committed {
				if got := committed[n].Load(); got != 1 {
					t.Errorf("message %d was processed %d times", n, got)
				}
			}
		}
	})
}

// Deliveries are repeated until one knows that its message was processed. Between mark
// and commit, sessions are killed and transactions rolled back.
func onceKilled(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE work (message INT NOT NULL, level INT NOT NULL)`, `CREATE TABLE other (n INT)`)
	dbs := []dblock.DB{d.OpenMax(t, crowd), d.OpenMax(t, crowd)} // two applications
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		const messages, deliveries = 40, 4
		var kills, again atomic.Int32
		var all sync.WaitGroup
		for i := range messages * deliveries {
			n, db := i/deliveries, dbs[i%2]
			once := rowlock.NewOnce(db)
			deliver := func(try int) (done bool, err error) {
				tx, err := db.Begin(ctx, &sql.TxOptions{Isolation: isolation})
				if err != nil {
					return false, err
				}
				defer func() { err = errors.Join(err, tx.Rollback(context.WithoutCancel(ctx))) }()
				if i%3 == 0 { // its snapshot is older than the marks of those that it waits for
					if _, err := readInt(ctx, tx, `SELECT count(*) FROM other`); err != nil {
						return false, err
					}
				}
				first, err := once.Mark(ctx, tx, message(isolation, n))
				if err != nil {
					return false, err
				}
				if !first {
					return true, nil
				}
				if err := execute(ctx, tx, fmt.Sprintf(`INSERT INTO work VALUES (%d, %d)`, n, isolation)); err != nil {
					return false, err
				}
				if try == 0 && i%deliveries != 3 {
					if i%2 == 0 {
						return false, nil // rolled back
					}
					session, err := d.h.SessionOf(ctx, tx.Native())
					if err != nil {
						return false, err
					}
					d.kill(t, session)
					kills.Add(1)
				}
				return false, tx.Commit(ctx) // the next delivery learns whether it happened
			}
			all.Go(func() {
				for try := 0; ctx.Err() == nil; try++ {
					done, err := deliver(try)
					if err != nil && !errors.Is(err, dblock.ErrSerialization) && !errors.Is(err, dblock.ErrLost) &&
						!errors.Is(db.Classify(err), dblock.ErrLost) && !errors.Is(db.Classify(err), dblock.ErrSerialization) {
						t.Errorf("message %d: %v", n, err)
						return
					}
					if done {
						return
					}
					again.Add(1)
				}
				t.Errorf("message %d was not processed in time", n)
			})
		}
		all.Wait()
		counts := d.ints(t, fmt.Sprintf(`SELECT count(*) FROM work WHERE level = %d GROUP BY message`, isolation))
		if len(counts) != messages || slices.Max(counts) != 1 {
			t.Errorf("%d of %d messages were processed, one of them %d times", len(counts), messages, slices.Max(counts))
		}
		if kills.Load() == 0 {
			t.Error("nobody was killed")
		}
		t.Logf("%d killed, %d deliveries again", kills.Load(), again.Load())
	})
}

func onceInTx(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE work (message INT NOT NULL)`)
	db := d.OpenMax(t, crowd)
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		d.exec(t, `DELETE FROM work`)
		// PostgreSQL has those start again who waited, which costs attempts.
		once := rowlock.NewOnce(db, &rowlock.OnceOptions{Isolation: isolation, Retry: &deadlock.RetryOptions{Attempts: 100}})
		unwanted := errors.New("rolled back on purpose")
		fail := func(context.Context, dblock.Tx) error { return unwanted }
		if first, err := rowlock.DoOnce(ctx, once, fail, message(isolation, 0)); first || err != unwanted {
			t.Errorf("%t, %v, want the function's error", first, err)
		}
		var all sync.WaitGroup
		var firsts atomic.Int32
		for i := range 50 {
			all.Go(func() {
				first, err := rowlock.DoOnce(ctx, once, func(ctx context.Context, tx dblock.Tx) error {
					return execute(ctx, tx, `INSERT INTO work VALUES (`+strconv.Itoa(i%5)+`)`)
				}, message(isolation, i%5))
				if err != nil {
					t.Error(err)
				}
				if first {
					firsts.Add(1)
				}
			})
		}
		all.Wait()
		if n := d.number(t, `SELECT count(*) FROM work`); n != 5 || firsts.Load() != 5 {
			t.Errorf("%d of 5 messages were processed, %d were the first", n, firsts.Load())
		}
	})
}

// Of a third of the commits nobody hears whether they happened. Every message is
// delivered until somebody hears of it.
func onceUnansweredCommits(t *testing.T, h *Harness) {
	d := h.Database(t)
	if d.DB.Name() == "sqlserver" {
		t.Skip("needs a proxy that knows a commit of SQL Server's protocol")
	}
	d.Setup(t)
	d.exec(t, `CREATE TABLE work (message INT NOT NULL, level INT NOT NULL)`)
	network := proxy.NewCommits(t, d.DSN)
	db, err := h.Open(t, network.DSN, crowd)
	if err != nil {
		t.Fatal(err)
	}
	d.atEveryLevel(t, func(t *testing.T, isolation sql.IsolationLevel) {
		ctx := testContext(t)
		const messages, deliveries = 15, 4
		once := rowlock.NewOnce(db, &rowlock.OnceOptions{Isolation: isolation, Retry: &deadlock.RetryOptions{Attempts: 100}})
		before := network.Lost()
		var all sync.WaitGroup
		for i := range messages * deliveries {
			all.Go(func() {
				for {
					_, err := rowlock.DoOnce(ctx, once, func(ctx context.Context, tx dblock.Tx) error {
						return execute(ctx, tx, fmt.Sprintf(`INSERT INTO work VALUES (%d, %d)`, i%messages, isolation))
					}, message(isolation, i%messages))
					if err == nil {
						return
					}
					if !errors.Is(err, dblock.ErrLost) {
						t.Errorf("%v, want nil or %v", err, dblock.ErrLost)
						return
					}
				}
			})
		}
		all.Wait()
		if counts := d.ints(t, fmt.Sprintf(`SELECT count(*) FROM work WHERE level = %d GROUP BY message`, isolation)); len(counts) != messages || slices.Max(counts) != 1 {
			t.Errorf("%d of %d messages were processed, one of them %d times", len(counts), messages, slices.Max(counts))
		}
		if network.Lost() == before {
			t.Error("no answer was lost")
		}
		t.Logf("%d answers were lost", network.Lost()-before)
	})
}

func onceRefuses(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	once := rowlock.NewOnce(d.DB)
	mark := func(tx dblock.Tx, messages ...dblock.Key) error {
		_, err := once.MarkEach(ctx, tx, messages...)
		return err
	}
	tx := d.Begin(t, nil)
	for name, test := range map[string]struct {
		err, want error
	}{
		"no message":     {mark(tx), dblock.ErrInvalidKey},
		"an empty one":   {mark(tx, message(1), dblock.Key{}), dblock.ErrInvalidKey},
		"a shared one":   {mark(tx, message(1).Shared()), dblock.ErrInvalidOption},
		"no transaction": {mark(d.SQL, message(1)), dblock.ErrUnsupported},
		"nil":            {mark(nil, message(1)), dblock.ErrUnsupported},
	} {
		if !errors.Is(test.err, test.want) {
			t.Errorf("%s: %v, want %v", name, test.err, test.want)
		}
	}
	// All of that was found out before anything happened in the transaction.
	mustMark(t, once, tx, true, message(1))
	commit(t, tx)

	conn, err := d.SQL.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := mark(conn, message(2)); !errors.Is(err, dblock.ErrUnsupported) {
		t.Errorf("a connection without a transaction: %v", err)
	}

	_, err = rowlock.NewOnce(d.DB, &rowlock.OnceOptions{Table: "absent"}).Mark(ctx, d.Begin(t, nil), message(1))
	if !errors.Is(err, dblock.ErrSetup) || !strings.Contains(err.Error(), "dblock setup") {
		t.Errorf("no table: %v", err)
	}

	// Whatever the chance of it: nobody's message counts as done because of another one.
	key := message("collides").ResolveDigest()
	d.exec(t, fmt.Sprintf(`INSERT INTO once (id, name, fence) VALUES (%d, 'other', 1)`, key.ID))
	if err := mark(d.Begin(t, nil), message(3), message("collides")); !errors.Is(err, dblock.ErrInvalidKey) {
		t.Errorf("a collision: %v", err)
	}
}
