package mysql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// LockUserRows locks the rows in one statement if nobody has them, each by a query of
// its own, and otherwise one after the other, as LockRows does.
//
// Keys of text, and all others of which this package does not know how the server
// compares them, are first sorted by the server, in a statement that reads no table
// and so opens no read view. The first call for a table looks at it on a second
// connection, since MySQL's catalogue would open one.
//
// A key without a row locks the gap in which it would be, under REPEATABLE READ and
// SERIALIZABLE: https://dev.mysql.com/doc/refman/en/innodb-locking.html#innodb-gap-locks
//
// MySQL does not tell an *sql.Tx of which a deadlock has left nothing from one that
// is open, at no cost; MariaDB does.
func (db *DB) LockUserRows(ctx context.Context, tx dialect.Tx, r dialect.UserRows) error {
	q, err := db.querier(ctx, tx)
	if err != nil {
		return err
	}
	table, err := db.userTable(ctx, r.Table)
	if err != nil {
		return err
	}
	rows, err := db.userRows(ctx, q, table, r)
	if err != nil {
		return err
	}
	if len(rows) > 1 {
		locked, err := db.lockFreeUserRows(ctx, q, table, r, rows)
		if err != nil || locked {
			return stillLocked(1, db.failure(ctx, err))
		}
	}
	began := time.Now()
	for i, row := range rows {
		if err := db.lockUserRow(ctx, q, table, r, row, began); err != nil {
			return stillLocked(i, db.failure(ctx, err))
		}
	}
	return nil
}

// querier is a transaction that locks can be taken in.
func (db *DB) querier(ctx context.Context, tx dialect.Tx) (dialect.Querier, error) {
	if dialect.IsNil(tx) {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Hint: "the transaction is nil"}
	}
	q, ok := tx.(dialect.Querier)
	if !ok {
		return nil, &dialect.Error{Class: dialect.Unsupported, Hint: fmt.Sprintf("%T has no QueryContext: pass a *sql.Tx", tx)}
	}
	return q, db.inTransaction(ctx, q)
}

// userRow is a key of a call, as SQL.
type userRow struct {
	place    int // in the call
	literals []string
}

// userRows are the rows of a call in the order in which all callers lock them.
func (db *DB) userRows(ctx context.Context, q dialect.Querier, t *userTable, r dialect.UserRows) ([]userRow, error) {
	keys, err := db.timesAsText(ctx, q, r.Keys)
	if err != nil {
		return nil, err
	}
	rows := make([]userRow, len(keys))
	for i, key := range keys {
		rows[i] = userRow{i, make([]string, len(key))}
		for n, value := range key {
			literal, why := t.columns[n].literal(value)
			if why != "" {
				return nil, r.Misfit(i, n, why)
			}
			rows[i].literals[n] = literal
		}
	}
	if len(rows) == 1 {
		return rows, nil
	}
	if slices.IndexFunc(t.columns, func(c userColumn) bool { return c.compare() == nil }) >= 0 {
		return t.sortedByServer(ctx, db, q, rows)
	}
	slices.SortStableFunc(rows, func(a, b userRow) int {
		for n, column := range t.columns {
			if order := column.compare()(a.literals[n], b.literals[n]); order != 0 {
				return order
			}
		}
		return 0
	})
	return rows, nil
}

// timesAsText has the driver write each time.Time, which it does in the location
// of its DSN: https://github.com/go-sql-driver/mysql#timetime-support
func (db *DB) timesAsText(ctx context.Context, q dialect.Querier, keys [][]driver.Value) ([][]driver.Value, error) {
	var times []any
	for _, key := range keys {
		for _, value := range key {
			if at, ok := value.(time.Time); ok {
				times = append(times, at)
			}
		}
	}
	if len(times) == 0 {
		return keys, nil
	}
	written, err := queryTexts(ctx, q, "SELECT "+strings.TrimSuffix(strings.Repeat("CAST(? AS CHAR), ", len(times)), ", "), times...)
	if err != nil {
		return nil, db.failure(ctx, err)
	}
	texts := written[0]
	asText := make([][]driver.Value, len(keys))
	for i, key := range keys {
		asText[i] = slices.Clone(key)
		for n, value := range key {
			if _, ok := value.(time.Time); ok {
				asText[i][n], texts = texts[0], texts[1:]
			}
		}
	}
	return asText, nil
}

// sortedByServer sorts by the columns' collations and types. Rows that are equal may
// be locked twice, which is once.
func (t *userTable) sortedByServer(ctx context.Context, db *DB, q dialect.Querier, rows []userRow) ([]userRow, error) {
	by := make([]string, len(t.columns))
	for n := range by {
		by[n] = fmt.Sprintf("dblock_key_%d", n)
	}
	places, err := queryInts(ctx, q, db.flavor.sortingAll("SELECT dblock_place FROM "+db.listed(rows)+" ORDER BY "+strings.Join(by, ", ")+", dblock_place"))
	if err != nil {
		return nil, db.failure(ctx, err)
	}
	sorted := make([]userRow, len(places))
	for i, place := range places {
		sorted[i] = rows[place]
	}
	return sorted, nil
}

// sortedBytes is how much of a key the server compares when it sorts: by default only
// so much that two keys of an index, which has room for 3,072 bytes, may look alike and
// stay in the order in which they came. Collations make several bytes of each.
// https://dev.mysql.com/doc/refman/en/server-system-variables.html#sysvar_max_sort_length
//
// It must have room for several such keys:
// https://dev.mysql.com/doc/refman/en/server-system-variables.html#sysvar_sort_buffer_size
const (
	sortedBytes = 1 << 16
	sortingRoom = 1 << 21
)

// sortingByHint is a SELECT with MySQL's settings:
// https://dev.mysql.com/doc/refman/en/optimizer-hints.html#optimizer-hints-set-var
func sortingByHint(query string) string {
	return hinted(query, fmt.Sprintf("SET_VAR(max_sort_length = %d) SET_VAR(sort_buffer_size = %d)", sortedBytes, sortingRoom))
}

func sortingBySet(query string) string {
	return fmt.Sprintf("SET STATEMENT max_sort_length = %d, sort_buffer_size = %d FOR %s", sortedBytes, sortingRoom, query)
}

// listed is a table of the keys, as constants.
func (db *DB) listed(rows []userRow) string {
	var list strings.Builder
	list.WriteString("(WITH dblock_rows (dblock_place")
	for n := range rows[0].literals {
		fmt.Fprintf(&list, ", dblock_key_%d", n)
	}
	list.WriteString(") AS (VALUES ")
	for i, row := range rows {
		if i > 0 {
			list.WriteString(", ")
		}
		list.WriteString(db.flavor.row + "(" + strconv.Itoa(i))
		for _, literal := range row.literals {
			list.WriteString(", " + literal)
		}
		list.WriteString(")")
	}
	list.WriteString(") SELECT * FROM dblock_rows) AS dblock_keys")
	return list.String()
}

// lockFreeUserRows is lockFree for an application's table.
func (db *DB) lockFreeUserRows(ctx context.Context, q dialect.Querier, t *userTable, r dialect.UserRows, rows []userRow) (bool, error) {
	if db.rollbackOnTimeout && !r.Try {
		return false, nil
	}
	for i := 0; i < len(rows); i += branches {
		chunk := rows[i:min(i+branches, len(rows))]
		queries := make([]string, len(chunk))
		for n, row := range chunk {
			queries[n] = "(" + db.selectUserRow(t, r.Strength, row) + " NOWAIT)"
		}
		found, err := db.lockedPlaces(ctx, q, strings.Join(queries, " UNION ALL "))
		switch {
		case isBusy(err) && r.Try:
			return false, db.refusedRows(err)
		case isBusy(err):
			return false, nil
		case err != nil:
			return false, err
		}
		if missing := missingPlaces(chunk, found); len(missing) > 0 {
			return false, r.Missing(dialect.RemainsUsable, missing...)
		}
	}
	return true, nil
}

func missingPlaces(rows []userRow, found []int64) (missing []int) {
	for _, row := range rows {
		if !slices.Contains(found, int64(row.place)) {
			missing = append(missing, row.place)
		}
	}
	slices.Sort(missing)
	return missing
}

func (db *DB) lockUserRow(ctx context.Context, q dialect.Querier, t *userTable, r dialect.UserRows, row userRow, began time.Time) error {
	query := db.selectUserRow(t, r.Strength, row)
	var found []int64
	run := func(query string) (err error) {
		found, err = db.lockedPlaces(ctx, q, query)
		return err
	}
	var err error
	wait := true
	if r.Try || !db.rollbackOnTimeout {
		err = run(query + " NOWAIT")
		wait = isBusy(err)
	}
	switch {
	case wait && r.Try:
		return db.refusedRows(err)
	case wait:
		limit := r.Wait
		if limit > 0 {
			limit = max(time.Millisecond, limit-time.Since(began))
		}
		err = db.waitForRow(ctx, q, query, limit, run)
	}
	if err == nil && len(found) == 0 {
		err = r.Missing(dialect.RemainsUsable, row.place)
	}
	return err
}

// refusedRows is what the server's error means to a try.
func (db *DB) refusedRows(err error) error {
	var cause *dialect.Error
	if !errors.As(db.Classify(err), &cause) {
		return err
	}
	return &dialect.Error{Class: dialect.NotAcquired, Code: cause.Code, Remains: cause.Remains, Err: err}
}

func (db *DB) selectUserRow(t *userTable, strength dialect.Strength, row userRow) string {
	return fmt.Sprintf("SELECT %d, %s FROM %s WHERE %s %s", row.place, db.flavor.inTransaction, t.name, t.is(row.literals), db.lockingClause(strength))
}

func (db *DB) lockingClause(strength dialect.Strength) string {
	if strength == dialect.Share {
		return db.flavor.forShare
	}
	return "FOR UPDATE"
}

// lockedPlaces runs locking queries. Outside of a transaction, what they locked is
// free again.
func (db *DB) lockedPlaces(ctx context.Context, q dialect.Querier, query string) (places []int64, err error) {
	rows, err := q.QueryContext(ctx, query)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var place int64
		var open bool
		if err := rows.Scan(&place, &open); err != nil {
			return nil, err
		}
		if !open {
			return nil, errNothingLeft
		}
		places = append(places, place)
	}
	return places, rows.Err()
}

var errNothingLeft = &dialect.Error{Class: dialect.Unsupported, Remains: dialect.RemainsNothing,
	Hint: "the server has rolled back this transaction, after a deadlock perhaps: begin a new one"}

func queryTexts(ctx context.Context, q dialect.Querier, query string, args ...any) ([][]string, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	raw := make([]sql.RawBytes, len(columns))
	dest := make([]any, len(columns))
	for i := range raw {
		dest[i] = &raw[i]
	}
	var all [][]string
	for rows.Next() {
		if err := rows.Scan(dest...); err != nil {
			return nil, err
		}
		texts := make([]string, len(columns))
		for i, text := range raw {
			texts[i] = string(text)
		}
		all = append(all, texts)
	}
	return all, rows.Err()
}
