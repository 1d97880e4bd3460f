package mysql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/rowlock"
)

// stock is a small table with a composite key, which the optimizer would rather scan.
func (e *env) stock(t *testing.T) dialect.UserTable {
	t.Helper()
	e.exec(t, e.admin, "CREATE TABLE stock (shop INT NOT NULL, article VARCHAR(40) NOT NULL, n INT NOT NULL, KEY (n), PRIMARY KEY (shop, article))")
	for i := range 10 {
		e.exec(t, e.admin, fmt.Sprintf("INSERT INTO stock VALUES (%d, '%c', %d)", i/5, 'a'+i%5, i))
	}
	e.exec(t, e.admin, "ANALYZE TABLE stock")
	return dialect.UserTable{Name: "stock", Key: []string{"shop", "article"}}
}

func rowsOf(table dialect.UserTable, keys ...[2]string) dialect.UserRows {
	r := dialect.UserRows{Table: table}
	for _, key := range keys {
		r.Keys = append(r.Keys, []driver.Value{key[0], key[1]})
	}
	return r
}

// locked is how many locks of records InnoDB counts for the transaction; the view is
// renewed when nobody has looked for 100 ms.
func (e *env) locked(t *testing.T, tx dialect.OwnedTx) int {
	t.Helper()
	id := value[int64](t, e.ctx, tx.Native().(*sql.Tx), "SELECT CONNECTION_ID()")
	time.Sleep(300 * time.Millisecond)
	return value[int](t, e.ctx, e.admin, fmt.Sprintf("SELECT trx_rows_locked FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = %d", id))
}

// Every row that a claim locks it returns, in a small table and a large one, of
// whatever the condition and the order make the optimizer do.
func TestClaimLocksWhatItReturns(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		table := e.stock(t)
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE jobs (id BIGINT PRIMARY KEY, state VARCHAR(10) NOT NULL, due INT NOT NULL, KEY (state), KEY (due))")
		for from := 0; from < 2000; from += 500 {
			var rows []string
			for id := from; id < from+500; id++ {
				rows = append(rows, fmt.Sprintf("(%d, '%s', %d)", id, []string{"new", "done"}[id%2], 2000-id))
			}
			e.exec(t, e.admin, "INSERT INTO jobs VALUES "+strings.Join(rows, ", "))
		}
		e.exec(t, e.admin, "ANALYZE TABLE jobs")
		jobs := dialect.UserTable{Name: "jobs", Key: []string{"id"}}
		for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			for _, c := range []dialect.UserClaim{
				{Table: table, Limit: 4},
				{Table: table, Limit: 4, Where: "n > 3", OrderBy: []dialect.Order{{Column: "n", Descending: true}}},
				{Table: jobs, Limit: 100, Where: "state = 'new'"},
				{Table: jobs, Limit: 100, Where: "state = ?", Args: []any{"new"}, OrderBy: []dialect.Order{{Column: "due"}}},
				{Table: jobs, Limit: 900, Where: "state = 'new' AND due > 10"},
			} {
				tx := e.begin(t, db, &sql.TxOptions{Isolation: isolation})
				keys, err := db.ClaimUserRows(e.ctx, tx, c)
				if err != nil || len(keys) != c.Limit {
					t.Fatalf("%v, %+v: %d rows, %v", isolation, c, len(keys), err)
				}
				// At stricter levels the view counts the ends of pages, too.
				if n := e.locked(t, tx); isolation == sql.LevelReadCommitted && n != len(keys) {
					t.Errorf("%v, %+v: %d rows returned, %d locked", isolation, c, len(keys), n)
				}
				other := e.begin(t, db, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
				rest, err := db.ClaimUserRows(e.ctx, other, dialect.UserClaim{Table: c.Table, Limit: 5000})
				if want := value[int](t, e.ctx, e.admin, "SELECT COUNT(*) FROM "+c.Table.Name) - len(keys); err != nil || len(rest) != want {
					t.Errorf("%v, %+v: %d rows are free, %v; want %d", isolation, c, len(rest), err, want)
				}
				if err := other.Rollback(e.ctx); err != nil {
					t.Error(err)
				}
				if err := tx.Rollback(e.ctx); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

func TestOwnRowsLockWhatTheyName(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		table := e.stock(t)
		db := e.open(t)
		for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			tx := e.begin(t, db, &sql.TxOptions{Isolation: isolation})
			r := rowsOf(table, [2]string{"1", "a"}, [2]string{"0", "A"}, [2]string{"0", "b"}, [2]string{"0", "a"}, [2]string{"0", "d"})
			if err := db.LockUserRows(e.ctx, tx, r); err != nil {
				t.Fatal(err)
			}
			if n := e.locked(t, tx); n != 4 {
				t.Errorf("%v: %d rows are locked, want 4", isolation, n)
			}
			if err := tx.Rollback(e.ctx); err != nil {
				t.Error(err)
			}
		}
	})
}

// What a transaction reads after the lock is what the former holder committed, also
// the first time that it uses the table, and with keys that the server sorts.
func TestOwnRowsOpenNoReadView(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		table := e.stock(t)
		db := e.open(t)
		r := rowsOf(table, [2]string{"1", "a"}, [2]string{"0", "b"})
		holder := e.begin(t, db, nil)
		if err := db.LockUserRows(e.ctx, holder, r); err != nil {
			t.Fatal(err)
		}
		another := e.open(t) // which has not seen the table
		waiter := e.begin(t, another, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
		id := value[int64](t, e.ctx, waiter.Native().(*sql.Tx), "SELECT CONNECTION_ID()")
		granted := make(chan error, 1)
		go func() { granted <- another.LockUserRows(e.ctx, waiter, r) }()
		e.awaitStatement(t, id, "/* dblock%FOR UPDATE", 0)
		e.exec(t, holder, "UPDATE stock SET n = 99 WHERE shop = 0 AND article = 'b'")
		if err := holder.Commit(e.ctx); err != nil {
			t.Fatal(err)
		}
		if err := <-granted; err != nil {
			t.Fatal(err)
		}
		if n := value[int](t, e.ctx, waiter.Native().(*sql.Tx), "SELECT n FROM stock WHERE shop = 0 AND article = 'b'"); n != 99 {
			t.Errorf("read %d, want what the former holder committed", n)
		}
	})
}

// By default a server sorts by the first 1,024 bytes of what it compares.
func TestOwnRowsWithLongKeysAreLockedInOrder(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		for collation, length := range map[string]int{"latin1_swedish_ci": 3000, "utf8mb3_unicode_ci": 1000, "utf8mb4_unicode_520_ci": 760, "utf8mb4_bin": 760} {
			charset, _, _ := strings.Cut(collation, "_")
			table := dialect.UserTable{Name: "long_" + collation, Key: []string{"name"}}
			e.exec(t, e.admin, fmt.Sprintf("CREATE TABLE %s (name VARCHAR(%d) CHARACTER SET %s COLLATE %s PRIMARY KEY)", table.Name, length, charset, collation))
			of := func(end string) []driver.Value { return []driver.Value{strings.Repeat("x", length-1) + end} }
			for _, end := range []string{"1", "2", "3"} {
				e.exec(t, e.admin, fmt.Sprintf("INSERT INTO %s VALUES ('%s')", table.Name, of(end)[0]))
			}
			try := func(tx dialect.OwnedTx, ends ...string) error {
				r := dialect.UserRows{Table: table, Try: true}
				for _, end := range ends {
					r.Keys = append(r.Keys, of(end))
				}
				return db.LockUserRows(e.ctx, tx, r)
			}
			holder, refused, other := e.begin(t, db, nil), e.begin(t, db, nil), e.begin(t, db, nil)
			if err := try(holder, "1"); err != nil {
				t.Fatal(err)
			}
			wantClass(t, try(refused, "3", "2", "1"), dialect.NotAcquired)
			if err := try(other, "2", "3"); err != nil {
				t.Errorf("%s: the last rows were locked before the first one: %v", collation, err)
			}
		}
	})
}

// The server sorts in memory of its own.
func TestOwnRowsWithManyLongKeys(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE symbols (name VARCHAR(768) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_520_ci PRIMARY KEY)")
		r := dialect.UserRows{Table: dialect.UserTable{Name: "symbols", Key: []string{"name"}}}
		for i := range 1000 {
			r.Keys = append(r.Keys, []driver.Value{strings.Repeat("\uFDFA", 764) + fmt.Sprintf("%04d", i)})
		}
		wantClass(t, db.LockUserRows(e.ctx, e.begin(t, db, nil), r), dialect.NotFound)
	})
}

func TestOwnRowsRefuseOtherEngines(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE plain (id INT PRIMARY KEY) ENGINE = MyISAM")
		tx := e.begin(t, db, nil)
		err := db.LockUserRows(e.ctx, tx, dialect.UserRows{Table: dialect.UserTable{Name: "plain", Key: []string{"id"}}, Keys: [][]driver.Value{{int64(1)}}})
		wantClass(t, err, dialect.Unsupported)
	})
}

// MariaDB tells that a deadlock has left nothing of a transaction; MySQL does not tell
// an *sql.Tx, where only the deadlock's own error does.
func TestOwnRowsAfterTheServersRollback(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		table := e.stock(t)
		db := e.open(t)
		tx := e.begin(t, db, nil)
		e.exec(t, tx, "ROLLBACK") // as a deadlock does
		for _, keys := range [][][2]string{{{"0", "a"}}, {{"0", "a"}, {"0", "b"}}} {
			err := db.LockUserRows(e.ctx, tx, rowsOf(table, keys...))
			if e.mariadb() {
				wantClass(t, err, dialect.Unsupported)
			} else if err != nil {
				t.Errorf("MySQL tells by now: %v", err)
			}
		}
	})
}

// A time.Time means what the driver makes of it, which is for the DSN to say.
func TestOwnRowsKeysOfTime(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.exec(t, e.admin, "CREATE TABLE slots (at DATETIME PRIMARY KEY)")
		e.exec(t, e.admin, "INSERT INTO slots VALUES ('2026-11-03 10:00:00')")
		at := time.Date(2026, 11, 3, 10, 0, 0, 0, time.UTC)
		zone := time.FixedZone("east", 3*3600)
		for dsn, wants := range map[string]map[time.Time]dialect.Class{
			e.dsn:                               {at: "", at.In(zone): "", at.Add(time.Hour): dialect.NotFound},
			with(t, e.dsn, "loc", "Asia/Tokyo"): {at.Add(-9 * time.Hour): "", at: dialect.NotFound},
		} {
			db, err := mysql.Open(e.ctx, dsn)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
			for at, want := range wants {
				tx := e.begin(t, db, nil)
				err := db.LockUserRows(e.ctx, tx, dialect.UserRows{Table: dialect.UserTable{Name: "slots", Key: []string{"at"}}, Keys: [][]driver.Value{{at}}})
				if class := dialect.ClassOf(err); class != want {
					t.Errorf("%v: %v, want %q", at, err, want)
				}
				if err := tx.Rollback(context.Background()); err != nil {
					t.Error(err)
				}
			}
		}
	})
}

// A value that the column's character set does not have names no row, not that of a
// question mark, and locks none.
func TestOwnRowsKeysOutsideTheCharacterSet(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		for charset, unknown := range map[string]string{"latin1": "日", "utf8mb3": "🔒", "utf8mb4": "🔑"} {
			table := "names_" + charset
			e.exec(t, e.admin, fmt.Sprintf("CREATE TABLE %s (name VARCHAR(10) PRIMARY KEY) CHARACTER SET %s", table, charset))
			e.exec(t, e.admin, fmt.Sprintf("INSERT INTO %s VALUES ('?'), ('É'), ('z')", table))
			tx := e.begin(t, db, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			lock := func(names ...string) error {
				r := dialect.UserRows{Table: dialect.UserTable{Name: table, Key: []string{"name"}}}
				for _, name := range names {
					r.Keys = append(r.Keys, []driver.Value{name})
				}
				return db.LockUserRows(e.ctx, tx, r)
			}
			wantClass(t, lock(unknown), dialect.NotFound)
			if err := lock("z", "é"); err != nil {
				t.Errorf("%s: %v", charset, err)
			}
			if n := e.locked(t, tx); n > 3 { // two rows, and the gap of the missing one where it could be
				t.Errorf("%s: %d rows are locked", charset, n)
			}
			other := e.begin(t, db, nil)
			r := dialect.UserRows{Table: dialect.UserTable{Name: table, Key: []string{"name"}}, Keys: [][]driver.Value{{"?"}}, Try: true}
			if err := db.LockUserRows(e.ctx, other, r); err != nil {
				t.Errorf("%s: the row of a question mark: %v", charset, err)
			}
			if err := other.Rollback(e.ctx); err != nil {
				t.Error(err)
			}
		}
	})
}

// database/sql has no such number.
func TestClaimedKeyAboveInt64CanBeLocked(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		e.exec(t, e.admin, "CREATE TABLE big (id BIGINT UNSIGNED PRIMARY KEY)")
		e.exec(t, e.admin, "INSERT INTO big VALUES (18446744073709551615)")
		rows := rowlock.NewRows(db, rowlock.RowsOptions{Table: "big", Key: []string{"id"}})
		tx := e.begin(t, db, nil)
		keys, err := rows.Claim(e.ctx, tx, rowlock.ClaimOptions{})
		if err != nil || len(keys) != 1 {
			t.Fatalf("%v, %v", keys, err)
		}
		if err := rows.Lock(e.ctx, tx, keys...); err != nil {
			t.Error(err)
		}
	})
}
