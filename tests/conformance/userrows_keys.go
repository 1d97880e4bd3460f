package conformance

import (
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// keyTypes are types that differ in how values are written, with values that are equal
// to the column, and with one that is not.
var keyTypes = map[string]struct {
	columns map[string]string // by the database's name; "" for all others
	insert  string
	same    []any
	other   any
	wrong   []any
}{
	"integer": {map[string]string{"": "BIGINT"}, "42", []any{42, int64(42), int8(42), uint(42), "42", []byte("42")}, 43, []any{"x", "42x", ""}},
	"number":  {map[string]string{"": "NUMERIC(10, 2)"}, "1.00", []any{1, 1.0, "1.0", "1.000"}, "1.01", []any{"x"}},
	"text":    {map[string]string{"": "VARCHAR(40)"}, "'42'", []any{"42", 42, []byte("42")}, "042", nil},
	"quotes":  {map[string]string{"": "VARCHAR(40)"}, `'it''s "é$1?'`, []any{`it's "é$1?`}, `it''s "é$1?`, nil},
	"bytes": {map[string]string{"postgres": "BYTEA", "": "VARBINARY(16)"}, "", []any{[]byte{0, 0xff, '\'', '\\'}, "\x00\xff'\\"},
		[]byte{0, 0xff}, nil},
	"time": {map[string]string{"postgres": "TIMESTAMP", "sqlserver": "DATETIME2", "": "DATETIME(6)"}, "'2026-11-03 10:00:00'",
		[]any{time.Date(2026, 11, 3, 10, 0, 0, 0, time.UTC), "2026-11-03 10:00:00", "2026-11-03 10:00:00.000"}, "2026-11-03 10:00:01", nil},
	"date": {map[string]string{"": "DATE"}, "'2026-11-03'", []any{"2026-11-03"}, "2026-11-04", nil},
}

// keyTable has one row for the values that are the same, and one for the other.
func (d *Database) keyTable(t *testing.T, name string) *rowlock.Rows {
	t.Helper()
	of := keyTypes[name]
	column, ok := of.columns[d.DB.Name()]
	if !ok {
		column = of.columns[""]
	}
	table := "keys_" + name
	d.exec(t, fmt.Sprintf(`CREATE TABLE %s (k %s NOT NULL PRIMARY KEY, n INT)`, table, column))
	first := of.insert
	other := fmt.Sprintf("'%s'", strings.ReplaceAll(fmt.Sprint(of.other), "'", "''"))
	switch {
	case name == "bytes" && d.DB.Name() == "postgres":
		first, other = `'\x00ff275c'`, `'\x00ff'`
	case name == "bytes":
		first, other = "0x00ff275c", "0x00ff"
	case d.DB.Name() == "sqlserver" && name == "integer":
		other = "43"
	}
	d.exec(t, fmt.Sprintf(`INSERT INTO %s VALUES (%s, 1)`, table, first), fmt.Sprintf(`INSERT INTO %s VALUES (%s, 2)`, table, other))
	return rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: table, Key: []string{"k"}})
}

func userRowsTypes(t *testing.T, h *Harness) {
	d := h.Database(t)
	ctx := testContext(t)
	for name, of := range keyTypes {
		rows := d.keyTable(t, name)
		holder := d.Begin(t, nil)
		var all []rowlock.PrimaryKey
		for _, same := range of.same {
			all = append(all, rowlock.PK(same))
		}
		if err := rows.Lock(ctx, holder, all...); err != nil {
			t.Errorf("%s, all at once: %v", name, err)
		}
		for _, same := range of.same {
			tx := d.Begin(t, nil)
			if err := rows.TryLock(ctx, tx, rowlock.PK(same)); !errors.Is(err, dblock.ErrNotAcquired) {
				t.Errorf("%s: %T %v is another row: %v", name, same, same, err)
			}
			if err := rows.TryLock(ctx, tx, rowlock.PK(of.other)); err != nil {
				t.Errorf("%s: %v is the same row or none: %v", name, of.other, err)
			}
			rollback(t, tx)
		}
		rollback(t, holder)
		for _, wrong := range of.wrong {
			tx := d.Begin(t, nil)
			if err := rows.Lock(ctx, tx, rowlock.PK(wrong)); !errors.Is(err, dblock.ErrInvalidKey) || !strings.Contains(err.Error(), "k") {
				t.Errorf("%s: %q: %v, want %v", name, wrong, err, dblock.ErrInvalidKey)
			}
			rollback(t, tx)
		}
	}
}

// What was claimed names the same row to Lock.
func claimsTypes(t *testing.T, h *Harness) {
	d := h.Database(t)
	ctx := testContext(t)
	for name, of := range keyTypes {
		rows := d.keyTable(t, name)
		claimer := d.Begin(t, nil)
		keys, err := rows.Claim(ctx, claimer, rowlock.ClaimOptions{Where: "n = 1", Limit: 5})
		if err != nil || len(keys) != 1 {
			t.Errorf("%s: claimed %v, %v", name, keys, err)
			continue
		}
		if err := rows.Lock(ctx, claimer, keys...); err != nil {
			t.Errorf("%s: %#v: %v", name, keys[0], err)
		}
		var text string
		if err := keys[0].Scan(&text); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if want, ok := of.same[0].(string); ok && text != want {
			t.Errorf("%s: %q, want %q", name, text, want)
		}
		rollback(t, claimer)
	}
}

// Many transactions lock random sets, with each key written as it comes. The
// transactions are the application's: no retry hides a deadlock.
func userRowsOrder(t *testing.T, h *Harness) {
	d := h.Database(t)
	const shops = 2
	d.stock(t, rowlock.RowsOptions{}, shops)
	db := d.OpenMax(t, crowd)
	rows := rowlock.NewRows(db, rowlock.RowsOptions{Table: `the "stock`, Key: []string{"order", "Article]`"}})
	ctx := testContext(t)
	spelled := func() rowlock.PrimaryKey {
		shop, article := rand.IntN(shops), string("abcde"[rand.IntN(5)])
		if rand.IntN(2) == 0 {
			article = strings.ToUpper(article)
		}
		return [...]rowlock.PrimaryKey{rowlock.PK(shop, article), rowlock.PK(fmt.Sprint(shop), []byte(article)), rowlock.PK(int64(shop), article)}[rand.IntN(3)]
	}
	var all sync.WaitGroup
	for range crowd {
		all.Go(func() {
			for range 25 {
				keys := make([]rowlock.PrimaryKey, 2+rand.IntN(4))
				for i := range keys {
					keys[i] = spelled()
				}
				err := d.inTx(ctx, db, func(tx dblock.Tx) error {
					if err := rows.Lock(ctx, tx, keys...); err != nil {
						return err
					}
					return execute(ctx, tx, `UPDATE `+d.escaped(`the "stock`)+` SET n = n + 1 WHERE `+d.escaped("order")+fmt.Sprintf(" = %s AND ", fmt.Sprint(keys[0][0]))+
						d.escaped("Article]`")+fmt.Sprintf(" = '%s'", keys[0][1]))
				})
				if err != nil {
					t.Errorf("%v: %v", keys, err)
					return
				}
			}
		})
	}
	all.Wait()
	if n := d.number(t, `SELECT sum(n) FROM `+d.escaped(`the "stock`)); n != crowd*25 && !t.Failed() {
		t.Errorf("%d updates, want %d", n, crowd*25)
	}
}

func userRowsMistakes(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.jobs(t, 2)
	d.exec(t, `CREATE TABLE written (n INT PRIMARY KEY)`)
	ctx := testContext(t)
	for _, test := range []struct {
		name  string
		rows  rowlock.RowsOptions
		key   rowlock.PrimaryKey
		claim rowlock.ClaimOptions
		want  error
		text  string
	}{
		{"no such table", rowlock.RowsOptions{Table: "Jobs'; --", Key: []string{"id"}}, rowlock.PK(1), rowlock.ClaimOptions{}, dblock.ErrInvalidOption, "no table Jobs'; --"},
		{"no such schema", rowlock.RowsOptions{Schema: "nowhere", Table: "jobs", Key: []string{"id"}}, rowlock.PK(1), rowlock.ClaimOptions{}, dblock.ErrInvalidOption, "no table nowhere.jobs"},
		{"a schema in the table's name", rowlock.RowsOptions{Table: "sales.jobs", Key: []string{"id"}}, rowlock.PK(1), rowlock.ClaimOptions{}, dblock.ErrInvalidOption, `Schema: "sales", Table: "jobs"`},
		{"no such column", rowlock.RowsOptions{Table: "jobs", Key: []string{"id", "x`\""}}, rowlock.PK(1, 2), rowlock.ClaimOptions{}, dblock.ErrInvalidOption, "no column x`\""},
		{"no unique key", rowlock.RowsOptions{Table: "jobs", Key: []string{"state"}}, rowlock.PK("new"), rowlock.ClaimOptions{}, dblock.ErrInvalidOption, "(state)"},
		{"too short", rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}}, rowlock.PK(), rowlock.ClaimOptions{Limit: -1}, nil, ""},
		{"too long", rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}}, rowlock.PK(1, 2), rowlock.ClaimOptions{Limit: -1}, nil, ""},
	} {
		rows := rowlock.NewRows(d.DB, test.rows)
		tx := d.Begin(t, nil)
		mustExec(t, tx, `INSERT INTO written VALUES (1)`)
		lock, claim := test.want, test.want
		if test.want == nil {
			lock, claim = dblock.ErrInvalidKey, dblock.ErrInvalidOption
		}
		if err := rows.Lock(ctx, tx, test.key); !errors.Is(err, lock) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("lock, %s: %v, want %v with %q", test.name, err, lock, test.text)
		}
		if _, err := rows.Claim(ctx, tx, test.claim); !errors.Is(err, claim) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("claim, %s: %v, want %v with %q", test.name, err, claim, test.text)
		}
		mustExec(t, tx, `INSERT INTO written VALUES (2)`) // the transaction goes on
		rollback(t, tx)
	}

	jobs := rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}})
	for name, o := range map[string]rowlock.ClaimOptions{
		"a column of Where that is not there":   {Where: "stat = 'new'"},
		"a column of OrderBy that is not there": {OrderBy: []rowlock.Order{{Column: "prio"}}},
		"a function that is not there":          {Where: "nowhere(id) = 1"},
		"no SQL":                                {Where: "state ="},
	} {
		tx := d.Begin(t, nil)
		_, err := jobs.Claim(ctx, tx, o)
		if !errors.Is(err, dblock.ErrInvalidOption) || !strings.Contains(err.Error(), "ClaimOptions.Where") || !strings.Contains(err.Error(), "of jobs") {
			t.Errorf("claim, %s: %v", name, err)
		}
		if remains := deadlock.Remains(d.DB, err); remains != dialect.RemainsUsable && d.DB.Name() != "postgres" || remains == dialect.RemainsUnknown {
			t.Errorf("claim, %s: %v: remains %v", name, err, remains)
		}
		rollback(t, tx)
	}
	both := func(name string, tx dblock.Tx, want ...error) {
		t.Helper()
		_, claim := jobs.Claim(ctx, tx, rowlock.ClaimOptions{})
		for call, err := range map[string]error{"lock": jobs.Lock(ctx, tx, rowlock.PK(1)), "try": jobs.TryLock(ctx, tx, rowlock.PK(0), rowlock.PK(1)), "claim": claim} {
			if !slicesContains(want, err) {
				t.Errorf("%s, %s: %v, want %v", call, name, err, want)
			}
		}
	}
	if readOnly, err := d.DB.Begin(ctx, &sql.TxOptions{ReadOnly: true}); err == nil {
		both("read-only transaction", readOnly, dblock.ErrUnsupported)
		rollback(t, readOnly)
	} else if d.DB.Name() != "sqlserver" { // its driver has none, and says so
		t.Error(err)
	}
	conn, err := d.DB.SQL().Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	both("autocommit", conn, dblock.ErrUnsupported)
	both("a pool", d.DB.SQL(), dblock.ErrUnsupported)

	aborted := d.Begin(t, nil)
	defer rollback(t, aborted)
	if d.DB.Name() == "postgres" { // elsewhere a failed statement leaves no trace
		if err := execute(ctx, aborted, `SELECT * FROM nowhere`); err == nil {
			t.Fatal("it should fail")
		}
		both("aborted transaction", aborted, dblock.ErrUnsupported)
	}
	ended := d.Begin(t, nil)
	rollback(t, ended)
	both("ended transaction", ended, dblock.ErrClosed)

	free := d.Begin(t, nil)
	defer rollback(t, free)
	if err := jobs.TryLock(ctx, free, rowlock.PK(0), rowlock.PK(1)); err != nil {
		t.Errorf("something was locked: %v", err)
	}
}

func slicesContains(want []error, err error) bool {
	for _, w := range want {
		if errors.Is(err, w) {
			return true
		}
	}
	return false
}
