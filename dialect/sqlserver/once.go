package sqlserver

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/dblock-go/dblock/dialect"
)

// markBatch goes through rows that are locked. Of each it says "1" if it has written the
// time there, "0" if there was one, "x" if the row is another key's, and "?" if it
// does not see the row or could not write it: what it does not see is no answer.
const markBatch = `
SET NOCOUNT ON;
DECLARE @i int = 0, @id bigint, @fence bigint, @name varchar(64), @mark nchar(1), @error int, @found int, @now datetime2 = SYSUTCDATETIME(), @clock bigint;
SELECT @first = '', @clock = (CONVERT(bigint, DATEDIFF(day, '19700101', @now)) * 86400 + DATEDIFF(second, CONVERT(date, @now), @now)) * 1000000
	+ DATEPART(microsecond, @now);
WHILE @i < @count
BEGIN
	SELECT @id = CONVERT(bigint, SUBSTRING(@ids, @i * 20 + 1, 20)), @fence = NULL, @name = NULL;
	SELECT @fence = fence, @name = name FROM {table} WITH (UPDLOCK, HOLDLOCK, ROWLOCK) WHERE id = @id;
	IF @@ERROR <> 0 RETURN;
	SET @mark = CASE WHEN @fence IS NULL THEN '?'
		WHEN @name COLLATE Latin1_General_BIN2 <> RTRIM(SUBSTRING(@names, @i * 64 + 1, 64)) COLLATE Latin1_General_BIN2 THEN 'x'
		WHEN @fence > 0 THEN '0' ELSE '1' END;
	IF @mark = '1'
	BEGIN
		UPDATE {table} WITH (UPDLOCK, HOLDLOCK, ROWLOCK) SET fence = @clock WHERE id = @id;
		SELECT @error = @@ERROR, @found = @@ROWCOUNT;
		IF @error <> 0 RETURN;
		IF @found <> 1 SET @mark = '?';
	END;
	SET @first += @mark;
	SET @i += 1;
END;
`

// MarkRows locks the rows as LockRows does, which creates those that are missing, with
// the fence 0, beside the transaction, and writes the time into the fence of those that
// have none.
func (d *DB) MarkRows(ctx context.Context, tx dialect.Tx, r dialect.MarkRequest) ([]bool, error) {
	if _, err := d.LockRows(ctx, tx, dialect.RowRequest{Table: r.Table, Keys: r.Keys}); err != nil {
		return nil, err
	}
	p, err := pack(r.Keys)
	if err != nil {
		return nil, err
	}
	var marks string
	_, err = tx.ExecContext(ctx, inTable(markBatch, r.Table), sql.Named("count", p.count), sql.Named("ids", p.ids),
		sql.Named("names", p.names), out("first", &marks))
	if err != nil {
		return nil, classify(ctx, err)
	}
	if len(marks) != len(r.Keys) {
		return nil, fmt.Errorf("the server returned %d marks for %d keys", len(marks), len(r.Keys))
	}
	first := make([]bool, len(r.Keys))
	for i, mark := range marks {
		switch mark {
		case '1':
			first[i] = true
		case '0':
		case 'x':
			return nil, dialect.Collides(r.Keys[i])
		default:
			return nil, dialect.Unseen()
		}
	}
	return first, nil
}
