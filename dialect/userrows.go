package dialect

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// UserTable is a table of the application's own.
type UserTable struct {
	Schema string   // empty: the connection's default
	Name   string   //
	Key    []string // the columns of the primary key, or of another unique key
}

// String is the table for people to read.
func (t UserTable) String() string {
	if t.Schema == "" {
		return t.Name
	}
	return t.Schema + "." + t.Name
}

// Strength is what a lock of a row excludes.
type Strength uint8

const (
	// NoKeyUpdate excludes every other lock of the row, but lets the checks of
	// foreign keys pass where the database has such a lock. It is the default.
	NoKeyUpdate Strength = iota
	// Update excludes those checks too.
	Update
	// Share excludes all but other shared locks.
	Share
)

// UserRows is one call for rows of an application's table.
type UserRows struct {
	Table UserTable
	// Keys have one value for each column of the key: an int64, a float64, a bool, a
	// string, a []byte or a time.Time. They come in no order, and the same row may be
	// named twice, in other words perhaps: what is equal is for the column's type
	// and collation to say.
	Keys     [][]driver.Value
	Strength Strength
	Try      bool          // do not wait
	Wait     time.Duration // the most that all waits may take together; 0: no bound but the context's
}

// Label is a key for people to read, as in "id = 42".
func (r UserRows) Label(key int) string {
	parts := make([]string, len(r.Keys[key]))
	for i, value := range r.Keys[key] {
		parts[i] = r.Table.Key[i] + " = " + shown(value)
	}
	return strings.Join(parts, ", ")
}

func shown(value driver.Value) string {
	const longest = 100
	text := fmt.Sprint(value)
	switch v := value.(type) {
	case string:
		text = strconv.Quote(v)
	case []byte:
		text = fmt.Sprintf("0x%x", v)
	case time.Time:
		text = v.Format(time.RFC3339Nano)
	}
	if len(text) > longest {
		text = strings.ToValidUTF8(text[:longest], "") + "…"
	}
	return text
}

// Missing is the error for keys, by their places, that have no row.
func (r UserRows) Missing(remains Remains, keys ...int) error {
	const most = 5
	var labels []string
	for _, key := range keys[:min(len(keys), most)] {
		labels = append(labels, r.Label(key))
	}
	text := strings.Join(labels, "; ")
	if len(keys) > most {
		text += fmt.Sprintf(" and %d more", len(keys)-most)
	}
	return &Error{Class: NotFound, Err: fmt.Errorf("%s: %s", r.Table, text), Remains: remains}
}

// Misfit is the error for a value that the column of its place in the key cannot have.
func (r UserRows) Misfit(key, column int, why string) error {
	return &Error{Class: InvalidKey, Remains: RemainsUsable,
		Err: fmt.Errorf("%s: %s", r.Table, r.Label(key)), Hint: fmt.Sprintf("the column %s %s", r.Table.Key[column], why)}
}

// NoTable, NoColumn and NoUniqueKey are the errors for a table that is not as the
// call names it. They are found out before anything is locked.

func (t UserTable) NoTable() error {
	if schema, name, both := strings.Cut(t.Name, "."); both && t.Schema == "" {
		return t.mistaken("there is no table %q that this user may see; the schema has an option of its own: Schema: %q, Table: %q", t.Name, schema, name)
	}
	return t.mistaken("there is no table %s that this user may see", t)
}

func (t UserTable) NoColumn(name string) error {
	return t.mistaken("the table %s has no column %s", t, name)
}

func (t UserTable) NoUniqueKey() error {
	return t.mistaken("the table %s has no primary key, nor a unique one without NULL, of the columns (%s)", t, strings.Join(t.Key, ", "))
}

func (t UserTable) mistaken(format string, args ...any) error {
	return &Error{Class: InvalidOption, Remains: RemainsUsable, Hint: fmt.Sprintf(format, args...)}
}

// UserClaim is one call for rows of an application's table that nobody has locked.
type UserClaim struct {
	Table    UserTable
	Strength Strength // not Share
	Limit    int      // at least 1
	// Where is a condition in SQL of this database, empty for all rows, with the
	// placeholders of its driver for Args.
	Where   string
	Args    []any
	OrderBy []Order // empty: by the key
}

// Mistaken is the error for a statement that the server does not take because of what
// the caller wrote: everything else in it was looked up before. The code is the
// server's, and placeholders are those of the driver, for people to read.
func (c UserClaim) Mistaken(err error, code, placeholders string, remains Remains) error {
	e := &Error{Class: InvalidOption, Code: code, Err: err, Remains: remains,
		Hint: fmt.Sprintf("the server does not take ClaimOptions.Where, its Args or OrderBy: the columns are those of %s, and the placeholders %s, one for each of Args", c.Table, placeholders)}
	var cause *Error
	if errors.As(err, &cause) {
		e.Err = cause.Err
	}
	return e
}

// Order is a column to sort by.
type Order struct {
	Column     string
	Descending bool
}
