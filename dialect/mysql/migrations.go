package mysql

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

var (
	//go:embed migrations/00001_locks.up.sql
	locksUp string
	//go:embed migrations/00001_locks.down.sql
	locksDown string
)

const defaultTable = "locks"

// Migrations are those of the folder of that name. A schema is a database here.
func (db *DB) Migrations(t dialect.Table) []dialect.Migration {
	return []dialect.Migration{
		{Version: 1, Up: []string{db.statement(t, locksUp)}, Down: []string{db.statement(t, locksDown)}},
	}
}

func (db *DB) statement(t dialect.Table, text string) string {
	return strings.ReplaceAll(text, "{{table}}", db.quoted(t))
}

// CheckTable looks for an InnoDB table with the primary key id, the column that
// tells rows apart, and the columns name and fence. Further columns do no harm if
// they have defaults.
func (db *DB) CheckTable(ctx context.Context, t dialect.Table) (exists bool, err error) {
	schema, name := db.resolve(t)
	rows, err := db.pool.QueryContext(ctx, "SELECT t.engine, c.column_name, c.data_type, c.column_key"+
		" FROM information_schema.tables t JOIN information_schema.columns c ON c.table_schema = t.table_schema AND c.table_name = t.table_name"+
		" WHERE t.table_schema = ? AND t.table_name = ?", schema, name)
	if err != nil {
		return false, db.failure(ctx, err)
	}
	defer rows.Close()
	var engine string
	columns := map[string]string{}
	primaryKeys := 0
	for rows.Next() {
		var column, columnType, key string
		var tableEngine *string // of a view: none
		if err := rows.Scan(&tableEngine, &column, &columnType, &key); err != nil {
			return false, db.failure(ctx, err)
		}
		if tableEngine != nil {
			engine = *tableEngine
		}
		if key == "PRI" {
			primaryKeys++
			columnType += " primary key"
		}
		columns[strings.ToLower(column)] = columnType
	}
	switch err := rows.Err(); {
	case err != nil:
		return false, db.failure(ctx, err)
	case len(columns) == 0:
		return false, &dialect.Error{Class: dialect.Setup, Hint: fmt.Sprintf("there is no table %s: %s", db.quoted(t), db.runSetup(t))}
	case !strings.EqualFold(engine, "InnoDB"):
		return true, db.otherShape(t, fmt.Sprintf("its engine is %q, not InnoDB, so its rows cannot be locked", engine))
	case columns["id"] != "bigint primary key" || primaryKeys != 1:
		return true, db.otherShape(t, "its primary key is not the column id of type BIGINT")
	case columns["name"] != "varbinary":
		return true, db.otherShape(t, "it has no column name of type VARBINARY")
	case columns["fence"] != "bigint":
		return true, db.otherShape(t, "it has no column fence of type BIGINT")
	}
	return true, nil
}

// runSetup is the way to a table that is missing.
func (db *DB) runSetup(t dialect.Table) string {
	command := "dblock setup"
	schema, name := db.resolve(t)
	if schema != db.database {
		command += " --schema=" + schema
	}
	if name != defaultTable {
		command += " --table=" + name
	}
	return "run `" + command + "` or migrations.Setup"
}

func (db *DB) otherShape(t dialect.Table, why string) error {
	return &dialect.Error{Class: dialect.Setup, Hint: fmt.Sprintf("the table %s is not dblock's, %s: choose another name", db.quoted(t), why)}
}

func (db *DB) resolve(t dialect.Table) (schema, name string) {
	return cmp.Or(t.Schema, db.database), cmp.Or(t.Name, defaultTable)
}

// quoted is the table's name in full: a transaction may have selected another
// database.
func (db *DB) quoted(t dialect.Table) string {
	schema, name := db.resolve(t)
	return quote(schema) + "." + quote(name)
}

func quote(identifier string) string {
	return "`" + strings.ReplaceAll(identifier, "`", "``") + "`"
}
