package mysql

import (
	"cmp"
	"context"
	"database/sql/driver"
	"fmt"
	"math/big"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"

	"github.com/dblock-go/dblock/dialect"
)

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
