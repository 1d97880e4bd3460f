package sqlserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/dblock-go/dblock/dialect"
)

// LockUserRows locks the rows one by one, each by a statement of its own, in the order
// in which the server sorts their keys once they are values of the columns' types.
// HOLDLOCK on a key without a row locks its place. It needs one round trip, and the
// first call for a table looks at it on another connection.
//
// What [DB.LockRows] says of errors is true here too.
// https://learn.microsoft.com/sql/t-sql/queries/hints-transact-sql-table
func (d *DB) LockUserRows(ctx context.Context, tx dialect.Tx, r dialect.UserRows) error {
	if dialect.IsNil(tx) {
		return errNilTx
	}
	t, err := d.userTable(ctx, r.Table)
	if err != nil {
		return err
	}
	if most := mostParameters / len(t.columns); len(r.Keys) > most {
		return &dialect.Error{Class: dialect.InvalidKey, Remains: dialect.RemainsUsable,
			Hint: fmt.Sprintf("%d keys of %d columns in one call, at most %d: lock something coarser", len(r.Keys), len(t.columns), most)}
	}
	var transactions int32
	var missing string
	args := []any{out("transactions", &transactions), out("missing", &missing)}
	for i, key := range r.Keys {
		for n, value := range key {
			args = append(args, sql.Named(parameter(i, n), value))
		}
	}
	_, err = tx.ExecContext(ctx, t.lock(r), args...)
	switch {
	case err != nil:
		return userRowsFailure(ctx, tx, r, err)
	case transactions == 0:
		return notInTransaction()
	case missing == "":
		return nil
	}
	places, err := parseInts(missing)
	if err != nil {
		return err
	}
	slices.Sort(places)
	var keys []int
	for _, place := range slices.Compact(places) {
		keys = append(keys, int(place))
	}
	return r.Missing(dialect.RemainsUsable, keys...)
}

func userRowsFailure(ctx context.Context, tx dialect.Tx, r dialect.UserRows, cause error) error {
	err := classify(ctx, cause)
	switch {
	case r.Try && hasNumber(cause, errLockTimeout):
		err = notAcquired(cause)
	case slices.ContainsFunc(numbers(cause), func(n int32) bool { return misfits[n] }):
		return &dialect.Error{Class: dialect.InvalidKey, Err: cause, Remains: remains(ctx, tx),
			Hint: "a value does not fit its column: " + r.Label(0)}
	}
	var e *dialect.Error
	if errors.As(err, &e) && e.Remains == dialect.RemainsUsable {
		e.Remains = remains(ctx, tx)
	}
	return err
}

// misfits are errors of a value that cannot be converted to its column's type.
var misfits = map[int32]bool{241: true, 242: true, 245: true, 248: true, 2628: true, 8114: true, 8115: true, 8152: true, 8169: true}

// mostParameters of a call: https://learn.microsoft.com/sql/sql-server/maximum-capacity-specifications-for-sql-server
const mostParameters = 2000

func parameter(key, column int) string { return fmt.Sprintf("k%d_%d", key, column) }

// ClaimUserRows reads candidates without locking, and locks them one by one by their
// key, where the condition is asked again: a statement that sorts would lock all that
// it sorts. READPAST needs READ COMMITTED or REPEATABLE READ.
// https://learn.microsoft.com/sql/t-sql/queries/hints-transact-sql-table#readpast
func (d *DB) ClaimUserRows(ctx context.Context, tx dialect.Tx, c dialect.UserClaim) ([][]any, error) {
	if dialect.IsNil(tx) {
		return nil, errNilTx
	}
	q, ok := tx.(dialect.Querier)
	if !ok {
		return nil, &dialect.Error{Class: dialect.Unsupported, Hint: fmt.Sprintf("%T has no QueryContext: pass a *sql.Tx", tx)}
	}
	t, err := d.userTable(ctx, c.Table)
	if err != nil {
		return nil, err
	}
	keys, open, err := t.readClaim(ctx, q, c)
	switch {
	case hasNumber(err, errReadPast):
		return nil, &dialect.Error{Class: dialect.Unsupported, Code: "650", Err: err, Remains: remains(ctx, tx),
			Hint: "claim in a transaction under READ COMMITTED or REPEATABLE READ"}
	case err != nil:
		for _, n := range numbers(err) {
			if slices.Contains(mistakes, n) {
				return nil, c.Mistaken(classify(ctx, err), strconv.Itoa(int(n)), "@p1, @p2 and so on", remains(ctx, tx))
			}
		}
		err = classify(ctx, err)
		var e *dialect.Error
		if errors.As(err, &e) && e.Remains == dialect.RemainsUsable {
			e.Remains = remains(ctx, tx)
		}
		return nil, err
	case !open:
		return nil, notInTransaction()
	}
	return keys, nil
}

// mistakes are the numbers of what the server cannot read: incorrect syntax, an undeclared
// variable, a name that is no function, a column that does not exist, one that cannot be
// bound.
var mistakes = []int32{102, 137, 156, 195, 207, 4104}

// errReadPast: you can only specify READPAST under READ COMMITTED or REPEATABLE READ.
const errReadPast = 650

// readClaim reads to the end, so that the driver need not interrupt the server.
func (t *userTable) readClaim(ctx context.Context, q dialect.Querier, c dialect.UserClaim) (keys [][]any, open bool, err error) {
	var transactions int32 // known when all rows were read
	rows, err := q.QueryContext(ctx, t.claim(c), append(slices.Clone(c.Args), out("transactions", &transactions))...)
	if err != nil {
		return nil, false, err
	}
	defer func() {
		if failure := rows.Close(); err == nil {
			err = failure
		}
	}()
	for rows.Next() {
		key := make([]any, len(t.columns))
		dest := make([]any, len(key))
		for n := range key {
			dest[n] = &key[n]
		}
		if err := rows.Scan(dest...); err != nil {
			return nil, false, err
		}
		keys = append(keys, key)
	}
	return keys, transactions > 0, rows.Err()
}

// userTable is a table of an application as the catalogue has it.
type userTable struct {
	name    string // quoted
	columns []userColumn
}

// userColumn is a column of a key.
type userColumn struct {
	name       string // quoted
	kind       string // the name of its type
	definition string // its type, with the collation
	nullable   bool
}

// each joins text for every column of the key, in which {c} is the column and {n} its
// number.
func (t *userTable) each(text, separator string) string {
	parts := make([]string, len(t.columns))
	for n, column := range t.columns {
		parts[n] = strings.NewReplacer("{c}", column.name, "{n}", fmt.Sprint(n), "{type}", column.variable(), "{column}", column.definition).Replace(text)
	}
	return strings.Join(parts, separator)
}

// variable is the type without its collation, which variables do not have.
func (c userColumn) variable() string {
	kind, _, _ := strings.Cut(c.definition, " COLLATE ")
	return kind
}

const lockUserRowsText = `
SET NOCOUNT ON;
SELECT @transactions = @@TRANCOUNT, @missing = '';
IF @transactions = 0 RETURN;
DECLARE @keys TABLE (place int, {keys});
INSERT INTO @keys VALUES {values};
DECLARE @i int = 1, @place int, @found int, @error int, {variables};
{began}WHILE @i <= {count}
BEGIN
	SELECT @found = 0, @place = place, {next}
	FROM (SELECT *, ROW_NUMBER() OVER (ORDER BY {order}, place) AS turn FROM @keys) AS sorted WHERE turn = @i;
	{lock}
	SET @error = @@ERROR;
	IF @error <> 0 RETURN;
	IF @found = 0 SET @missing += CONVERT(nvarchar(11), @place) + ',';
	SET @i += 1;
END;
`

// lock is the batch. LOCK_TIMEOUT begins anew with each lock and takes no variable, so
// a limited wait is a statement that is made for what is left of the time; the
// setting ends with it.
// https://learn.microsoft.com/sql/t-sql/statements/set-lock-timeout-transact-sql
func (t *userTable) lock(r dialect.UserRows) string {
	hints := "UPDLOCK, HOLDLOCK, ROWLOCK"
	if r.Strength == dialect.Share {
		hints = "HOLDLOCK, ROWLOCK"
	}
	if r.Try {
		hints += ", NOWAIT"
	}
	values := make([]string, len(r.Keys))
	for i := range r.Keys {
		parameters := make([]string, len(t.columns))
		for n := range t.columns {
			parameters[n] = "@" + parameter(i, n)
		}
		values[i] = fmt.Sprintf("(%d, %s)", i, strings.Join(parameters, ", "))
	}
	lock := "SELECT @found = 1 FROM " + t.name + " WITH (" + hints + ") WHERE " + t.each("{c} = @v{n}", " AND ") + ";"
	began := ""
	if r.Wait > 0 {
		milliseconds := max(1, min(r.Wait.Milliseconds(), 1<<31-1))
		began = "DECLARE @began datetime2 = SYSUTCDATETIME(), @left bigint, @limited nvarchar(max);\n"
		lock = fmt.Sprintf(`SET @left = %d - DATEDIFF_BIG(millisecond, @began, SYSUTCDATETIME());
	IF @left < 1 SET @left = 1;
	SET @limited = N'SET LOCK_TIMEOUT ' + CONVERT(nvarchar(20), @left) + N'; %s';
	EXEC sp_executesql @limited, N'@found int OUTPUT, %s', @found OUTPUT, %s;`,
			milliseconds, strings.ReplaceAll(lock, "'", "''"), strings.ReplaceAll(t.each("@v{n} {type}", ", "), "'", "''"), t.each("@v{n}", ", "))
	}
	return strings.NewReplacer(
		"{keys}", t.each("k{n} {column}", ", "),
		"{values}", strings.Join(values, ", "),
		"{variables}", t.each("@v{n} {type}", ", "),
		"{began}", began,
		"{count}", fmt.Sprint(len(r.Keys)),
		"{next}", t.each("@v{n} = k{n}", ", "),
		"{order}", t.each("k{n}", ", "),
		"{lock}", lock,
	).Replace(lockUserRowsText)
}

const claimUserRowsText = `
SET NOCOUNT ON;
SET @transactions = @@TRANCOUNT;
IF @transactions = 0 RETURN;
DECLARE @claimed TABLE (turn int IDENTITY PRIMARY KEY, {keys});
DECLARE @left int = {limit}, @got int, @error int, {variables};
DECLARE candidates CURSOR LOCAL FAST_FORWARD FOR
	SELECT {columns} FROM {table} WITH (NOLOCK) WHERE {where} ORDER BY {order};
OPEN candidates;
FETCH NEXT FROM candidates INTO {into};
WHILE @@FETCH_STATUS = 0 AND @left > 0
BEGIN
	INSERT INTO @claimed SELECT {columns} FROM {table} WITH (UPDLOCK, ROWLOCK, READPAST)
	WHERE {key} AND {where} AND NOT EXISTS (SELECT 1 FROM @claimed WHERE {same});
	SELECT @got = @@ROWCOUNT, @error = @@ERROR;
	IF @error <> 0 RETURN;
	SET @left -= @got;
	FETCH NEXT FROM candidates INTO {into};
END;
CLOSE candidates;
DEALLOCATE candidates;
SELECT {texts} FROM @claimed ORDER BY turn;
`

func (t *userTable) claim(c dialect.UserClaim) string {
	where := "1 = 1"
	if c.Where != "" {
		where = "(" + c.Where + "\n)" // which may end with a comment
	}
	order := t.each("{c}", ", ")
	if len(c.OrderBy) > 0 {
		by := make([]string, len(c.OrderBy))
		for i, o := range c.OrderBy {
			by[i] = quote(o.Column)
			if o.Descending {
				by[i] += " DESC"
			}
		}
		order = strings.Join(by, ", ")
	}
	texts := make([]string, len(t.columns))
	for n, column := range t.columns {
		texts[n] = fmt.Sprintf(column.text(), fmt.Sprintf("k%d", n))
	}
	return strings.NewReplacer(
		"{keys}", t.each("k{n} {column}", ", "),
		"{limit}", fmt.Sprint(c.Limit),
		"{variables}", t.each("@v{n} {type}", ", "),
		"{columns}", t.each("{c}", ", "),
		"{table}", t.name,
		"{where}", where,
		"{order}", order,
		"{into}", t.each("@v{n}", ", "),
		"{key}", t.each("{c} = @v{n}", " AND "),
		"{same}", t.each("k{n} = @v{n}", " AND "),
		"{texts}", strings.Join(texts, ", "),
	).Replace(claimUserRowsText)
}

// text is how a column is returned.
func (c userColumn) text() string {
	switch c.kind {
	case "tinyint", "smallint", "int", "bigint":
		return "CONVERT(bigint, %s)"
	case "binary", "varbinary":
		return "%s"
	case "date", "datetime", "datetime2", "smalldatetime", "datetimeoffset", "time":
		return "CONVERT(nvarchar(64), %s, 121)" // ODBC canonical: https://learn.microsoft.com/sql/t-sql/functions/cast-and-convert-transact-sql
	}
	return "CONVERT(nvarchar(max), %s)"
}

// userTables remembers the tables that were found to be as their callers say.
type userTables struct{ known sync.Map } // *userTable by the table's name and key

func (d *DB) userTable(ctx context.Context, table dialect.UserTable) (*userTable, error) {
	id := strings.Join(append([]string{table.Schema, table.Name}, table.Key...), "\x00")
	if known, ok := d.userTables.known.Load(id); ok {
		return known.(*userTable), nil
	}
	t, err := d.describe(ctx, table)
	if err != nil {
		err = classify(ctx, err)
		var e *dialect.Error
		if errors.As(err, &e) {
			e.Remains = dialect.RemainsUsable // the caller's transaction was not used
		}
		return nil, err
	}
	d.userTables.known.Store(id, t)
	return t, nil
}

// The catalogue: https://learn.microsoft.com/sql/relational-databases/system-catalog-views/sys-columns-transact-sql
const (
	keyColumnsQuery = `SELECT c.name, t.name, CONVERT(int, c.max_length), CONVERT(int, c.precision), CONVERT(int, c.scale), ISNULL(c.collation_name, ''), c.is_nullable
FROM sys.columns AS c JOIN sys.types AS t ON t.user_type_id = c.system_type_id
WHERE c.object_id = OBJECT_ID(@table, 'U');`
	uniqueKeysQuery = `SELECT CONVERT(int, i.index_id), c.name
FROM sys.indexes AS i
JOIN sys.index_columns AS ic ON ic.object_id = i.object_id AND ic.index_id = i.index_id AND ic.is_included_column = 0
JOIN sys.columns AS c ON c.object_id = ic.object_id AND c.column_id = ic.column_id
WHERE i.object_id = OBJECT_ID(@table, 'U') AND i.is_unique = 1 AND i.has_filter = 0 AND i.is_disabled = 0;`
)

func (d *DB) describe(ctx context.Context, table dialect.UserTable) (*userTable, error) {
	t := &userTable{name: tableName(dialect.Table{Schema: table.Schema, Name: table.Name})}
	found := map[string]userColumn{}
	err := d.read(ctx, keyColumnsQuery, t.name, func(scan func(...any) error) error {
		var name, kind, collation string
		var length, precision, scale int
		var nullable bool
		if err := scan(&name, &kind, &length, &precision, &scale, &collation, &nullable); err != nil {
			return err
		}
		found[strings.ToLower(name)] = userColumn{quote(name), kind, definition(kind, length, precision, scale, collation), nullable}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, table.NoTable()
	}
	for _, name := range table.Key {
		column, ok := found[strings.ToLower(name)]
		if !ok {
			return nil, table.NoColumn(name)
		}
		if column.nullable {
			return nil, table.NoUniqueKey()
		}
		t.columns = append(t.columns, column)
	}
	unique := map[int][]string{}
	err = d.read(ctx, uniqueKeysQuery, t.name, func(scan func(...any) error) error {
		var index int
		var name string
		if err := scan(&index, &name); err != nil {
			return err
		}
		unique[index] = append(unique[index], strings.ToLower(name))
		return nil
	})
	if err != nil {
		return nil, err
	}
	key := make([]string, len(table.Key))
	for i, name := range table.Key {
		key[i] = strings.ToLower(name)
	}
	slices.Sort(key)
	for _, columns := range unique {
		slices.Sort(columns)
		if slices.Equal(columns, key) {
			return t, nil
		}
	}
	return nil, table.NoUniqueKey()
}

func (d *DB) read(ctx context.Context, query, table string, row func(scan func(...any) error) error) error {
	rows, err := d.db.QueryContext(ctx, query, sql.Named("table", table))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// definition is a column's type as it is declared.
func definition(kind string, length, precision, scale int, collation string) string {
	switch kind {
	case "nchar", "nvarchar":
		length /= 2
		fallthrough
	case "char", "varchar", "binary", "varbinary":
		kind = fmt.Sprintf("%s(%d)", kind, length)
	case "decimal", "numeric":
		kind = fmt.Sprintf("%s(%d, %d)", kind, precision, scale)
	case "datetime2", "datetimeoffset", "time":
		kind = fmt.Sprintf("%s(%d)", kind, scale)
	}
	if collation != "" {
		kind += " COLLATE " + collation
	}
	return kind
}
