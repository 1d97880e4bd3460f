package sqlserver

import (
	"context"
	"database/sql"
	_ "embed"
	"fmt"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// The statements of the migrations, with {table} for the quoted name.
var (
	//go:embed migrations/0001_create.up.sql
	createUp string
	//go:embed migrations/0001_create.down.sql
	createDown string
)

// Migrations creates the lock table, not its schema.
func (d *DB) Migrations(t dialect.Table) []dialect.Migration {
	statement := func(text string) []string {
		return []string{strings.TrimSpace(strings.ReplaceAll(text, "{table}", tableName(t)))}
	}
	return []dialect.Migration{{Version: 1, Up: statement(createUp), Down: statement(createDown)}}
}

// columnsQuery describes the columns of a table or view. A column that rows are
// not given a value for must be able to do without.
const columnsQuery = `
SELECT RTRIM(o.type), c.name, TYPE_NAME(c.system_type_id), CONVERT(int, c.max_length), CONVERT(int, c.is_nullable),
	CASE WHEN c.default_object_id <> 0 OR c.is_identity = 1 OR c.is_computed = 1 OR c.is_nullable = 1 THEN 1 ELSE 0 END,
	CASE WHEN pk.object_id IS NULL THEN 0 ELSE 1 END
FROM sys.objects AS o
JOIN sys.columns AS c ON c.object_id = o.object_id
LEFT JOIN (
	SELECT i.object_id, MIN(k.column_id) AS column_id
	FROM sys.indexes AS i JOIN sys.index_columns AS k ON k.object_id = i.object_id AND k.index_id = i.index_id
	WHERE i.is_primary_key = 1
	GROUP BY i.object_id HAVING COUNT(*) = 1
) AS pk ON pk.object_id = c.object_id AND pk.column_id = c.column_id
WHERE o.object_id = OBJECT_ID(@table)
ORDER BY c.column_id;`

type column struct {
	kind               string
	length             int
	nullable, optional bool
	primary            bool
}

// CheckTable reads the catalog; a table that the user may not see counts as
// missing.
func (d *DB) CheckTable(ctx context.Context, t dialect.Table) (exists bool, err error) {
	objectType, columns, err := d.columns(ctx, tableName(t))
	if err != nil {
		return false, classify(ctx, err)
	}
	if len(columns) == 0 {
		return false, &dialect.Error{Class: dialect.Setup, Hint: hintSetup, Err: fmt.Errorf("table %s does not exist", tableName(t))}
	}
	if difference := compare(objectType, columns); difference != "" {
		return true, &dialect.Error{Class: dialect.Setup, Hint: "give dblock another table name, or rename what is there",
			Err: fmt.Errorf("%s is not a lock table: %s", tableName(t), difference)}
	}
	return true, nil
}

func (d *DB) columns(ctx context.Context, table string) (objectType string, columns map[string]column, err error) {
	rows, err := d.db.QueryContext(ctx, columnsQuery, sql.Named("table", table))
	if err != nil {
		return "", nil, err
	}
	defer rows.Close()
	columns = map[string]column{}
	for rows.Next() {
		var name string
		var c column
		if err := rows.Scan(&objectType, &name, &c.kind, &c.length, &c.nullable, &c.optional, &c.primary); err != nil {
			return "", nil, err
		}
		columns[name] = c
	}
	return objectType, columns, rows.Err()
}

// compare says what keeps a table from being a lock table; empty if nothing does.
func compare(objectType string, columns map[string]column) string {
	if objectType != "U" {
		return "it is not a table"
	}
	for _, want := range []struct {
		name, kind string
		length     int
	}{{"id", "bigint", 8}, {"name", "varchar", nameSlot}, {"fence", "bigint", 8}} {
		switch c, ok := columns[want.name]; {
		case !ok:
			return "it has no column " + want.name
		case c.kind != want.kind || c.length != want.length || c.nullable:
			return fmt.Sprintf("its column %s is not %s NOT NULL of %d bytes", want.name, want.kind, want.length)
		}
	}
	if !columns["id"].primary {
		return "its primary key is not the column id"
	}
	for name, c := range columns {
		if name != "id" && name != "name" && name != "fence" && !c.optional {
			return fmt.Sprintf("its column %s has no default", name)
		}
	}
	return ""
}
