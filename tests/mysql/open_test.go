package mysql_test

import (
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestOpenTellsTheServersApart(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		rest := e.dsn[strings.Index(e.dsn, "://"):]
		for _, scheme := range []string{"mysql", "mariadb"} {
			db, err := mysql.Open(e.ctx, scheme+rest)
			if err != nil {
				t.Fatal(err)
			}
			if db.Name() != string(e.server.Kind) {
				t.Errorf("%s:// is %s", scheme, db.Name())
			}
			if scope := value[string](t, e.ctx, e.admin, "SELECT DATABASE()"); db.Features().Scope != scope {
				t.Errorf("the scope is %q, the database %q", db.Features().Scope, scope)
			}
			if err := db.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestOpenNamesWhatIsWrong(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		change := func(do func(u *url.URL)) string {
			u, err := url.Parse(e.dsn)
			if err != nil {
				t.Fatal(err)
			}
			do(u)
			return u.String()
		}
		for dsn, class := range map[string]dialect.Class{
			change(func(u *url.URL) { u.User = url.UserPassword(u.User.Username(), "hunter2") }): dialect.Unavailable,
			change(func(u *url.URL) { u.Path = "/hunter2" }):                                     dialect.Unavailable,
			change(func(u *url.URL) { u.Host = "127.0.0.1:1" }):                                  dialect.Unavailable,
			with(t, e.dsn, "sslmode", "1"):                                                       dialect.InvalidOption,
		} {
			db, err := mysql.Open(e.ctx, dsn)
			if db != nil {
				t.Fatalf("%s was opened", dsn)
			}
			if wantClass(t, err, class).Hint == "" || strings.Contains(err.Error(), "password: hunter2") {
				t.Errorf("%v", err)
			}
		}
		_, err := mysql.New(e.ctx, e.server.Open(t, change(func(u *url.URL) { u.Path = "/" })))
		wantClass(t, err, dialect.Setup)
	})
}

func TestPoolOfAnotherDatabaseIsNamed(t *testing.T) {
	server := servers.Postgres(t)
	_, err := mysql.New(t.Context(), server.Open(t, server.Database(t)))
	if refused := wantClass(t, err, dialect.Unsupported); !strings.Contains(refused.Hint, "no MySQL") {
		t.Errorf("%v", err)
	}
}

func TestReadOnlyServerIsRefused(t *testing.T) {
	eachPrivate(t, func(t *testing.T, e *env) {
		e.exec(t, e.admin, "SET GLOBAL read_only = 1")
		_, err := mysql.Open(e.ctx, e.dsn)
		if refused := wantClass(t, err, dialect.Unsafe); !strings.Contains(refused.Error(), "read_only") {
			t.Errorf("%v", err)
		}
		db, err := mysql.Open(e.ctx, e.dsn, &mysql.Options{AllowUnsafe: true})
		if err != nil {
			t.Fatalf("allowed: %v", err)
		}
		defer db.Close()
		if db.Name() != string(e.server.Kind) {
			t.Errorf("opened as %s", db.Name())
		}
	})
}

// A group of one member shows what each member of a larger one does.
func TestReplicationGroupIsRefusedUnlessThisIsItsOnlyPrimary(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	e := newEnv(t, servers.Start(t, servers.KindMySQL, "log-bin=binlog", "server-id=1", "gtid-mode=ON", "enforce-gtid-consistency=ON",
		"plugin-load-add=group_replication.so", "loose-group-replication-start-on-boot=OFF"))
	if value[int](t, e.ctx, e.admin, "SELECT COUNT(*) FROM information_schema.plugins WHERE plugin_name = 'group_replication'") == 0 {
		servers.SkipWithout(t, "mysql", "the server's plugin group_replication is missing: install mysql-server-core, which has it")
	}
	user := e.server.User(t, e.dsn) // who may not look at the group
	opens := func(want string) {
		t.Helper()
		for _, dsn := range []string{e.dsn, user} {
			db, err := mysql.Open(e.ctx, dsn)
			switch {
			case want == "" && err == nil:
				err = db.Close()
			case want != "":
				if refused := wantClass(t, err, dialect.Unsafe); strings.Contains(refused.Error(), want) || dsn == user {
					err = nil
				}
			}
			if err != nil {
				t.Errorf("%v, want %q", err, want)
			}
		}
	}
	opens("") // the plugin alone makes no group
	for _, setting := range []string{
		"group_replication_group_name = '6b9d2d5e-5b0f-4f0a-9a52-5c3b9d3f1a77'",
		"group_replication_local_address = '" + address + "'",
		"group_replication_single_primary_mode = ON",
		"group_replication_bootstrap_group = ON",
	} {
		e.exec(t, e.admin, "SET GLOBAL "+setting)
	}
	_, err = mysql.Open(e.ctx, e.dsn)
	if refused := wantClass(t, err, dialect.Unsafe); !strings.Contains(refused.Error(), "OFFLINE") {
		t.Errorf("before it joined: %v", err)
	}
	e.exec(t, e.admin, "START GROUP_REPLICATION")
	e.await(t, "the member is the primary", "SELECT COUNT(*) FROM performance_schema.replication_group_members WHERE member_state = 'ONLINE' AND member_role = 'PRIMARY' AND @@GLOBAL.super_read_only = 0")
	opens("")
	value[string](t, e.ctx, e.admin, "SELECT group_replication_switch_to_multi_primary_mode()")
	opens("single-primary mode")
	e.exec(t, e.admin, "STOP GROUP_REPLICATION")
	opens("OFFLINE")
}

func TestTooManyConnectionsIsCapacity(t *testing.T) {
	eachPrivate(t, func(t *testing.T, e *env) {
		user := e.server.User(t, e.dsn) // an administrator has a connection in reserve
		pool := e.server.Open(t, user)
		for {
			conn, err := pool.Conn(e.ctx)
			if err != nil {
				break
			}
			defer conn.Close()
		}
		_, err := mysql.Open(e.ctx, user)
		wantClass(t, err, dialect.Capacity)
	}, "max-connections=10")
}

func TestCheckTable(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		db := e.open(t)
		for i, c := range []struct {
			create string
			exists bool
			names  string // empty: it is right
		}{
			{"", false, "there is no table"},
			{"CREATE TABLE %s (id BIGINT PRIMARY KEY, name VARBINARY(64) NOT NULL, fence BIGINT NOT NULL) ENGINE = InnoDB", true, ""},
			{"CREATE TABLE %s (id BIGINT PRIMARY KEY, name VARBINARY(64) NOT NULL, fence BIGINT NOT NULL, more INT) ENGINE = InnoDB", true, ""},
			{"CREATE TABLE %s (id BIGINT PRIMARY KEY, name VARBINARY(64) NOT NULL, fence BIGINT NOT NULL) ENGINE = MyISAM", true, "MyISAM"},
			{"CREATE TABLE %s (id INT PRIMARY KEY, name VARBINARY(64) NOT NULL, fence BIGINT NOT NULL) ENGINE = InnoDB", true, "primary key"},
			{"CREATE TABLE %s (id BIGINT, name VARBINARY(64) NOT NULL, fence BIGINT NOT NULL) ENGINE = InnoDB", true, "primary key"},
			{"CREATE TABLE %s (id BIGINT, name VARBINARY(64) NOT NULL, fence BIGINT NOT NULL, PRIMARY KEY (id, fence)) ENGINE = InnoDB", true, "primary key"},
			{"CREATE TABLE %s (id BIGINT PRIMARY KEY, name VARCHAR(64) NOT NULL, fence BIGINT NOT NULL) ENGINE = InnoDB", true, "name"},
			{"CREATE TABLE %s (id BIGINT PRIMARY KEY, name VARBINARY(64) NOT NULL) ENGINE = InnoDB", true, "fence"},
			{"CREATE VIEW %s AS SELECT * FROM locks", true, "engine"},
		} {
			table := dialect.Table{Schema: db.Features().Scope, Name: fmt.Sprintf("shape`%d", i)}
			if c.create != "" {
				e.exec(t, e.admin, fmt.Sprintf(c.create, fmt.Sprintf("`shape``%d`", i)))
			}
			exists, err := db.CheckTable(e.ctx, table)
			if exists != c.exists {
				t.Errorf("%s: exists %v, %v", c.create, exists, err)
			}
			if c.names == "" {
				if err != nil {
					t.Errorf("%s: %v", c.create, err)
				}
			} else if refused := wantClass(t, err, dialect.Setup); !strings.Contains(refused.Hint, c.names) {
				t.Errorf("%s: %v", c.create, err)
			}
		}
		// Both directions of the migrations can be repeated.
		step := db.Migrations(dialect.Table{Name: "again"})[0]
		for _, statements := range [][]string{step.Up, step.Up, step.Down, step.Down, step.Up} {
			for _, statement := range statements {
				e.exec(t, e.admin, statement)
			}
		}
		if exists, err := db.CheckTable(e.ctx, dialect.Table{Name: "again"}); !exists || err != nil {
			t.Errorf("the table of the migrations: exists %v, %v", exists, err)
		}
	})
}
