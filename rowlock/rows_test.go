package rowlock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// rowsDB records the calls for rows of an application's table.
type rowsDB struct {
	fakeDB
	rows   []dialect.UserRows
	claims []dialect.UserClaim
	keys   [][]any
	err    error
}

func (db *rowsDB) LockUserRows(_ context.Context, _ dialect.Tx, r dialect.UserRows) error {
	db.rows = append(db.rows, r)
	return db.err
}

func (db *rowsDB) ClaimUserRows(_ context.Context, _ dialect.Tx, c dialect.UserClaim) ([][]any, error) {
	db.claims = append(db.claims, c)
	return db.keys, db.err
}

var stockOptions = rowlock.RowsOptions{Schema: "app", Table: "stock", Key: []string{"shop", "article"}}

type valued string

func (v valued) Value() (driver.Value, error) { return "value of " + string(v), nil }

func TestRowsHandOverPlainValues(t *testing.T) {
	db := &rowsDB{}
	o := stockOptions
	o.Strength = rowlock.ForShare
	rows := rowlock.NewRows(db, o)
	type id int32
	if err := rows.LockWithin(t.Context(), &fakeTx{db: &db.fakeDB}, time.Second, rowlock.PK(id(1), valued("x")), rowlock.PK(uint8(2), []byte("y"))); err != nil {
		t.Fatal(err)
	}
	want := dialect.UserRows{Table: dialect.UserTable{Schema: "app", Name: "stock", Key: []string{"shop", "article"}},
		Keys: [][]driver.Value{{int64(1), "value of x"}, {int64(2), []byte("y")}}, Strength: dialect.Share, Wait: time.Second}
	if !reflect.DeepEqual(db.rows[0], want) {
		t.Errorf("%+v, want %+v", db.rows[0], want)
	}
}

func TestRowsRefuseBeforeTheDatabaseIsAsked(t *testing.T) {
	db := &rowsDB{}
	tx := &fakeTx{db: &db.fakeDB}
	good := rowlock.PK(1, "a")
	many := make([]rowlock.PrimaryKey, dblock.MaxKeys+1)
	for i := range many {
		many[i] = good
	}
	for _, test := range []struct {
		text string
		db   dblock.DB
		o    rowlock.RowsOptions
		tx   dblock.Tx
		keys []rowlock.PrimaryKey
		want error
	}{
		{"db is nil", nil, stockOptions, tx, []rowlock.PrimaryKey{good}, dblock.ErrInvalidOption},
		{"Table is empty", db, rowlock.RowsOptions{Key: []string{"id"}}, tx, []rowlock.PrimaryKey{good}, dblock.ErrInvalidOption},
		{"RowsOptions.Key", db, rowlock.RowsOptions{Table: "stock"}, tx, []rowlock.PrimaryKey{good}, dblock.ErrInvalidOption},
		{"RowsOptions.Key", db, rowlock.RowsOptions{Table: "stock", Key: []string{"shop", ""}}, tx, []rowlock.PrimaryKey{good}, dblock.ErrInvalidOption},
		{"Strength is 3", db, rowlock.RowsOptions{Table: "stock", Key: []string{"id"}, Strength: 3}, tx, []rowlock.PrimaryKey{good}, dblock.ErrInvalidOption},
		{"at least one", db, stockOptions, tx, nil, dblock.ErrInvalidKey},
		{"at most 1000", db, stockOptions, tx, many, dblock.ErrInvalidKey},
		{`key 2 of 2 has 1 values, for the 2 columns ["shop" "article"]`, db, stockOptions, tx, []rowlock.PrimaryKey{good, rowlock.PK(1)}, dblock.ErrInvalidKey},
		{"has NULL for article", db, stockOptions, tx, []rowlock.PrimaryKey{rowlock.PK(1, nil)}, dblock.ErrInvalidKey},
		{"value of article as a number or a string", db, stockOptions, tx, []rowlock.PrimaryKey{rowlock.PK(1, struct{}{})}, dblock.ErrInvalidKey},
		{"transaction is nil", db, stockOptions, nil, []rowlock.PrimaryKey{good}, dblock.ErrUnsupported},
		{"*sql.DB is none", db, stockOptions, new(sql.DB), []rowlock.PrimaryKey{good}, dblock.ErrUnsupported},
	} {
		rows := rowlock.NewRows(test.db, test.o)
		for _, err := range []error{
			rows.Lock(t.Context(), test.tx, test.keys...),
			rows.TryLock(t.Context(), test.tx, test.keys...),
			rows.LockWithin(t.Context(), test.tx, time.Second, test.keys...),
		} {
			if !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.text) {
				t.Errorf("%v, want %v with %q", err, test.want, test.text)
			}
		}
	}
	rows := rowlock.NewRows(db, stockOptions)
	if err := rows.LockWithin(t.Context(), tx, 0, good); !errors.Is(err, dblock.ErrInvalidOption) || !strings.Contains(err.Error(), "TryLock") {
		t.Errorf("no wait: %v", err)
	}
	shared := stockOptions
	shared.Strength = rowlock.ForShare
	for text, err := range map[string]error{
		"Limit is -1":          claimError(rows.Claim(t.Context(), tx, rowlock.ClaimOptions{Limit: -1})),
		"without a Where":      claimError(rows.Claim(t.Context(), tx, rowlock.ClaimOptions{Args: []any{1}})),
		"OrderBy is empty":     claimError(rows.Claim(t.Context(), tx, rowlock.ClaimOptions{OrderBy: []rowlock.Order{{}}})),
		"a claim is exclusive": claimError(rowlock.NewRows(db, shared).Claim(t.Context(), tx, rowlock.ClaimOptions{})),
	} {
		if !errors.Is(err, dblock.ErrInvalidOption) || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %q", err, text)
		}
	}
	if db.rows != nil || db.claims != nil {
		t.Error("the database was asked all the same")
	}
}

func claimError(_ []rowlock.PrimaryKey, err error) error { return err }

func TestRowsErrorNamesTheRowsAndWhatIsLeft(t *testing.T) {
	db := &rowsDB{}
	request := dialect.UserRows{Table: dialect.UserTable{Name: "stock", Key: stockOptions.Key}, Keys: [][]driver.Value{{int64(7), "x"}}}
	db.err = request.Missing(dialect.RemainsUsable, 0)
	rows := rowlock.NewRows(db, stockOptions)
	err := rows.Lock(t.Context(), &fakeTx{db: &db.fakeDB}, rowlock.PK(1, "a b"), rowlock.PK(7, "x"))
	if !errors.Is(err, dblock.ErrNotFound) {
		t.Fatalf("%v, want %v", err, dblock.ErrNotFound)
	}
	for _, text := range []string{`lock app.stock/1/"a b", app.stock/7/x on fake`, `shop = 7, article = "x"`, "the transaction goes on"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not say %q", err, text)
		}
	}
}

func TestClaimObservesAndCountsOne(t *testing.T) {
	db := &rowsDB{keys: [][]any{{int64(1), "a"}}}
	o := stockOptions
	events := 0
	o.Observer = dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		events++
		if e.Kind != dblock.EventAcquired || len(e.Keys) != 1 || e.Keys[0].String() != "app.stock/1/a" {
			t.Errorf("event %+v", e)
		}
	})
	rows := rowlock.NewRows(db, o)
	keys, err := rows.Claim(t.Context(), &fakeTx{db: &db.fakeDB}, rowlock.ClaimOptions{})
	if err != nil || len(keys) != 1 || db.claims[0].Limit != 1 {
		t.Errorf("%v, %v, limit %d", keys, err, db.claims[0].Limit)
	}
	db.keys = nil
	if keys, err := rows.Claim(t.Context(), &fakeTx{db: &db.fakeDB}, rowlock.ClaimOptions{Limit: 5}); err != nil || len(keys) != 0 {
		t.Errorf("%v, %v", keys, err)
	}
	if events != 1 {
		t.Errorf("%d events, want 1", events)
	}
}

func TestPrimaryKeyScan(t *testing.T) {
	key := rowlock.PK(int64(42), "43", []byte("xyz"), "44", int64(45), "text")
	var (
		number  int64
		small   int
		raw     []byte
		null    sql.Null[int32]
		any45   any
		text    string
		another struct{}
	)
	if err := key.Scan(&number, &small, &raw, &null, &any45, &text); err != nil {
		t.Fatal(err)
	}
	if number != 42 || small != 43 || string(raw) != "xyz" || null.V != 44 || any45 != int64(45) || text != "text" {
		t.Errorf("%v %v %q %v %v %q", number, small, raw, null, any45, text)
	}
	for _, err := range []error{key.Scan(&number), rowlock.PK("x").Scan(&number), rowlock.PK("x").Scan(&another)} {
		if !errors.Is(err, dblock.ErrInvalidOption) {
			t.Errorf("%v, want %v", err, dblock.ErrInvalidOption)
		}
	}
}
