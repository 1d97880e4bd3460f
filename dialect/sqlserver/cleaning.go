package sqlserver

import (
	"context"
	"database/sql"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// cleanBatch skips rows that are locked, XLOCK also those that are locked shared, behind
// which the U of a DELETE would go on to wait. READPAST needs READCOMMITTEDLOCK in a
// database with READ_COMMITTED_SNAPSHOT:
// https://learn.microsoft.com/sql/t-sql/queries/hints-transact-sql-table#readpast
const cleanBatch = `
SET NOCOUNT ON;
DECLARE @now datetime2 = SYSUTCDATETIME(), @stale bigint;
SELECT @stale = (CONVERT(bigint, DATEDIFF(day, '19700101', @now)) * 86400 + DATEDIFF(second, CONVERT(date, @now), @now)) * 1000000 - @age;
SELECT @seen = COUNT(*), @last = COALESCE(MAX(id), @from)
	FROM (SELECT TOP (@rows) id FROM {table} WITH (NOLOCK) WHERE id >= @from ORDER BY id) AS page;
DELETE FROM {table} WITH (XLOCK, ROWLOCK, READPAST, READCOMMITTEDLOCK) WHERE id >= @from AND id <= @last AND fence < @stale;
SELECT @deleted = @@ROWCOUNT;
`

// CleanRows is one batch. Whoever comes to lock a row while it is being deleted waits
// for that and creates it again, as [DB.LockRows] does with every row that is missing.
func (d *DB) CleanRows(ctx context.Context, r dialect.CleanRequest) (dialect.Cleaned, error) {
	var seen int64
	cleaned := dialect.Cleaned{Last: r.From}
	_, err := d.db.ExecContext(ctx, inTable(cleanBatch, r.Table), sql.Named("from", r.From), sql.Named("rows", int64(r.Rows)),
		sql.Named("age", r.Age.Microseconds()), out("seen", &seen), out("last", &cleaned.Last), out("deleted", &cleaned.Deleted))
	cleaned.More = seen == int64(r.Rows)
	return cleaned, classify(ctx, err)
}

func inTable(text string, t dialect.Table) string {
	return strings.ReplaceAll(text, "{table}", tableName(t))
}
