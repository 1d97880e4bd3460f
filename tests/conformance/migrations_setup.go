package conformance

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/migrations"
)

const setupTable = "dblock_locks_version"

func (d *Database) mustHaveLockTable(t testing.TB, table dialect.Table) {
	t.Helper()
	if _, err := d.DB.CheckTable(testContext(t), table); err != nil {
		t.Error(err)
	}
}

func migrationsSetup(t *testing.T, h *Harness) {
	d := h.Database(t)
	var all sync.WaitGroup
	for i := range 20 {
		db := d.Open(t)
		all.Go(func() {
			for range 2 {
				if err := migrations.Setup(testContext(t), db); err != nil {
					t.Errorf("replica %d: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	d.mustHaveLockTable(t, dialect.Table{})
	d.mustHaveLockTable(t, dialect.Table{Name: dialect.OnceTable})
	var versions []int64
	for _, m := range d.DB.Migrations(dialect.Table{}) {
		versions = append(versions, m.Version)
	}
	d.recorded(t, setupTable, append([]int64{0}, versions...)...)
	if d.hasTable(t, versionTable) {
		t.Error("setup touched the application's version table")
	}
	d.nothingLeft(t)
}

func migrationsSetupForeign(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.exec(t, "CREATE TABLE locks (door INT PRIMARY KEY)")
	err := migrations.Setup(testContext(t), d.DB)
	if !errors.Is(err, dblock.ErrSetup) || !strings.Contains(err.Error(), "locks") {
		t.Errorf("got %v", err)
	}
	if d.hasTable(t, setupTable) {
		t.Error("something was changed before the refusal")
	}
	d.exec(t, "INSERT INTO locks VALUES (1)")
	d.nothingLeft(t)
}

func migrationsSetupGone(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, "DROP TABLE locks")
	err := migrations.Setup(testContext(t), d.DB)
	if !errors.Is(err, dblock.ErrSetup) || !strings.Contains(err.Error(), setupTable) {
		t.Errorf("got %v", err)
	}
	d.exec(t, "DROP TABLE "+setupTable)
	d.Setup(t)
	d.mustHaveLockTable(t, dialect.Table{})
}

// A database that an older version has set up has the lock table only.
func migrationsSetupUpdates(t *testing.T, h *Harness) {
	d := h.Database(t)
	if err := migrations.Setup(testContext(t), d.DB, &migrations.SetupOptions{Table: "locks"}); err != nil {
		t.Fatal(err)
	}
	if d.hasTable(t, dialect.OnceTable) {
		t.Error("more than the table that was named")
	}
	d.exec(t, "INSERT INTO locks (id, name, fence) VALUES (1, 'kept', 7)")
	for range 2 {
		d.Setup(t)
	}
	d.mustHaveLockTable(t, dialect.Table{Name: dialect.OnceTable})
	d.recorded(t, "dblock_once_version", 0, 1)
	if n := d.number(t, "SELECT fence FROM locks WHERE id = 1"); n != 7 {
		t.Errorf("the lock table is not what it was: fence %d", n)
	}
	d.exec(t, "DROP TABLE once")
	if err := migrations.Setup(testContext(t), d.DB); !errors.Is(err, dblock.ErrSetup) {
		t.Errorf("without the marks: %v", err)
	}
}

// Nothing is changed where one of the tables is somebody else's.
func migrationsSetupForeignOnce(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.exec(t, "CREATE TABLE once (door INT PRIMARY KEY)")
	if err := migrations.Setup(testContext(t), d.DB); !errors.Is(err, dblock.ErrSetup) || !strings.Contains(err.Error(), "once") {
		t.Errorf("got %v", err)
	}
	if d.hasTable(t, "locks") || d.hasTable(t, setupTable) {
		t.Error("something was changed before the refusal")
	}
}

// Where DDL commits implicitly, a crash can leave the table without the record of
// it.
func migrationsSetupCrash(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, "DELETE FROM "+setupTable+" WHERE version_id > 0")
	d.Setup(t)
	d.mustHaveLockTable(t, dialect.Table{})
}

func migrationsSetupTables(t *testing.T, h *Harness) {
	d := h.Database(t)
	const schema = "App_Locks"
	d.exec(t, "CREATE SCHEMA "+d.quote(schema))
	if name := d.DB.Name(); name == "mysql" || name == "mariadb" { // where a schema is another database
		t.Cleanup(func() {
			if _, err := d.SQL.Exec("DROP SCHEMA " + schema); err != nil {
				t.Error(err)
			}
		})
	}
	for _, o := range []*migrations.SetupOptions{nil, {Table: "Order"}, {Schema: schema, Table: "Order"}} {
		if err := migrations.Setup(testContext(t), d.DB, o); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
	}
	for _, table := range []dialect.Table{{}, {Name: "Order"}, {Schema: schema, Name: "Order"}} {
		d.mustHaveLockTable(t, table)
	}
	for _, record := range []string{setupTable, d.quote("dblock_Order_version"), d.quote(schema) + "." + d.quote("dblock_Order_version")} {
		if !d.hasTable(t, record) {
			t.Errorf("%s is missing", record)
		}
	}
}

func (d *Database) quote(identifier string) string {
	if name := d.DB.Name(); name == "mysql" || name == "mariadb" {
		return "`" + identifier + "`"
	}
	return `"` + identifier + `"`
}
