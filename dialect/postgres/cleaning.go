package postgres

import (
	"context"

	"github.com/dblock-go/dblock/dialect"
)

// CleanRows is one statement, which skips rows that are locked. Whoever comes to lock a
// row while it is being deleted waits for that and creates it again, as
// [DB.LockRows] does with every row that is missing.
func (d *DB) CleanRows(ctx context.Context, r dialect.CleanRequest) (dialect.Cleaned, error) {
	table := tableName(r.Table)
	var seen int
	cleaned := dialect.Cleaned{Last: r.From}
	err := d.sql.QueryRowContext(ctx, `WITH page AS MATERIALIZED (SELECT id FROM `+table+` WHERE id >= $1::bigint ORDER BY id LIMIT $2::bigint),
		unused AS MATERIALIZED (SELECT id FROM `+table+` WHERE id IN (SELECT id FROM page) AND fence < `+clock+` - $3::bigint FOR UPDATE SKIP LOCKED),
		gone AS (DELETE FROM `+table+` WHERE id IN (SELECT id FROM unused) RETURNING id)
		SELECT (SELECT count(*) FROM page), coalesce((SELECT max(id) FROM page), $1::bigint), (SELECT count(*) FROM gone)`,
		r.From, r.Rows, r.Age.Microseconds()).Scan(&seen, &cleaned.Last, &cleaned.Deleted)
	cleaned.More = seen == r.Rows
	if err = classify(ctx, err); dialect.ClassOf(err) == dialect.Denied {
		err = changed(err, func(e *dialect.Error) { e.Hint = "GRANT SELECT, UPDATE, DELETE ON " + table + " TO this user" })
	}
	return cleaned, err
}
