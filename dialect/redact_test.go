package dialect_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/dblock-go/dblock/dialect"
)

var (
	ofPostgres  = dialect.Syntax{Strings: `'`, Identifiers: `""`, Parameters: "$", NestedComments: true, DollarQuotes: true}
	ofMySQL     = dialect.Syntax{Strings: `'"`, Identifiers: "``", Parameters: "@$", HashComments: true, DollarQuotes: true}
	ofSQLServer = dialect.Syntax{Strings: `'"`, Identifiers: "[]", Parameters: "@", NestedComments: true, UnicodeSigns: true}
)

func TestRedact(t *testing.T) {
	for _, test := range []struct {
		syntax          dialect.Syntax
		statement, want string
	}{
		{ofPostgres, `SELECT *
			FROM  accounts WHERE id = 42 AND name = 'o''hara' AND x = $1`, `SELECT * FROM accounts WHERE id = ? AND name = ? AND x = $1`},
		{ofPostgres, `ALTER ROLE app PASSWORD 'hunter2'`, `ALTER ROLE app PASSWORD ?`},
		{ofPostgres, `SELECT "it's", t1.c2, 1.5e10, .5, 0xff`, `SELECT "it's", t1.c2, ?, ?, ?`},
		{ofPostgres, `SELECT E'a\' secret' || 'x'`, `SELECT E?…`},
		{ofPostgres, `DO $body$ secret $$ 'x' $body$ END`, `DO ? END`},
		{ofPostgres, `SELECT $$se'cret$$, a`, `SELECT ?, a`},
		{ofPostgres, `SELECT 1 -- don't
			, 'secret'`, `SELECT ? , ?`},
		{ofPostgres, `SELECT /* it's /* nested */ here */ 'secret'`, `SELECT ?`},
		{ofPostgres, `SELECT a # 'secret'`, `SELECT a # ?`},
		{ofPostgres, "SELECT 1 -- c\r'secret\n'", `SELECT ? …`},
		{ofPostgres, `SELECT 'cut off`, `SELECT ?`},
		{ofMySQL, `SELECT "double", 'single' # don't
			, 'secret'`, `SELECT ?, ? , ?`},
		{ofMySQL, "SELECT `it's`, 5--'3', x'AB' -- don't", "SELECT `it's`, ?--?, x?"},
		{ofMySQL, `SELECT /* /* */ 'secret' /*! STRAIGHT_JOIN */ a`, `SELECT ? a`},
		{ofMySQL, `SELECT /*! 'a*/b' */, 'secret'`, `SELECT …`},
		{ofMySQL, `SELECT /*+ SET_VAR(a = '*/') */ 'secret'`, `SELECT …`},
		{ofMySQL, `SELECT /*!99999 /* it's */ it's */ 'secret'`, `SELECT …`},
		{ofMySQL, "SELECT 1 --\x7f it's\n, 'secret'", `SELECT ? , ?`},
		{ofMySQL, `SELECT * FROM $a$ WHERE b = 'x$a$ y' AND c = 'secret'`, `SELECT * FROM ?…`},
		{ofPostgres, `SELECT a$$b$, c1, 'x$b$ secret'`, `SELECT a$$b$, c1, ?`},
		{ofPostgres, `SELECT $1$t$secret$t$, ä$t$, $t$secret$t$`, `SELECT $1?, ä$t$, ?`},
		{ofMySQL, `UPDATE t SET a = 'x\'secret', b = 'y'`, `UPDATE t SET a = ?…`},
		{ofSQLServer, `SELECT [it]]'s], N'secret' FROM #temp WHERE price = $100`, `SELECT [it]]'s], N? FROM #temp WHERE price = $?`},
		{ofSQLServer, `EXEC p @p1 = 'secret', @2 = 5`, `EXEC p @p1 = ?, @2 = ?`},
		{ofPostgres, `SELECT @4711, a@4711, $2`, `SELECT @?, a@?, $2`},
		{ofSQLServer, "SELECT\u00a04711,\u30004711", `SELECT ?, ?`},
		{ofPostgres, "SELECT a\u00a0$t$, 'x$t$ secret'", "SELECT a\u00a0$t$, ?"}, // a word here
		{ofPostgres, ``, ``},
		{ofPostgres, "SELECT \xff", `SELECT ?`},
	} {
		if got := test.syntax.Redact(test.statement); got != test.want {
			t.Errorf("%q gave\n     %q\nwant %q", test.statement, got, test.want)
		}
	}
}

func TestRedactShortens(t *testing.T) {
	got := ofPostgres.Redact("SELECT " + strings.Repeat("ä", 1000))
	if n := utf8.RuneCountInString(got); n != 201 || !strings.HasSuffix(got, "ä…") {
		t.Errorf("%d characters: %q", n, got)
	}
}

// Whatever else is in a literal, in a comment or in an identifier, a secret behind
// it is not shown.
func FuzzRedact(f *testing.F) {
	f.Add("it's")
	f.Add(`\`)
	f.Add("$$")
	f.Add("\r--")
	f.Add("/* #")
	f.Fuzz(func(t *testing.T, text string) {
		const secret = "hunter2"
		if strings.Contains(text, "*") || strings.Contains(text, "hunter") {
			return // it would end or nest the comment
		}
		line, _, _ := strings.Cut(text, "\n")
		for _, s := range []dialect.Syntax{ofPostgres, ofMySQL, ofSQLServer} {
			quoted := strings.ReplaceAll(text, "'", "''")
			name := s.Identifiers[:1] + strings.ReplaceAll(text, s.Identifiers[1:], s.Identifiers[1:]+s.Identifiers[1:]) + s.Identifiers[1:]
			for _, statement := range []string{
				"SELECT '" + quoted + secret + "'",
				"SELECT '" + quoted + "', '" + secret + "'",
				"SELECT /*" + text + "*/ '" + secret + "'",
				"SELECT -- " + line + "\n'" + secret + "'",
				"SELECT " + name + ", '" + secret + "'",
			} {
				got := s.Redact(statement)
				if strings.Contains(got, secret) {
					t.Errorf("%q gave %q", statement, got)
				}
				if !utf8.ValidString(got) || utf8.RuneCountInString(got) > 202 || !strings.HasPrefix(got, "SELECT") {
					t.Errorf("%q gave %q", statement, got)
				}
			}
		}
	})
}

// literals are the ways to write the secret, which is hunter2 or 4711, on each database.
// After those that depend on the server's settings nothing more must be shown.
var literals = map[*dialect.Syntax][]string{
	&ofPostgres: {`'hunter2'`, `'it''s hunter2'`, `''`, `'\\'`, `E'\\'hunter2'`, `E'\\\\' || 'hunter2'`, `U&'\0061hunter2' UESCAPE '!'`, `N'hunter2'`, `B'4711'`, `x'4711'`,
		`$$hunter2$$`, `$a$hunter2 $b$ ' $a$`, `$ä_1$hunter2$ä_1$`, `"a""b"`, `'{"a": "hunter2"}'`, `'a'
			'hunter2'`, `$1`, `'--' || 'hunter2'`, `'/*' || 'hunter2'`, `4711.5e-4711`, `.4711`, `4711_000`, `0x4711`, `@4711`, `-4711`, `4711::text`, `ARRAY[4711,'hunter2']`,
		`/* ' /* $$ */ " */ 'hunter2'`, "-- ' $$\n'hunter2'", `t$$.c`, `1$a$hunter2$a$`},
	&ofMySQL: {`'hunter2'`, `"hunter2"`, `'it''s hunter2'`, `"say ""hunter2"""`, `'\''`, `'\'hunter2'`, `"\"hunter2"`, `'\\'`, `_utf8'hunter2'`, `_utf8mb4"hunter2"`, `N'hunter2'`, `x'4711'`, `0x4711`, `b'4711'`,
		`4711e-4711`, `4711E+4711`, `.4711`, `-4711`, "`a``b`", "`'`", `@a`, `'a' 'hunter2'`, `IN (4711, 4711,'hunter2')`, `'{"a": "hunter2"}'`, `c->'$.hunter2'`, `{d'hunter2'}`,
		"# it's \"\n'hunter2'", "-- it's\n'hunter2'", `5--'hunter2'`, `/* ' " /* */ 'hunter2'`, `/*! 'hunter2' */`, `/*!50000 4711 */`, `/*+ SET_VAR(a='hunter2') */`, `"'" 'hunter2'`, `$a$hunter2$a$`, `DATE'4711-01-01'`},
	&ofSQLServer: {`'hunter2'`, `N'hunter2'`, `"hunter2"`, `'it''s hunter2'`, `'\'`, `0x4711`, `4711E-4711`, `$4711`, `€4711`, `-4711.4711`, `[it]]'s]`, `[']`, `@p1`, `#t`, `{ts 'hunter2'}`,
		`/* ' /* " */ [ */ 'hunter2'`, "-- it's [\n'hunter2'", `N'a' + N'hunter2'`, `'[' + 'hunter2'`, `'a\
hunter2'`},
}

// However literals, comments and identifiers follow each other, none is shown.
func FuzzRedactLiterals(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3})
	f.Add([]byte("hunter"))
	between := []string{" ", ", ", "\n", " || ", "(", ")", "/**/", "\t=\t", " AND a1 = ", ";"}
	f.Fuzz(func(t *testing.T, choice []byte) {
		for s, texts := range literals {
			statement := "SELECT"
			for i, c := range choice {
				if i%2 == 0 {
					statement += between[int(c)%len(between)]
				} else {
					statement += texts[int(c)%len(texts)]
				}
			}
			for length := range len(statement) + 1 { // servers cut long ones off
				if got := s.Redact(statement[:length]); strings.Contains(got, "unter") || strings.Contains(got, "47") || strings.Contains(got, "11") {
					t.Fatalf("%q gave %q", statement[:length], got)
				}
			}
		}
	})
}
