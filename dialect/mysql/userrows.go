package mysql

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

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

// ClaimUserRows reads candidates without locking, on a second connection and so in a
// snapshot of the moment, and then locks them by their key, where the condition is
// asked again. A single statement that sorts would lock every row that it sorts, and
// under REPEATABLE READ every row that it reads.
// https://dev.mysql.com/doc/refman/en/innodb-locks-set.html
//
// What was locked by others is tried once. As long as all candidates were tried,
// twice as many are read.
func (db *DB) ClaimUserRows(ctx context.Context, tx dialect.Tx, c dialect.UserClaim) ([][]any, error) {
	q, err := db.querier(ctx, tx)
	if err != nil {
		return nil, err
	}
	t, err := db.userTable(ctx, c.Table)
	if err != nil {
		return nil, err
	}
	var claimed [][]any
	tried := map[string]bool{}
	for window := c.Limit; ; window *= 2 {
		candidates, err := db.candidates(ctx, t, c, window)
		if err != nil {
			return nil, stillLocked(len(claimed), db.failure(ctx, err))
		}
		untried := candidates
		if len(tried) > 0 {
			untried = slices.DeleteFunc(slices.Clone(candidates), func(key []string) bool { return tried[joined(key)] })
		}
		for len(untried) > 0 && len(claimed) < c.Limit {
			n := min(len(untried), c.Limit-len(claimed), claimedAtOnce)
			keys, err := db.claim(ctx, q, t, c, untried[:n])
			if err != nil {
				return nil, stillLocked(len(claimed), db.failure(ctx, err))
			}
			claimed = append(claimed, keys...)
			untried = untried[n:]
		}
		if len(claimed) == c.Limit || len(candidates) < window {
			return claimed, nil
		}
		for _, key := range candidates {
			tried[joined(key)] = true
		}
	}
}

// claimedAtOnce bounds the length of a statement.
const claimedAtOnce = 1000

// joined identifies a key.
func joined(key []string) string { return strings.Join(key, "\x00\x01") }

func (db *DB) candidates(ctx context.Context, t *userTable, c dialect.UserClaim, limit int) ([][]string, error) {
	conn, done, err := db.side.take(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	where := ""
	if c.Where != "" {
		where = " WHERE (" + c.Where + "\n)" // which may end with a comment
	}
	return queryTexts(ctx, conn, "SELECT "+t.texts()+" FROM "+t.name+where+" ORDER BY "+t.order(c)+fmt.Sprintf(" LIMIT %d", limit), c.Args...)
}

// claim locks those of the candidates that are free and that the condition is true
// of, each by a look-up of its key: given a list of keys instead, the optimizer may
// scan a small table, and under REPEATABLE READ lock all of it. For both servers a
// join of the list in this order, through this index, leaves no other way.
// https://dev.mysql.com/doc/refman/en/index-hints.html
func (db *DB) claim(ctx context.Context, q dialect.Querier, t *userTable, c dialect.UserClaim, candidates [][]string) ([][]any, error) {
	rows := make([]userRow, len(candidates))
	for i, key := range candidates {
		rows[i].literals = make([]string, len(key))
		for n, text := range key {
			literal, why := t.columns[n].literal(text)
			if why != "" {
				return nil, fmt.Errorf("read a key of %s: the column %s %s, but not %q", c.Table, c.Table.Key[n], why, text)
			}
			rows[i].literals[n] = literal
		}
	}
	same := make([]string, len(t.columns))
	for n, column := range t.columns {
		same[n] = fmt.Sprintf("%s = dblock_key_%d", quote(column.name), n)
	}
	where := ""
	if c.Where != "" {
		where = " WHERE (" + c.Where + "\n)"
	}
	locked, err := queryTexts(ctx, q, fmt.Sprintf("SELECT STRAIGHT_JOIN %s FROM %s JOIN %s FORCE INDEX (%s) ON %s%s %s SKIP LOCKED",
		t.texts(), db.listed(rows), t.name, quote(t.index), strings.Join(same, " AND "), where, db.lockingClause(c.Strength)), c.Args...)
	if err != nil {
		return nil, err
	}
	isLocked := make(map[string]bool, len(locked))
	for _, key := range locked {
		isLocked[joined(key)] = true
	}
	var claimed [][]any
	for _, key := range candidates {
		if isLocked[joined(key)] {
			claimed = append(claimed, t.values(key))
		}
	}
	return claimed, nil
}

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

// userTable is a table of an application as the catalogue has it.
type userTable struct {
	name    string // quoted
	index   string
	columns []userColumn // of the key, in the order of the call
}

func (t *userTable) is(literals []string) string {
	conditions := make([]string, len(literals))
	for n, literal := range literals {
		conditions[n] = quote(t.columns[n].name) + " = " + literal
	}
	return "(" + strings.Join(conditions, " AND ") + ")"
}

func (t *userTable) texts() string {
	columns := make([]string, len(t.columns))
	for n, column := range t.columns {
		columns[n] = quote(column.name)
		if column.kind == numberColumn || column.kind == otherColumn {
			columns[n] = "CAST(" + columns[n] + " AS CHAR)"
		}
		columns[n] += fmt.Sprintf(" AS dblock_%d", n) // ORDER BY means the column
	}
	return strings.Join(columns, ", ")
}

func (t *userTable) values(texts []string) []any {
	values := make([]any, len(texts))
	for n, text := range texts {
		values[n] = t.columns[n].value(text)
	}
	return values
}

func (t *userTable) order(c dialect.UserClaim) string {
	var by []string
	for _, o := range c.OrderBy {
		direction := ""
		if o.Descending {
			direction = " DESC"
		}
		by = append(by, quote(o.Column)+direction)
	}
	if len(by) == 0 {
		for _, column := range t.columns {
			by = append(by, quote(column.name))
		}
	}
	return strings.Join(by, ", ")
}

// userTables remembers the tables that were found to be as their callers say.
type userTables struct{ known sync.Map } // *userTable by the table's name and key

func (db *DB) userTable(ctx context.Context, table dialect.UserTable) (*userTable, error) {
	schema, name := db.resolve(dialect.Table{Schema: table.Schema, Name: table.Name})
	id := strings.Join(append([]string{schema, name}, table.Key...), "\x00")
	if known, ok := db.userTables.known.Load(id); ok {
		return known.(*userTable), nil
	}
	conn, done, err := db.side.take(ctx)
	if err != nil {
		return nil, remains(db.failure(ctx, err), dialect.RemainsUsable)
	}
	defer done()
	t, err := describe(ctx, conn, table, schema, name)
	if err != nil {
		return nil, remains(db.failure(ctx, err), dialect.RemainsUsable)
	}
	db.userTables.known.Store(id, t)
	return t, nil
}

func describe(ctx context.Context, q dialect.Querier, table dialect.UserTable, schema, name string) (*userTable, error) {
	here := fmt.Sprintf("table_schema = %s AND table_name = %s", textLiteral(schema), textLiteral(name))
	columns, err := queryTexts(ctx, q, "SELECT column_name, data_type, COALESCE(character_set_name, ''), COALESCE(collation_name, ''),"+
		" is_nullable, COALESCE((SELECT engine FROM information_schema.tables WHERE "+here+"), '')"+
		" FROM information_schema.columns WHERE "+here)
	if err != nil {
		return nil, err
	}
	if len(columns) == 0 {
		return nil, table.NoTable()
	}
	if engine := columns[0][5]; !strings.EqualFold(engine, "InnoDB") {
		return nil, &dialect.Error{Class: dialect.Unsupported, Remains: dialect.RemainsUsable,
			Hint: fmt.Sprintf("%s has the engine %q, whose rows cannot be locked: lock a table of InnoDB", table, engine)}
	}
	t := &userTable{name: quote(schema) + "." + quote(name)}
	var key []string
	nullable := false
	for _, wanted := range table.Key {
		i := slices.IndexFunc(columns, func(c []string) bool { return strings.EqualFold(c[0], wanted) })
		if i < 0 {
			return nil, table.NoColumn(wanted)
		}
		c := columns[i]
		if strings.EqualFold(c[1], "bit") {
			return nil, &dialect.Error{Class: dialect.Unsupported, Remains: dialect.RemainsUsable,
				Hint: fmt.Sprintf("the column %s of %s is a BIT: use another unique key", wanted, table)}
		}
		t.columns = append(t.columns, newUserColumn(c[0], c[1], c[2], c[3]))
		key = append(key, c[0])
		nullable = nullable || c[4] != "NO"
	}
	parts, err := queryTexts(ctx, q, "SELECT index_name, COALESCE(column_name, ''), COALESCE(sub_part, '')"+
		" FROM information_schema.statistics WHERE non_unique = 0 AND "+here+" ORDER BY index_name <> 'PRIMARY', index_name, seq_in_index")
	if err != nil {
		return nil, err
	}
	slices.Sort(key)
	for len(parts) > 0 && t.index == "" {
		index := parts[0][0]
		var of []string
		for len(parts) > 0 && parts[0][0] == index {
			of = append(of, parts[0][1]+parts[0][2]) // the index of a prefix does not count
			parts = parts[1:]
		}
		slices.Sort(of)
		if slices.Equal(of, key) {
			t.index = index
		}
	}
	if t.index == "" || nullable {
		return nil, table.NoUniqueKey()
	}
	return t, nil
}

// userColumn is a column of a key.
type userColumn struct {
	name      string
	kind      columnKind
	dataType  string
	charset   string
	collation string
}

// columnKind says how values of a column are written, so that the server compares
// them as the column's own: a column of text that is compared with a number is
// converted for each row of the table, all of which are then locked, and text that
// is compared with a column of numbers may be taken for another number.
// https://dev.mysql.com/doc/refman/en/type-conversion.html
type columnKind uint8

const (
	otherColumn columnKind = iota // dates and the types that MariaDB has beside
	integerColumn
	numberColumn
	textColumn
	bytesColumn
)

func newUserColumn(name, dataType, charset, collation string) userColumn {
	c := userColumn{name: name, dataType: strings.ToUpper(dataType), charset: charset, collation: collation}
	switch c.dataType {
	case "TINYINT", "SMALLINT", "MEDIUMINT", "INT", "BIGINT", "YEAR":
		c.kind = integerColumn
	case "DECIMAL", "FLOAT", "DOUBLE":
		c.kind = numberColumn
	case "BINARY", "VARBINARY", "TINYBLOB", "BLOB", "MEDIUMBLOB", "LONGBLOB":
		c.kind = bytesColumn
	default:
		if charset != "" {
			c.kind = textColumn
		}
	}
	return c
}

var decimal = regexp.MustCompile(`^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$`)

// literal writes a value; why says what is wrong with it.
func (c userColumn) literal(value driver.Value) (literal, why string) {
	text := ""
	switch v := value.(type) {
	case int64:
		text = strconv.FormatInt(v, 10)
		if c.kind == integerColumn {
			return text, ""
		}
	case []byte:
		text = string(v)
	case string:
		text = v
	case bool:
		text = "0"
		if v {
			text = "1"
		}
	case float64:
		text = strconv.FormatFloat(v, 'f', -1, 64)
	default:
		text = fmt.Sprint(v)
	}
	switch c.kind {
	case integerColumn:
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			return strconv.FormatInt(n, 10), ""
		}
		n, ok := new(big.Int).SetString(text, 10)
		if !ok {
			return "", "has whole numbers only"
		}
		return n.String(), ""
	case numberColumn:
		if !decimal.MatchString(text) {
			return "", "has numbers only"
		}
		return text, ""
	case bytesColumn:
		return bytesLiteral(text), ""
	case textColumn:
		return c.text(text), ""
	}
	return fmt.Sprintf("CAST(%s AS %s)", textLiteral(text), c.castType()), ""
}

// text is in the column's character set, as a comparison by its index needs it. What
// that set does not have would become a question mark, and must find nothing instead.
func (c userColumn) text(text string) string {
	literal := textLiteral(text)
	converted := fmt.Sprintf("CONVERT(%s USING %s)", literal, c.charset)
	if strings.ContainsFunc(text, func(r rune) bool { return r > unicode.MaxASCII }) && c.charset != "utf8mb4" {
		converted = fmt.Sprintf("IF(CONVERT(%s USING utf8mb4) = %s COLLATE utf8mb4_bin, %[1]s, NULL)", converted, literal)
	}
	return converted + " COLLATE " + c.collation
}

func (c userColumn) castType() string {
	switch c.dataType {
	case "DATETIME", "TIMESTAMP":
		return "DATETIME(6)"
	case "TIME":
		return "TIME(6)"
	}
	return c.dataType
}

// compare compares literals as the server compares the values; nil if only the
// server knows.
func (c userColumn) compare() func(a, b string) int {
	switch c.kind {
	case integerColumn:
		return compareWhole
	case bytesColumn:
		return cmp.Compare[string] // hexadecimal digits sort as the bytes do
	}
	return nil
}

// compareWhole compares whole numbers without leading zeros.
func compareWhole(a, b string) int {
	negative := strings.HasPrefix(a, "-")
	switch {
	case negative != strings.HasPrefix(b, "-"):
		if negative {
			return -1
		}
		return 1
	case negative:
		a, b = b[1:], a[1:]
	}
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}

func (c userColumn) value(text string) any {
	switch c.kind {
	case integerColumn:
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			return n
		}
		if n, err := strconv.ParseUint(text, 10, 64); err == nil {
			return n
		}
	case bytesColumn:
		return []byte(text)
	}
	return text
}

func textLiteral(text string) string { return "_utf8mb4 " + bytesLiteral(text) }

func bytesLiteral(text string) string { return fmt.Sprintf("X'%X'", text) }
