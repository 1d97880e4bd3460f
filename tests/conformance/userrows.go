package conformance

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/rowlock"
)

var userRowsClauses = []clause{
	{"own rows: exclude each other", userRowsExclude},
	{"own rows: a key means the same in every type", userRowsTypes},
	{"own rows: shared locks stand side by side", userRowsShared},
	{"own rows: no others are locked", userRowsExact},
	{"own rows: a missing row is named", userRowsMissing},
	{"own rows: a refused try leaves the transaction usable", userRowsTryRefused},
	{"own rows: a limited wait leaves the transaction usable", userRowsWithin},
	{"own rows: a limit that crosses the grant leaves nothing", userRowsCrossing},
	{"own rows: a cancelled wait leaves nothing", userRowsCancelled},
	{"own rows: any order and any spelling do not deadlock", userRowsOrder},
	{"own rows: mistakes are told before anything is locked", userRowsMistakes},
	{"claims: free rows, in order", claimsInOrder},
	{"claims: no more rows are locked than returned", claimsExact},
	{"claims: keys of every type can be locked again", claimsTypes},
	{"claims: every row once, while workers are killed", claimsOnce},
}

// caseless makes a column of text in which 'a' and 'A' are equal.
var caseless = map[string]string{
	"postgres":  `VARCHAR(40) COLLATE caseless`,
	"mysql":     `VARCHAR(40) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci`,
	"mariadb":   `VARCHAR(40) CHARACTER SET latin1 COLLATE latin1_swedish_ci`,
	"sqlserver": `VARCHAR(40) COLLATE Latin1_General_CI_AS`,
}

var placeholder = map[string]string{"postgres": "$1", "mysql": "?", "mariadb": "?", "sqlserver": "@p1"}

// stock is a table whose name, key and columns need quotes, with rows of some shops
// and the articles a to e.
func (d *Database) stock(t testing.TB, o rowlock.RowsOptions, shops int) *rowlock.Rows {
	t.Helper()
	if d.DB.Name() == "postgres" {
		d.exec(t, `CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`)
	}
	table, shop, article := d.escaped(`the "stock`), d.escaped("order"), d.escaped("Article]`")
	d.exec(t, fmt.Sprintf(`CREATE TABLE %s (%s INT NOT NULL, %s %s NOT NULL, n INT NOT NULL, PRIMARY KEY (%s, %s))`,
		table, shop, article, caseless[d.DB.Name()], shop, article))
	for s := range shops {
		for _, a := range strings.Split("abcde", "") {
			d.exec(t, fmt.Sprintf(`INSERT INTO %s VALUES (%d, '%s', 0)`, table, s, a))
		}
	}
	o.Table, o.Key = `the "stock`, []string{"order", "Article]`"}
	return rowlock.NewRows(d.DB, o)
}

// escaped is an identifier whatever characters it has.
func (d *Database) escaped(identifier string) string {
	quote := `"`
	if name := d.DB.Name(); name == "mysql" || name == "mariadb" {
		quote = "`"
	}
	return quote + strings.ReplaceAll(identifier, quote, quote+quote) + quote
}

// jobs is a work table with that many new rows, of which the later ones are due first.
func (d *Database) jobs(t testing.TB, n int) *rowlock.Rows {
	t.Helper()
	d.exec(t, `CREATE TABLE jobs (id INT NOT NULL PRIMARY KEY, state VARCHAR(10) NOT NULL, due INT NOT NULL)`)
	for from := 0; from < n; from += 100 {
		var rows []string
		for id := from; id < min(from+100, n); id++ {
			rows = append(rows, fmt.Sprintf("(%d, 'new', %d)", id, n-id))
		}
		d.exec(t, `INSERT INTO jobs VALUES `+strings.Join(rows, ", "))
	}
	return rowlock.NewRows(d.DB, rowlock.RowsOptions{Table: "jobs", Key: []string{"id"}})
}

// ids are the keys of claimed jobs.
func ids(t testing.TB, keys []rowlock.PrimaryKey) []int {
	t.Helper()
	all := make([]int, len(keys))
	for i, key := range keys {
		if err := key.Scan(&all[i]); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// inTx runs a function in a transaction of the application's own, that commits it.
func (d *Database) inTx(ctx context.Context, db dblock.DB, fn func(tx dblock.Tx) error) error {
	tx, err := db.Begin(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.Background())
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}
