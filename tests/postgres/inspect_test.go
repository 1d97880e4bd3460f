package postgres_test

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestInspectShowsHoldersBeforeWaiters(t *testing.T) {
	everyWay(t, func(t *testing.T, db *postgres.DB) {
		before := value[time.Time](t, db.SQL(), "SELECT clock_timestamp()")
		holder, err := db.OpenSession(t.Context(), dialect.SessionOptions{Application: "holder"})
		must(t, err)
		defer holder.Close()
		waiter := session(t, db)
		lock(t, holder, append(keys(-1<<63), shared(-1, 0, 1<<63-1)...))
		result := make(chan error, 1)
		go func() {
			_, err := waiter.Acquire(t.Context(), dialect.Request{Keys: keys(-1)})
			result <- err
		}()
		eventuallyWaiting(t, db, -1)

		// Keys of two int4 are another key space, and other databases too.
		tx := begin(t, db, nil)
		exec(t, tx, "SELECT pg_advisory_xact_lock(0, 0)")
		all, err := db.Inspect(t.Context())
		must(t, err)
		if len(all) != 5 {
			t.Errorf("%d holdings, want 5: %+v", len(all), all)
		}
		some, err := db.Inspect(t.Context(), keys(-1, -1<<63)...)
		must(t, err)
		if len(some) != 3 {
			t.Fatalf("%d holdings of two keys, want 3: %+v", len(some), some)
		}
		after := value[time.Time](t, db.SQL(), "SELECT clock_timestamp()")
		for i, want := range []dialect.Holding{
			{ID: -1 << 63, Session: holder.ID(), Application: "holder", State: "idle"},
			{ID: -1, Mode: dialect.Shared, Session: holder.ID(), Application: "holder", State: "idle"},
			{ID: -1, Waiting: true, Session: waiter.ID(), Application: "dblock", State: "active"},
		} {
			got := some[i]
			// A session may be older than this test, a wait may not.
			if got.Since.IsZero() || got.Since.After(after) || got.Waiting && got.Since.Before(before) {
				t.Errorf("%+v is not since between %v and %v", got, before, after)
			}
			want.Since, want.User = got.Since, got.User
			if got != want || got.User == "" {
				t.Errorf("holding %+v, want %+v", got, want)
			}
		}
		must(t, holder.Release(t.Context(), shared(-1)))
		must(t, <-result)
	})
}

func TestProbeIsNoHolder(t *testing.T) {
	config, err := pgxpool.ParseConfig(servers.Postgres(t).Database(t))
	must(t, err)
	var names []string
	config.ConnConfig.AfterConnect = func(ctx context.Context, c *pgconn.PgConn) error {
		results, err := c.Exec(ctx, "SHOW application_name").ReadAll()
		if err == nil {
			names = append(names, string(results[0].Rows[0][0]))
		}
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	db := opened(t)(postgres.New(t.Context(), pool))
	const probe = "dblock probe"
	if want := []string{"", probe, probe}; !reflect.DeepEqual(names, want) {
		t.Errorf("connections named %q, want %q", names, want)
	}

	for _, application := range []string{probe, "", "other"} {
		s, err := db.OpenSession(t.Context(), dialect.SessionOptions{Application: application})
		must(t, err)
		defer s.Close()
		lock(t, s, shared(1))
	}
	for want, asked := range map[int][]dialect.Key{2: nil, 3: keys(1)} {
		holdings, err := db.Inspect(t.Context(), asked...)
		must(t, err)
		if len(holdings) != want {
			t.Errorf("%d holdings of keys %v, want %d: %+v", len(holdings), asked, want, holdings)
		}
	}
}

func TestCheckTableNamesWhatDiffers(t *testing.T) {
	dsn := servers.Postgres(t).Database(t)
	db := opened(t)(overPgx(t, dsn))
	for _, statement := range []string{
		"CREATE TABLE further (id bigint PRIMARY KEY, name text NOT NULL, fence bigint NOT NULL DEFAULT 0, note text, at timestamptz NOT NULL DEFAULT now())",
		"CREATE TABLE types (id int PRIMARY KEY, name varchar(10) NOT NULL, fence bigint NOT NULL DEFAULT 0)",
		"CREATE TABLE columns (id bigint PRIMARY KEY, owner text)",
		"CREATE TABLE no_key (id bigint NOT NULL, name text NOT NULL, fence bigint NOT NULL)",
		"CREATE TABLE other_key (id bigint, name text, fence bigint, PRIMARY KEY (id, name))",
		"CREATE TABLE mandatory (id bigint PRIMARY KEY, name text NOT NULL, fence bigint NOT NULL, tenant text NOT NULL)",
		"CREATE VIEW a_view AS SELECT * FROM further",
		"CREATE SCHEMA elsewhere",
		"CREATE TABLE elsewhere.locks (id bigint PRIMARY KEY, name text NOT NULL, fence bigint NOT NULL)",
	} {
		exec(t, db.SQL(), statement)
	}
	for _, test := range []struct {
		table  dialect.Table
		exists bool
		text   string
	}{
		{dialect.Table{Name: "further"}, true, ""},
		{dialect.Table{Schema: "elsewhere"}, true, ""},
		{dialect.Table{}, false, `"locks" does not exist`},
		{dialect.Table{Schema: "nowhere"}, false, `"nowhere"."locks" does not exist`},
		{dialect.Table{Name: "types"}, true, "character varying(10)"},
		{dialect.Table{Name: "columns"}, true, `it has "id bigint"`},
		{dialect.Table{Name: "no_key"}, true, `primary key is "none"`},
		{dialect.Table{Name: "other_key"}, true, `primary key is "PRIMARY KEY (id, name)"`},
		{dialect.Table{Name: "mandatory"}, true, "NOT NULL without a default"},
		{dialect.Table{Name: "a_view"}, true, "not a table"},
	} {
		exists, err := db.CheckTable(t.Context(), test.table)
		if exists != test.exists {
			t.Errorf("%+v: exists is %t", test.table, exists)
		}
		if test.text == "" {
			must(t, err)
			continue
		}
		wantClass(t, err, dialect.Setup)
		wantText(t, err, test.text)
	}

	user := opened(t)(overPgx(t, servers.Postgres(t).User(t, dsn)))
	table(t, db, dialect.Table{})
	_, err := user.LockRows(t.Context(), begin(t, user, nil), dialect.RowRequest{Keys: keys(1)})
	wantClass(t, err, dialect.Denied)
	wantText(t, err, "SELECT, INSERT, UPDATE")
	wantText(t, err, "migrations need CREATE on the schema")
}
