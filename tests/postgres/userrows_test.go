package postgres_test

import (
	"context"
	"database/sql/driver"
	"net/url"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

// A policy may show a row to a user whom it does not let lock it.
func TestRowThatAPolicyKeepsFromBeingLocked(t *testing.T) {
	server := servers.Postgres(t)
	dsn := server.Database(t)
	user := server.User(t, dsn)
	u, err := url.Parse(user)
	must(t, err)
	admin := server.Open(t, dsn)
	for _, statement := range []string{
		"CREATE TABLE doc (id int PRIMARY KEY, owner text)", "INSERT INTO doc VALUES (1, 'me'), (2, 'other')",
		"GRANT SELECT, UPDATE ON doc TO " + u.User.Username(), "ALTER TABLE doc ENABLE ROW LEVEL SECURITY",
		"CREATE POLICY see ON doc FOR SELECT USING (true)", "CREATE POLICY change ON doc FOR UPDATE USING (owner = 'me')",
	} {
		exec(t, admin, statement)
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			db := opened(t)(way.open(t, user))
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			tx := begin(t, db, nil)
			for _, r := range []dialect.UserRows{{}, {Try: true}, {Wait: time.Second}} {
				r.Table, r.Keys = dialect.UserTable{Name: "doc", Key: []string{"id"}}, [][]driver.Value{{int64(1)}, {int64(2)}}
				err := db.LockUserRows(ctx, tx, r)
				wantClass(t, err, dialect.Denied)
				if remains(err) != dialect.RemainsUsable {
					t.Errorf("%v says that %d remains", err, remains(err))
				}
			}
		})
	}
}

// Parameters are written into the text of some statements, and names are not.
func TestNamesThatLookLikeParameters(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		exec(t, db.SQL(), `CREATE TABLE "t$1" ("k$2" text PRIMARY KEY)`)
		t.Cleanup(func() { _, _ = db.SQL().Exec(`DROP TABLE "t$1"`) })
		exec(t, db.SQL(), `INSERT INTO "t$1" VALUES ('a"'), ('$1')`)
		tx := begin(t, db, nil)
		must(t, db.LockUserRows(t.Context(), tx, dialect.UserRows{Table: dialect.UserTable{Name: "t$1", Key: []string{"k$2"}},
			Keys: [][]driver.Value{{`a"`}, {"$1"}}, Wait: time.Minute}))
		locks := dialect.Table{Name: "locks$1"}
		table(t, db, locks)
		tx = begin(t, db, nil)
		_, err := db.LockRows(t.Context(), tx, dialect.RowRequest{Table: locks, Keys: keys(1, 2), Wait: time.Minute})
		must(t, err)
	})
}
