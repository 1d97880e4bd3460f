package postgres

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock/dialect"
)

var (
	//go:embed migrations/1_locks.up.sql
	createLocks string
	//go:embed migrations/1_locks.down.sql
	dropLocks string
)

// tableName is the table as SQL text, "locks" in the search path by default.
func tableName(t dialect.Table) string {
	name := pgx.Identifier{t.Name}
	if t.Name == "" {
		name = pgx.Identifier{"locks"}
	}
	if t.Schema != "" {
		name = append(pgx.Identifier{t.Schema}, name...)
	}
	return name.Sanitize()
}

// Migrations create the lock table in a schema that exists.
func (d *DB) Migrations(t dialect.Table) []dialect.Migration {
	forTable := func(statement string) []string {
		return []string{strings.ReplaceAll(statement, "{table}", tableName(t))}
	}
	return []dialect.Migration{
		{Version: 1, Up: forTable(createLocks), Down: forTable(dropLocks)},
	}
}

// CheckTable looks the lock table up in the catalog. Further columns do no harm
// as long as a row can be inserted without them.
func (d *DB) CheckTable(ctx context.Context, t dialect.Table) (exists bool, err error) {
	var kind, columns, primaryKey string
	var mandatory int64
	err = d.sql.QueryRowContext(ctx, `SELECT c.relkind::text,
		coalesce((SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attname)
			FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped AND attname IN ('id', 'name', 'fence')), ''),
		(SELECT count(*) FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
			AND attnotnull AND NOT atthasdef AND attidentity = '' AND attname NOT IN ('id', 'name', 'fence')),
		coalesce((SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = c.oid AND contype = 'p'), 'none')
		FROM pg_class AS c WHERE c.oid = to_regclass($1)`, tableName(t)).Scan(&kind, &columns, &mandatory, &primaryKey)
	if errors.Is(err, sql.ErrNoRows) {
		return false, &dialect.Error{Class: dialect.Setup, Err: fmt.Errorf("table %s does not exist", tableName(t)), Hint: setupHint}
	}
	if err != nil {
		return false, classify(ctx, err)
	}
	const wantColumns, wantKey = "fence bigint, id bigint, name text", "PRIMARY KEY (id)"
	var differences []string
	if kind != "r" && kind != "p" {
		differences = append(differences, "it is not a table")
	}
	if columns != wantColumns {
		differences = append(differences, fmt.Sprintf("of the columns %q it has %q", wantColumns, columns))
	}
	if mandatory > 0 {
		differences = append(differences, "it has other columns that are NOT NULL without a default")
	}
	if primaryKey != wantKey {
		differences = append(differences, fmt.Sprintf("its primary key is %q instead of %q", primaryKey, wantKey))
	}
	if len(differences) == 0 {
		return true, nil
	}
	return true, &dialect.Error{Class: dialect.Setup,
		Err:  fmt.Errorf("%s is not a lock table: %s", tableName(t), strings.Join(differences, "; ")),
		Hint: "choose another name or schema for the lock table"}
}
