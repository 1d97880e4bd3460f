package sqlserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// ensureTimeout bounds the creation of missing rows on another connection, where
// it could wait for the very transaction that it is done for.
const ensureTimeout = time.Second

// LockRows locks the rows one by one under UPDLOCK and HOLDLOCK, those in shared mode
// under HOLDLOCK alone, which lock and read the newest version under every isolation
// level. It needs one round trip.
//
// Rows that do not exist yet are first created on another connection of the
// pool, each in a transaction of its own: created in the caller's transaction,
// they would keep a range of ids locked, out of order, until it ends. If there
// is no other connection to be had, that is what happens, and a deadlock with
// another transaction becomes possible.
//
// SQL Server does not give row locks back before the transaction ends: after an
// error of class NotAcquired or Timeout, keys before the one in question stay
// locked.
//
// A limited wait takes one round trip for each key, and fencing numbers one more, on
// a connection that the DB keeps of its pool.
func (d *DB) LockRows(ctx context.Context, tx dialect.Tx, r dialect.RowRequest) ([]int64, error) {
	fences, err := d.lockRows(ctx, tx, r)
	if err == nil {
		return fences, nil
	}
	if r.Try && hasNumber(err, errLockTimeout) {
		err = notAcquired(err)
	}
	err = classify(ctx, err)
	var e *dialect.Error
	if errors.As(err, &e) && e.Remains == dialect.RemainsUsable {
		e.Remains = remains(ctx, tx)
	}
	return nil, err
}

func (d *DB) lockRows(ctx context.Context, tx dialect.Tx, r dialect.RowRequest) ([]int64, error) {
	if dialect.IsNil(tx) {
		return nil, errNilTx
	}
	until := time.Now().Add(r.Wait)
	steps := [][]dialect.Key{r.Keys}
	if r.Wait > 0 { // LOCK_TIMEOUT begins anew with each key
		steps = slices.Collect(slices.Chunk(r.Keys, 1))
	}
	for _, keys := range steps {
		p, err := pack(keys)
		if err != nil {
			return nil, err
		}
		b := &rowBatch{table: r.Table, try: r.Try}
		before := inTransaction
		if r.Wait > 0 {
			before += lockTimeout(time.Until(until))
		}
		if err := b.run(ctx, tx, p, before); err != nil {
			return nil, err
		}
		if b.transactions == 0 {
			return nil, notInTransaction()
		}
		if _, err := b.finish(ctx, tx, spare{d.db}, p, keys); err != nil {
			return nil, err
		}
	}
	if !r.Fence {
		return nil, nil
	}
	return d.draw(ctx, r.Table, r.Keys)
}

// lockTimeout bounds each wait of its batch by at least 1 ms: 0 would be a try. The
// setting ends with the batch:
// https://learn.microsoft.com/sql/t-sql/statements/set-statements-transact-sql#considerations-when-you-use-the-set-statements
func lockTimeout(limit time.Duration) string {
	ms := limit / time.Millisecond
	if limit%time.Millisecond > 0 {
		ms++
	}
	return fmt.Sprintf("SET LOCK_TIMEOUT %d;\n", min(max(ms, 1), math.MaxInt32))
}

// rowBatch locks rows of a lock table.
type rowBatch struct {
	table dialect.Table
	draw  bool // fencing numbers
	try   bool

	session      int32 // that ran the batch by itself, 0 if it was part of another
	transactions int32
	before       string // what precedes the batch, if it is run again
	ensured      int32  // 1: create what is still missing
	missing      string // positions of the keys that have no row, each with a comma
	fences       string // the number drawn for each key, each with a comma
}

const inTransaction = `
SET @transactions = @@TRANCOUNT;
IF @transactions = 0 RETURN;
`

// rowsText first looks for missing rows, without waiting and without leaving a
// lock, and touches nothing if there are any. Then it locks the rows in order.
// The statement that locks ends alone when it fails, so the batch ends itself.
//
// A row that vanishes in between, because its creator rolled back, is created
// here: HOLDLOCK has locked its place.
const rowsText = `
SET NOCOUNT ON;
DECLARE @i int = 0, @id bigint, @fence bigint, @now datetime2, @clock bigint, @error int, @found int;
SELECT @missing = '', @fences = '';
WHILE @ensured = 0 AND @i < @count
BEGIN
	SET @id = CONVERT(bigint, SUBSTRING(@ids, @i * 20 + 1, 20));
	IF NOT EXISTS (SELECT 1 FROM {table} WITH (NOLOCK) WHERE id = @id)
		SET @missing += CONVERT(nvarchar(11), @i) + ',';
	SET @i += 1;
END;
IF @missing <> '' RETURN;
SET @i = 0;
WHILE @i < @count
BEGIN
	SELECT @now = SYSUTCDATETIME(), @id = CONVERT(bigint, SUBSTRING(@ids, @i * 20 + 1, 20));
	SELECT @clock = (CONVERT(bigint, DATEDIFF(day, '19700101', @now)) * 86400 + DATEDIFF(second, CONVERT(date, @now), @now)) * 1000000
		+ DATEPART(microsecond, @now);
	SET @fence = {first};
	{lock};
	SELECT @error = @@ERROR, @found = @@ROWCOUNT;
	IF @error <> 0 RETURN;
	IF @found = 0
	BEGIN
		INSERT INTO {table} (id, name, fence) VALUES (@id, RTRIM(SUBSTRING(@names, @i * 64 + 1, 64)), @fence);
		IF @@ERROR <> 0 RETURN;
	END;
	SET @fences += CONVERT(nvarchar(20), @fence) + ',';
	SET @i += 1;
END;
`

func (b *rowBatch) text() string {
	locked := ""
	if b.try {
		locked = ", NOWAIT"
	}
	table := tableName(b.table)
	lock, first := fmt.Sprintf(`IF SUBSTRING(@modes, @i + 1, 1) = 'S'
		SELECT @fence = fence FROM %[1]s WITH (HOLDLOCK, ROWLOCK%[2]s) WHERE id = @id
	ELSE
		SELECT @fence = fence FROM %[1]s WITH (UPDLOCK, HOLDLOCK, ROWLOCK%[2]s) WHERE id = @id`, table, locked), "0"
	if b.draw {
		first = "@clock"
		lock = fmt.Sprintf("UPDATE %s WITH (UPDLOCK, HOLDLOCK, ROWLOCK%s) SET @fence = fence = CASE WHEN fence + %[3]d > @clock THEN fence + %[3]d ELSE @clock END WHERE id = @id",
			table, locked, dialect.FenceStride)
	}
	return strings.NewReplacer("{table}", table, "{lock}", lock, "{first}", first).Replace(rowsText)
}

// parameters are those that acquireBatch does not have.
func (b *rowBatch) parameters(p packed) []any {
	return []any{sql.Named("ids", p.ids), sql.Named("ensured", b.ensured), out("missing", &b.missing), out("fences", &b.fences)}
}

// run is the batch by itself.
func (b *rowBatch) run(ctx context.Context, on dialect.Tx, p packed, before string) error {
	b.before = before
	args := append(b.parameters(p), sql.Named("count", p.count), sql.Named("names", p.names), sql.Named("modes", p.modes), out("session", &b.session))
	if before != "" {
		args = append(args, out("transactions", &b.transactions))
	}
	_, err := on.ExecContext(ctx, "SET @session = @@SPID;"+before+b.text(), args...)
	return err
}

// finish creates the rows that a run reported missing, by statements of their
// own on autocommit, and runs again. It returns the fence of each key.
func (b *rowBatch) finish(ctx context.Context, on, autocommit dialect.Tx, p packed, keys []dialect.Key) ([]int64, error) {
	if b.missing != "" {
		missing, err := parseInts(b.missing)
		if err != nil {
			return nil, err
		}
		for _, i := range missing {
			if i < 0 || i >= int64(len(keys)) {
				return nil, fmt.Errorf("the server named key %d of %d", i, len(keys))
			}
			if err := b.ensure(ctx, autocommit, keys[i]); err != nil {
				return nil, err
			}
		}
		b.ensured = 1
		if err := b.run(ctx, on, p, b.before); err != nil {
			return nil, err
		}
	}
	fences, err := parseInts(b.fences)
	if err != nil {
		return nil, err
	}
	if len(fences) != len(keys) {
		return nil, fmt.Errorf("the server returned %d fencing numbers for %d keys", len(fences), len(keys))
	}
	return fences, nil
}

// ensure creates a row. If it exists by now, that is fine.
func (b *rowBatch) ensure(ctx context.Context, on dialect.Tx, k dialect.Key) error {
	hints := "WITH (ROWLOCK)"
	if b.try {
		hints = "WITH (ROWLOCK, NOWAIT)"
	}
	_, err := on.ExecContext(ctx, "INSERT INTO "+tableName(b.table)+" "+hints+" (id, name, fence) VALUES (@id, @name, 0);",
		sql.Named("id", k.ID), sql.Named("name", k.Name))
	if hasNumber(err, errDuplicateKey) || hasNumber(err, errDuplicateIndex) {
		return nil
	}
	return err
}

// spare runs statements on a connection of the pool that is free, for as long as
// ensureTimeout. Not being able to is no error.
type spare struct{ db *sql.DB }

func (s spare) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if stats := s.db.Stats(); stats.MaxOpenConnections > 0 && stats.InUse >= stats.MaxOpenConnections {
		return nil, nil
	}
	bounded, cancel := context.WithTimeout(ctx, ensureTimeout)
	defer cancel()
	result, err := s.db.ExecContext(bounded, query, args...)
	if ctx.Err() == nil && (bounded.Err() != nil || hasNumber(err, errLockTimeout)) {
		return nil, nil
	}
	return result, err
}

// parseInts reads numbers with a comma after each.
func parseInts(list string) ([]int64, error) {
	var numbers []int64
	for field := range strings.SplitSeq(strings.TrimSuffix(list, ","), ",") {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read the server's answer: %w", err)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}
