package torture

import (
	"database/sql"
	"fmt"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// createWitness makes a row for each key and way to guard it. The log has no
// unique constraint: it takes what must not be.
func createWitness(t testing.TB, db *sql.DB, keys []dblock.Key) {
	t.Helper()
	statements := []string{
		"CREATE TABLE witness (name VARCHAR(20) NOT NULL, way VARCHAR(20) NOT NULL, n BIGINT NOT NULL, fence BIGINT NOT NULL, PRIMARY KEY (name, way))",
		"CREATE TABLE witness_log (name VARCHAR(20) NOT NULL, way VARCHAR(20) NOT NULL, n BIGINT NOT NULL, token BIGINT NOT NULL, op VARCHAR(40) NOT NULL)",
	}
	for _, key := range keys {
		for _, way := range []history.Way{history.OnSession, history.Fenced} {
			statements = append(statements, fmt.Sprintf("INSERT INTO witness VALUES ('%s', '%s', 0, 0)", key, way))
		}
	}
	for _, statement := range statements {
		if _, err := db.ExecContext(t.Context(), statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
}

func readWitness(t testing.TB, db *sql.DB) witness {
	t.Helper()
	w := witness{rows: map[string]int64{}}
	each(t, db, "SELECT name, way, n FROM witness", func(rows *sql.Rows) error {
		var name string
		var way history.Way
		var n int64
		err := rows.Scan(&name, &way, &n)
		w.rows[witnessRow(name, way)] = n
		return err
	})
	each(t, db, "SELECT name, way, n, token, op FROM witness_log", func(rows *sql.Rows) error {
		var l logged
		err := rows.Scan(&l.Key, &l.Way, &l.N, &l.Token, &l.Op)
		w.log = append(w.log, l)
		return err
	})
	return w
}

func each(t testing.TB, db *sql.DB, query string, scan func(*sql.Rows) error) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			t.Fatal(err)
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
}
