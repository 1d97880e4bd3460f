package postgres

import (
	"context"
	"database/sql/driver"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock/dialect"
)

// LockUserRows locks all rows in one statement, which sorts them by the key before it
// locks, so that the column's own order and equality decide
// (https://www.postgresql.org/docs/current/sql-select.html#SQL-FOR-UPDATE-SHARE).
// Values are sent as text, to be read as the column's type whatever type they have
// in Go.
//
// It takes one round trip, of which the first for a table has one more. Through
// pgx, one row that is free is locked by a plain statement, whose errors abort the
// transaction; any other failed call leaves the transaction as it was before.
func (d *DB) LockUserRows(ctx context.Context, tx dialect.Tx, r dialect.UserRows) error {
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return err
	}
	columns, err := d.userTables.columns(ctx, t, r.Table)
	if err != nil {
		return err
	}
	values, err := columns.texts(r)
	if err != nil {
		return err
	}
	if len(values) == 1 {
		n, _, err := t.free(ctx, lockUserRows(r, values, " SKIP LOCKED"))
		if err != nil || n == 1 {
			return misfit(r, err, dialect.RemainsAborted)
		}
	}
	began := time.Now()
	for looks, distinct := 0, distinctKeys(values); ; looks++ {
		wait := r.Wait
		if wait > 0 {
			wait = max(time.Millisecond, wait-time.Since(began))
		}
		err := lockSeveral(ctx, t, r, values, distinct, wait)
		if !isIncomplete(err) {
			if r.Try && sqlState(err) == "55P03" {
				err = asClass(err, dialect.NotAcquired)
			}
			return misfit(r, err, dialect.RemainsUsable)
		}
		missing, found, err := whichRows(ctx, t, r, values)
		switch {
		case err != nil:
			return err
		case len(missing) > 0:
			return r.Missing(dialect.RemainsUsable, missing...)
		case looks == mostLooks:
			return &dialect.Error{Class: dialect.Denied, Remains: dialect.RemainsUsable,
				Err:  fmt.Errorf("%s: the rows exist, but not all of them can be locked", r.Table),
				Hint: "a policy of row security that lets this user read a row must let it update the row too"}
		}
		distinct = found // a row was named twice in other words, or has come or gone meanwhile
	}
}

// ClaimUserRows takes one statement. LIMIT ends it before it locks more rows than it
// returns, as long as it is not in a subquery. A row that another transaction
// changed in that very moment, so that the condition no longer holds, is not
// returned and yet stays locked.
// https://www.postgresql.org/docs/current/sql-select.html#SQL-LIMIT
func (d *DB) ClaimUserRows(ctx context.Context, tx dialect.Tx, c dialect.UserClaim) ([][]any, error) {
	t, err := transactionOf(ctx, tx)
	if err != nil {
		return nil, err
	}
	if err := t.open(ctx); err != nil {
		return nil, err
	}
	columns, err := d.userTables.columns(ctx, t, c.Table)
	if err != nil {
		return nil, err
	}
	var keys [][]any
	err = t.read(ctx, func(scan func(...any) error) error {
		key, err := columns.scan(scan)
		keys = append(keys, key)
		return err
	}, claimUserRows(c, columns), c.Args...)
	if isMistake(err) {
		return nil, c.Mistaken(classify(ctx, err), sqlState(err), "$1, $2 and so on", dialect.RemainsAborted)
	}
	if err != nil {
		return nil, classify(ctx, err)
	}
	return keys, nil
}

// isMistake is true of a statement that the server cannot read, or not with these
// values: https://www.postgresql.org/docs/current/errcodes-appendix.html
func isMistake(err error) bool {
	code := sqlState(err)
	return strings.HasPrefix(code, "42") && code != "42501" || strings.HasPrefix(code, "22")
}

// userColumn is the type of a column of a key: of most, the server's text stands for
// the value.
type userColumn string

const bytesColumn userColumn = "bytea"

func (c userColumn) isInteger() bool { return c == "bigint" || c == "integer" || c == "smallint" }

// text is a value as the server reads it; ok is false for one that it cannot be sent.
func (c userColumn) text(value driver.Value) (text string, ok bool) {
	switch v := value.(type) {
	case []byte:
		text = string(v)
	case string:
		text = v
	case time.Time:
		text = v.Format("2006-01-02 15:04:05.999999999Z07:00")
	case float64:
		text = strconv.FormatFloat(v, 'g', -1, 64)
	default:
		text = fmt.Sprint(v)
	}
	if c == bytesColumn {
		return `\x` + hex.EncodeToString([]byte(text)), true
	}
	return text, !strings.Contains(text, "\x00")
}

type userColumns []userColumn

func (cs userColumns) texts(r dialect.UserRows) ([][]string, error) {
	all := make([][]string, len(r.Keys))
	for i, key := range r.Keys {
		all[i] = make([]string, len(key))
		for n, value := range key {
			text, ok := cs[n].text(value)
			if !ok {
				return nil, r.Misfit(i, n, "cannot have a NUL byte")
			}
			all[i][n] = text
		}
	}
	return all, nil
}

// scan reads a key of a claim.
func (cs userColumns) scan(scan func(...any) error) ([]any, error) {
	dest := make([]any, len(cs))
	for i, column := range cs {
		if column.isInteger() {
			dest[i] = new(int64)
		} else {
			dest[i] = new(string)
		}
	}
	if err := scan(dest...); err != nil {
		return nil, err
	}
	var err error
	for i, column := range cs {
		switch v := dest[i].(type) {
		case *int64:
			dest[i] = *v
		case *string:
			dest[i] = *v
			if column == bytesColumn {
				dest[i], err = hex.DecodeString(strings.TrimPrefix(*v, `\x`))
			}
		}
	}
	return dest, err
}

// userTables remembers the tables that were found to be as their callers say.
type userTables struct{ known sync.Map } // userColumns by the table's name and key

func (u *userTables) columns(ctx context.Context, t transaction, table dialect.UserTable) (userColumns, error) {
	name := strings.Join(append([]string{table.Schema, table.Name}, table.Key...), "\x00")
	if known, ok := u.known.Load(name); ok {
		return known.(userColumns), nil
	}
	var columns userColumns
	unique := true
	err := t.read(ctx, func(scan func(...any) error) error {
		var kind, column string
		if err := scan(&kind, &column, &unique); err != nil {
			return err
		}
		switch {
		case kind == "":
			return table.NoTable()
		case kind != "r" && kind != "p":
			return &dialect.Error{Class: dialect.Unsupported, Remains: dialect.RemainsUsable,
				Hint: fmt.Sprintf("%s is no table: lock the rows of the table behind it", table)}
		case column == "":
			return table.NoColumn(table.Key[len(columns)])
		}
		columns = append(columns, userColumn(column))
		return nil
	}, describeUserTable, userTableName(table), textArray(table.Key))
	switch {
	case err != nil:
		return nil, classify(ctx, err)
	case !unique:
		return nil, table.NoUniqueKey()
	}
	u.known.Store(name, columns)
	return columns, nil
}

// describeUserTable has a row for each column of the key, and fails for none.
const describeUserTable = `
SELECT coalesce(c.relkind::text, ''), coalesce(a.atttypid::regtype::text, ''), EXISTS (
	SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
	AND (SELECT array_agg(attname::text ORDER BY attname::text) FROM pg_attribute
		WHERE attrelid = c.oid AND attnotnull AND attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
		= (SELECT array_agg(name ORDER BY name) FROM unnest($2::text[]) AS u (name))
)
FROM unnest($2::text[]) WITH ORDINALITY AS k (name, n)
LEFT JOIN pg_class c ON c.oid = to_regclass($1::text)
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = k.name AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY k.n`

func userTableName(t dialect.UserTable) string {
	return tableName(dialect.Table{Schema: t.Schema, Name: t.Name})
}

func identifier(name string) string { return pgx.Identifier{name}.Sanitize() }

func identifiers(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = identifier(name)
	}
	return strings.Join(quoted, ", ")
}

var strengths = map[dialect.Strength]string{
	dialect.NoKeyUpdate: " FOR NO KEY UPDATE",
	dialect.Update:      " FOR UPDATE",
	dialect.Share:       " FOR SHARE",
}

// mostLooks bounds how often rows may come and go. Those that a policy hides from FOR
// UPDATE alone never come:
// https://www.postgresql.org/docs/current/sql-createpolicy.html#SQL-CREATEPOLICY-SUMMARY
const mostLooks = 5

// lockUserRows has a row for each that it locked.
func lockUserRows(r dialect.UserRows, values [][]string, wait string) statement {
	where, args := whereKeys(r.Table, values)
	return statement{"SELECT FROM " + userTableName(r.Table) + " WHERE " + where +
		" ORDER BY " + identifiers(r.Table.Key) + strengths[r.Strength] + wait, args}
}

// whereKeys is one condition for any number of keys of one column.
func whereKeys(t dialect.UserTable, values [][]string) (string, []any) {
	if len(t.Key) == 1 && len(values) > 1 {
		column := make([]string, len(values))
		for i, key := range values {
			column[i] = key[0]
		}
		return identifier(t.Key[0]) + " = ANY ($1)", []any{textArray(column)}
	}
	var keys []string
	var args []any
	for _, key := range values {
		var parameters []string
		for _, value := range key {
			args = append(args, value)
			parameters = append(parameters, "$"+strconv.Itoa(len(args)))
		}
		keys = append(keys, "("+strings.Join(parameters, ", ")+")")
	}
	return "(" + identifiers(t.Key) + ") IN (" + strings.Join(keys, ", ") + ")", args
}

// incomplete is what the server says of a call of which not all rows exist.
const incomplete = "dblock: not all of the rows exist, found "

func isIncomplete(err error) bool { return err != nil && strings.Contains(err.Error(), incomplete) }

// lockSeveral locks that many rows or none: if it finds fewer, its last expression
// fails, so that the savepoint gives back those that exist.
func lockSeveral(ctx context.Context, t transaction, r dialect.UserRows, values [][]string, distinct int, wait time.Duration) error {
	nowait := ""
	if r.Try {
		nowait = " NOWAIT"
	}
	lock := statement{fmt.Sprintf("SELECT CASE count(*) WHEN %d THEN 0 ELSE (%s || count(*))::int END FROM (%s) AS locked",
		distinct, literal(incomplete), lockUserRows(r, values, nowait).text()), nil}
	var err error
	switch {
	case r.Try:
		err = limitedTo(ctx, t, "lock_timeout", tableWait, lock)
	case wait > 0:
		err = within(ctx, t, wait, lock)
	default:
		_, err = t.exec(ctx, inTurn(savepoint, lock.query, release))
		if err != nil {
			err = rollBack(ctx, t, err)
		}
	}
	return err
}

func distinctKeys(values [][]string) int {
	keys := make(map[string]bool, len(values))
	for _, key := range values {
		keys[fmt.Sprintf("%q", key)] = true
	}
	return len(keys)
}

// whichRows looks for the rows without locking them: the places of the keys that
// have none, and how many rows the others have. The lists of values have the types of
// the columns, which COALESCE takes from its first argument.
func whichRows(ctx context.Context, t transaction, r dialect.UserRows, values [][]string) (missing []int, distinct int, err error) {
	table := userTableName(r.Table)
	var lists, names, same []string
	for n, name := range r.Table.Key {
		column := make([]string, len(values))
		for i, key := range values {
			column[i] = key[n]
		}
		lists = append(lists, fmt.Sprintf("coalesce((SELECT array_agg(%s) FROM %s WHERE false), %s)", identifier(name), table, literal(textArray(column))))
		names = append(names, fmt.Sprintf("dblock_%d", n))
		same = append(same, fmt.Sprintf("dblock_row.%s = dblock_keys.dblock_%d", identifier(name), n))
	}
	found := map[string]bool{}
	err = t.read(ctx, func(scan func(...any) error) error {
		var place int
		var row string
		if err := scan(&place, &row); err != nil {
			return err
		}
		if row == "" {
			missing = append(missing, place-1)
		} else {
			found[row] = true
		}
		return nil
	}, fmt.Sprintf("SELECT dblock_keys.dblock_place, coalesce(dblock_row.tableoid || ' ' || dblock_row.ctid, '')"+
		" FROM unnest(%s) WITH ORDINALITY AS dblock_keys (%s, dblock_place) LEFT JOIN %s AS dblock_row ON %s ORDER BY dblock_keys.dblock_place",
		strings.Join(lists, ", "), strings.Join(names, ", "), table, strings.Join(same, " AND ")))
	if err != nil {
		return nil, 0, classify(ctx, err)
	}
	return missing, len(found), nil
}

// misfit is for values that the server could not read as the column's type, an error
// that by itself says nothing of locks.
func misfit(r dialect.UserRows, err error, remains dialect.Remains) error {
	switch sqlState(err) {
	case "22P02", "22003", "22007", "22008", "22021", "22P03", "22001": // https://www.postgresql.org/docs/current/errcodes-appendix.html, class 22
	default:
		return err
	}
	labels := make([]string, min(len(r.Keys), 5))
	for i := range labels {
		labels[i] = r.Label(i)
	}
	return &dialect.Error{Class: dialect.InvalidKey, Code: sqlState(err), Err: err, Remains: remains,
		Hint: "a value does not fit its column: " + strings.Join(labels, "; ")}
}

func claimUserRows(c dialect.UserClaim, columns userColumns) string {
	key := make([]string, len(c.Table.Key))
	for i, name := range c.Table.Key {
		key[i] = identifier(name)
		if !columns[i].isInteger() {
			key[i] += "::text"
		}
		key[i] += fmt.Sprintf(" AS dblock_%d", i) // ORDER BY means the column
	}
	query := "SELECT " + strings.Join(key, ", ") + " FROM " + userTableName(c.Table)
	if c.Where != "" {
		query += " WHERE (" + c.Where + "\n)" // which may end with a comment
	}
	return query + " ORDER BY " + claimOrder(c) + fmt.Sprintf(" LIMIT %d", c.Limit) + strengths[c.Strength] + " SKIP LOCKED"
}

func claimOrder(c dialect.UserClaim) string {
	if len(c.OrderBy) == 0 {
		return identifiers(c.Table.Key)
	}
	by := make([]string, len(c.OrderBy))
	for i, o := range c.OrderBy {
		by[i] = identifier(o.Column)
		if o.Descending {
			by[i] += " DESC"
		}
	}
	return strings.Join(by, ", ")
}
