package sqlserver

import (
	"database/sql/driver"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

var stock = dialect.UserTable{Schema: "app", Name: "sto]ck", Key: []string{"Shop", "article"}}

// catalogue is what the server says of the table stock.
func catalogue() []answer {
	row := func(name, kind string, length int64, collation string, nullable bool) []driver.Value {
		return []driver.Value{name, kind, length, int64(0), int64(0), collation, nullable}
	}
	return []answer{
		{columns: make([]string, 7), rows: [][]driver.Value{
			row("shop", "int", 4, "", false), row("article", "nvarchar", 80, "Latin1_General_CI_AS", false), row("n", "int", 4, "", true)}},
		{columns: make([]string, 2), rows: [][]driver.Value{
			{int64(1), "n"}, {int64(2), "article"}, {int64(2), "shop"}}},
	}
}

func stockRows() dialect.UserRows {
	return dialect.UserRows{Table: stock, Keys: [][]driver.Value{{int64(2), "b"}, {int64(1), "a"}}}
}

func lockedRows(missing string) answer { return answer{outs: map[string]any{"missing": missing}} }

func TestLockUserRows(t *testing.T) {
	stub, d := openDB(t, append(catalogue(), lockedRows(""), lockedRows(""), lockedRows(""))...)
	tx := begin(t, d)
	r := stockRows()
	if err := d.LockUserRows(t.Context(), tx, r); err != nil {
		t.Fatal(err)
	}
	r.Strength, r.Try = dialect.Share, true
	if err := d.LockUserRows(t.Context(), tx, r); err != nil {
		t.Fatal(err)
	}
	r.Try, r.Strength, r.Wait = false, dialect.NoKeyUpdate, 300*time.Millisecond
	if err := d.LockUserRows(t.Context(), tx, r); err != nil {
		t.Fatal(err)
	}
	sent := stub.sent("DECLARE @keys TABLE")
	if len(sent) != 3 {
		t.Fatalf("%d calls, want 3, after one look at the table", len(sent))
	}
	for _, text := range []string{
		"DECLARE @keys TABLE (place int, k0 int, k1 nvarchar(40) COLLATE Latin1_General_CI_AS)",
		"VALUES (0, @k0_0, @k0_1), (1, @k1_0, @k1_1)",
		"OVER (ORDER BY k0, k1, place)",
		"FROM [app].[sto]]ck] WITH (UPDLOCK, HOLDLOCK, ROWLOCK) WHERE [shop] = @v0 AND [article] = @v1;",
	} {
		if !strings.Contains(sent[0].query, text) {
			t.Errorf("%q is not in %s", text, sent[0].query)
		}
	}
	if sent[0].args["k0_1"] != "b" || sent[0].args["k1_0"] != int64(1) {
		t.Errorf("sent %v", sent[0].args)
	}
	if !strings.Contains(sent[1].query, "WITH (HOLDLOCK, ROWLOCK, NOWAIT)") {
		t.Errorf("a shared try by %s", sent[1].query)
	}
	for _, text := range []string{"SET @left = 300 - ", "N'SET LOCK_TIMEOUT '", "N'@found int OUTPUT, @v0 int, @v1 nvarchar(40)', @found OUTPUT, @v0, @v1"} {
		if !strings.Contains(sent[2].query, text) {
			t.Errorf("%q is not in %s", text, sent[2].query)
		}
	}
}

func TestLockUserRowsNamesWhatIsMissing(t *testing.T) {
	_, d := openDB(t, append(catalogue(), lockedRows("1,0,"))...)
	err := d.LockUserRows(t.Context(), begin(t, d), stockRows())
	wantError(t, err, dialect.NotFound, "")
	if !strings.Contains(err.Error(), `Shop = 2, article = "b"; Shop = 1, article = "a"`) {
		t.Errorf("%v", err)
	}
}

func TestLockUserRowsErrors(t *testing.T) {
	for _, c := range []struct {
		number int32
		try    bool
		asked  []answer // what is left of the transaction
		class  dialect.Class
		code   string
	}{
		{1222, true, []answer{{outs: map[string]any{"state": 1}}}, dialect.NotAcquired, "1222"},
		{1222, false, []answer{{outs: map[string]any{"state": 1}}}, dialect.Timeout, "1222"},
		{245, false, []answer{{outs: map[string]any{"state": 1}}}, dialect.InvalidKey, ""},
		{1205, false, nil, dialect.Deadlock, "1205"},
	} {
		_, d := openDB(t, append(append(catalogue(), answer{err: serverError(c.number)}), c.asked...)...)
		r := stockRows()
		r.Try = c.try
		wantError(t, d.LockUserRows(t.Context(), begin(t, d), r), c.class, c.code)
	}
}

func TestUserTableIsLookedAtFirst(t *testing.T) {
	for text, change := range map[string]func(dialect.UserTable, []answer) (dialect.UserTable, []answer){
		"no table app.sto]ck": func(t dialect.UserTable, a []answer) (dialect.UserTable, []answer) {
			return t, []answer{{columns: make([]string, 7)}}
		},
		"no column price": func(t dialect.UserTable, a []answer) (dialect.UserTable, []answer) {
			t.Key = []string{"shop", "price"}
			return t, a[:1]
		},
		"no primary key, nor a unique one without NULL, of the columns (shop)": func(t dialect.UserTable, a []answer) (dialect.UserTable, []answer) {
			t.Key = []string{"shop"}
			return t, a
		},
		"of the columns (n)": func(t dialect.UserTable, a []answer) (dialect.UserTable, []answer) {
			t.Key = []string{"n"}
			return t, a[:1]
		},
	} {
		table, script := change(stock, catalogue())
		_, d := openDB(t, script...)
		err := d.LockUserRows(t.Context(), begin(t, d), dialect.UserRows{Table: table, Keys: [][]driver.Value{{int64(1)}}})
		wantError(t, err, dialect.InvalidOption, "", dialect.RemainsUsable)
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%v does not say %q", err, text)
		}
	}
}

func TestClaimUserRows(t *testing.T) {
	stub, d := openDB(t, append(catalogue(), answer{columns: make([]string, 2), rows: [][]driver.Value{{int64(1), "a"}, {int64(2), "b"}}})...)
	tx := begin(t, d)
	keys, err := d.ClaimUserRows(t.Context(), tx, dialect.UserClaim{Table: stock, Limit: 3, Where: "n > @p1 -- free", Args: []any{5},
		OrderBy: []dialect.Order{{Column: "n", Descending: true}, {Column: "shop"}}})
	if want := [][]any{{int64(1), "a"}, {int64(2), "b"}}; err != nil || !reflect.DeepEqual(keys, want) {
		t.Errorf("%v, %v; want %v", keys, err, want)
	}
	query := stub.sent("DECLARE candidates CURSOR")[0].query
	for _, text := range []string{
		"DECLARE @left int = 3,",
		"SELECT [shop], [article] FROM [app].[sto]]ck] WITH (NOLOCK) WHERE (n > @p1 -- free\n) ORDER BY [n] DESC, [shop];",
		"WITH (UPDLOCK, ROWLOCK, READPAST)\n\tWHERE [shop] = @v0 AND [article] = @v1 AND (n > @p1 -- free\n) AND NOT EXISTS",
		"SELECT CONVERT(bigint, k0), CONVERT(nvarchar(max), k1) FROM @claimed ORDER BY turn;",
	} {
		if !strings.Contains(query, text) {
			t.Errorf("%q is not in %s", text, query)
		}
	}
}

func TestClaimsTellTheCallersMistakes(t *testing.T) {
	for _, number := range []int32{207, 102, 137} {
		_, d := openDB(t, append(catalogue(), answer{err: serverError(number)}, answer{outs: map[string]any{"state": 1}})...)
		_, err := d.ClaimUserRows(t.Context(), begin(t, d), dialect.UserClaim{Table: stock, Limit: 1, Where: "m = 1"})
		wantError(t, err, dialect.InvalidOption, strconv.Itoa(int(number)), dialect.RemainsUsable)
		if !strings.Contains(err.Error(), "ClaimOptions.Where") {
			t.Errorf("%v", err)
		}
	}
	_, d := openDB(t, append(catalogue(), answer{err: serverError(229)})...)
	_, err := d.ClaimUserRows(t.Context(), begin(t, d), dialect.UserClaim{Table: stock, Limit: 1, Where: "m = 1"})
	wantError(t, err, dialect.Denied, "229") // which is not the condition's fault
}

func TestUserRowsOutsideOfATransaction(t *testing.T) {
	_, d := openDB(t, append(catalogue(), lockedRows(""), answer{columns: make([]string, 2)})...)
	wantError(t, d.LockUserRows(t.Context(), d.db, stockRows()), dialect.Unsupported, "")
	_, err := d.ClaimUserRows(t.Context(), d.db, dialect.UserClaim{Table: stock, Limit: 1})
	wantError(t, err, dialect.Unsupported, "")
}
