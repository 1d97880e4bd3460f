package conformance

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/rowlock"
)

// cleaner is a Locker or a Once.
type cleaner interface {
	Clean(ctx context.Context, opts ...*rowlock.CleanOptions) (int64, error)
}

// clean deletes what nobody uses of a table. Where rows are only marked at first, as if
// the time until they go had passed.
func (d *Database) clean(ctx context.Context, table string, rows cleaner, o *rowlock.CleanOptions) (int64, error) {
	deleted, err := rows.Clean(ctx, o)
	if name := d.DB.Name(); err != nil || name != "mysql" && name != "mariadb" {
		return deleted, err
	}
	marked, err := d.SQL.QueryContext(ctx, `SELECT id FROM `+table+` WHERE fence < 0`)
	if err != nil {
		return deleted, err
	}
	defer marked.Close()
	for marked.Next() {
		var id int64
		if err := marked.Scan(&id); err != nil {
			return deleted, err
		}
		if _, err := d.SQL.ExecContext(ctx, fmt.Sprintf(`UPDATE %s SET fence = -1 WHERE id = %d AND fence < 0`, table, id)); err != nil {
			return deleted, err
		}
	}
	if err := marked.Err(); err != nil {
		return deleted, err
	}
	more, err := rows.Clean(ctx, o)
	return deleted + more, err
}

func rowsClean(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	rows := rowlock.New(d.DB)
	count := func() int { return d.number(t, `SELECT count(*) FROM locks`) }
	key := func(i int) dblock.Key { return dblock.NewKey("clean", strconv.Itoa(i)) }
	use := func(n int) {
		t.Helper()
		keys := make([]dblock.Key, n)
		for i := range keys {
			keys[i] = key(i)
		}
		if err := rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error { return nil }, keys...); err != nil {
			t.Fatal(err)
		}
	}
	use(25)
	holder := d.Begin(t, nil)
	defer rollback(t, holder)
	if err := rows.Lock(ctx, holder, key(3), key(17).Shared()); err != nil {
		t.Fatal(err)
	}
	lock := mustLock(t, newLocker(t, d.Open(t), &advisory.Options{Fencing: true}), dblock.NewKey("projector"))
	if err := d.guarded(ctx, rows, dblock.NewKey("projector"), lock.Token(), nothing); err != nil {
		t.Fatal(err)
	}
	deleted, err := d.clean(ctx, "locks", rows, &rowlock.CleanOptions{Batch: 10})
	if err != nil || deleted != 23 || count() != 4 {
		t.Errorf("%d deleted, %d left, %v; want 23, and the two that are locked and the two of the fencing number left", deleted, count(), err)
	}
	other := d.Begin(t, nil)
	for _, k := range []dblock.Key{key(3), key(17)} {
		if err := rows.TryLock(ctx, other, k); !errors.Is(err, dblock.ErrNotAcquired) {
			t.Errorf("%s was lost: %v", k, err)
		}
	}
	rollback(t, other)
	rollback(t, holder)
	// The same process goes on with rows that it has seen, and that are gone.
	use(25)
	if count() != 27 {
		t.Errorf("%d rows, want 27", count())
	}

	// Old numbers go, and do not come again.
	token := lock.Token()
	mustRelease(t, lock)
	<-time.After(time.Millisecond)
	if deleted, err = d.clean(ctx, "locks", rows, &rowlock.CleanOptions{Age: time.Microsecond}); err != nil || count() != 0 {
		t.Errorf("%d deleted, %d left, %v", deleted, count(), err)
	}
	lock = mustLock(t, newLocker(t, d.Open(t), &advisory.Options{Fencing: true}), dblock.NewKey("projector"))
	if lock.Token() <= token {
		t.Errorf("number %d after %d", lock.Token(), token)
	}
	mustRelease(t, lock)

	if _, err := rowlock.New(d.DB, &rowlock.Options{Table: "absent"}).Clean(ctx); !errors.Is(err, dblock.ErrSetup) {
		t.Errorf("no table: %v", err)
	}
	if _, err := rows.Clean(ctx, &rowlock.CleanOptions{Batch: -1}); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("bad option: %v", err)
	}
}

// 50 lock and unlock the same keys, in transactions of their own and through InTx, while
// others clean all the time: nobody loses a key, and nobody hears of it.
func rowsCleanBesideLockers(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(isolation.String(), func(t *testing.T) {
			ctx := testContext(t)
			dbs := []dblock.DB{d.OpenMax(t, crowd), d.OpenMax(t, crowd)} // two applications
			stop, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			var holders [3]atomic.Int32
			var grants, cleaned atomic.Int64
			var all sync.WaitGroup
			for i := range 50 {
				db := dbs[i%2]
				rows := rowlock.New(db, &rowlock.Options{Isolation: isolation})
				n := i / 2 % len(holders)
				key := dblock.NewKey("beside", isolation.String(), strconv.Itoa(n))
				inside := func() {
					if holders[n].Add(1) != 1 {
						t.Error("two holders at once")
					}
					holders[n].Add(-1)
					grants.Add(1)
				}
				own := func() error {
					tx, err := db.Begin(ctx, &sql.TxOptions{Isolation: isolation})
					if err != nil {
						return err
					}
					if err = rows.Lock(ctx, tx, key); err == nil {
						inside()
					}
					if err != nil {
						return errors.Join(err, tx.Rollback(ctx))
					}
					return tx.Commit(ctx)
				}
				all.Go(func() {
					for round := 0; stop.Err() == nil; round++ {
						var err error
						if round%2 == 0 {
							err = rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error { inside(); return nil }, key)
						} else {
							err = own()
							if db.Name() == "postgres" && isolation != sql.LevelReadCommitted && errors.Is(err, dblock.ErrSerialization) {
								err = nil // as documented, for Lock in the caller's transaction
							}
						}
						if err != nil {
							t.Error(err)
							return
						}
						<-time.After(time.Millisecond) // so that rows are free at times
					}
				})
			}
			all.Go(func() {
				for stop.Err() == nil {
					rows := rowlock.New(dbs[0])
					n, err := rows.Clean(ctx)
					if err != nil {
						t.Error(err)
						return
					}
					cleaned.Add(n)
				}
			})
			all.Wait()
			if grants.Load() == 0 {
				t.Error("nobody was granted a key")
			}
			t.Logf("%d grants, %d rows deleted", grants.Load(), cleaned.Load())
		})
	}
}

// Who locks needs no DELETE.
func rowsCleanDenied(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	ctx := testContext(t)
	dsn := d.Server.User(t, d.DSN)
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	d.exec(t, `GRANT SELECT, INSERT, UPDATE ON locks TO `+u.User.Username())
	db, err := h.Open(t, dsn, 0)
	if err != nil {
		t.Fatal(err)
	}
	rows := rowlock.New(db)
	if err := rowlock.InTx(ctx, rows, func(context.Context, dblock.Tx) error { return nil }, dblock.NewKey("clean")); err != nil {
		t.Fatal(err)
	}
	d.exec(t, `UPDATE locks SET fence = -1`) // long ago
	if _, err := rows.Clean(ctx); !errors.Is(err, dblock.ErrDenied) || !strings.Contains(err.Error(), "DELETE") || !strings.Contains(err.Error(), "GRANT") {
		t.Errorf("%v, want %v that names the GRANT", err, dblock.ErrDenied)
	}
}
