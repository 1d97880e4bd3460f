package dialect

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Syntax is what has to be known of a database's SQL to find the literals in it.
type Syntax struct {
	Strings        string // what quotes a literal, or might
	Identifiers    string // pairs of what opens and closes a quoted identifier
	Parameters     string // what begins the name of a parameter or a variable, which may be a number
	HashComments   bool   // # begins a comment, and -- does before a space only
	NestedComments bool   // /* /* */ */ is one
	DollarQuotes   bool   // $tag$…$tag$ is a literal
	UnicodeSigns   bool   // Unicode's spaces and currency signs are no part of a word
}

// redactedLength is how many characters of a statement are left.
const redactedLength = 200

// Redact shortens a statement to what people need to recognize it, in one line:
// strings and numbers become question marks, comments are dropped. Where it depends
// on the server's settings whether a literal has ended, after a backslash, the rest
// is dropped too.
func (s Syntax) Redact(statement string) string {
	r := redactor{Syntax: s, rest: statement}
	for r.rest != "" && r.length <= redactedLength {
		r.next()
	}
	text := strings.TrimSpace(strings.ToValidUTF8(r.out.String(), "?"))
	if r.length > redactedLength {
		runes := []rune(text)
		text = strings.TrimSpace(string(runes[:min(len(runes), redactedLength)])) + "…"
	}
	return text
}

type redactor struct {
	Syntax
	rest   string
	out    strings.Builder
	length int  // of out, in characters
	last   byte // of out
}

func (r *redactor) write(text string) {
	if text == "" || text == " " && r.last == ' ' {
		return
	}
	r.out.WriteString(text)
	r.length += utf8.RuneCountInString(text)
	r.last = text[len(text)-1]
}

// next consumes one piece of the statement.
func (r *redactor) next() {
	c := r.rest[0]
	switch {
	case r.space() > 0:
		r.take(r.space())
		r.write(" ")
	case strings.HasPrefix(r.rest, "--") && (!r.HashComments || len(r.rest) == 2 || r.rest[2] <= ' ' || r.rest[2] == 0x7f):
		r.lineComment()
	case c == '#' && r.HashComments:
		r.lineComment()
	case strings.HasPrefix(r.rest, "/*"):
		r.blockComment()
	case strings.IndexByte(r.Strings, c) >= 0:
		r.literal(c)
	case r.identifier():
	case c == '$' && r.DollarQuotes && r.dollarQuoted():
	case isDigit(c) || c == '.' && len(r.rest) > 1 && isDigit(r.rest[1]) && !isWord(r.last):
		r.number()
	case r.inWord(0):
		r.write(r.take(r.word('$')))
	default:
		_, n := utf8.DecodeRuneInString(r.rest)
		r.write(r.take(n))
	}
}

// space is the length of the white space that comes next.
func (r *redactor) space() int {
	if r.rest[0] < utf8.RuneSelf {
		if strings.IndexByte(" \t\r\n\f\v", r.rest[0]) >= 0 {
			return 1
		}
		return 0
	}
	if c, n := utf8.DecodeRuneInString(r.rest); r.UnicodeSigns && unicode.IsSpace(c) {
		return n
	}
	return 0
}

func (r *redactor) inWord(i int) bool {
	if r.rest[i] < utf8.RuneSelf || !r.UnicodeSigns {
		return isWord(r.rest[i])
	}
	c, _ := utf8.DecodeRuneInString(r.rest[i:])
	return !unicode.In(c, unicode.Sc, unicode.White_Space)
}

// word is the length of an identifier, a keyword or a number, which may have one more
// character in it.
func (r *redactor) word(more byte) int {
	n := 1
	for n < len(r.rest) && (r.inWord(n) || r.rest[n] == more) {
		n++
	}
	return n
}

func (r *redactor) take(n int) string {
	text := r.rest[:n]
	r.rest = r.rest[n:]
	return text
}

// until drops everything up to the end of text, or all where that is missing.
func (r *redactor) until(text string, from int) {
	end := strings.Index(r.rest[from:], text)
	if end < 0 {
		r.rest = ""
		return
	}
	r.rest = r.rest[from+end+len(text):]
}

func (r *redactor) lineComment() {
	line, _, _ := strings.Cut(r.rest, "\n")
	if strings.Contains(strings.TrimSuffix(line, "\r"), "\r") { // which ends it on some servers
		r.cut()
		return
	}
	r.until("\n", 0)
	r.write(" ")
}

func (r *redactor) blockComment() {
	r.write(" ")
	if !r.NestedComments {
		if r.isCode() {
			r.cut()
		} else {
			r.until("*/", 2)
		}
		return
	}
	depth := 0
	for r.rest != "" {
		switch {
		case strings.HasPrefix(r.rest, "/*"):
			depth++
			r.take(2)
		case strings.HasPrefix(r.rest, "*/"):
			r.take(2)
			if depth--; depth == 0 {
				return
			}
		default:
			r.take(1)
		}
	}
}

// isCode: MySQL and MariaDB read some comments as SQL, depending on their versions
// (https://dev.mysql.com/doc/refman/en/comments.html). What is quoted there may
// contain what looks like the end.
func (r *redactor) isCode() bool {
	comment, _, _ := strings.Cut(r.rest[2:], "*/")
	return comment != "" && strings.IndexByte("!M+", comment[0]) >= 0 &&
		(strings.ContainsAny(comment, "'\"`#") || strings.Contains(comment, "--") || strings.Contains(comment, "/*"))
}

func (r *redactor) cut() {
	r.write("…")
	r.rest = ""
}

// literal: a doubled quote stands for itself.
func (r *redactor) literal(quote byte) {
	r.write("?")
	for i := 1; i < len(r.rest); i++ {
		switch {
		case r.rest[i] != quote:
		case r.rest[i-1] == '\\':
			r.cut()
			return
		case i+1 < len(r.rest) && r.rest[i+1] == quote:
			i++
		default:
			r.take(i + 1)
			return
		}
	}
	r.rest = ""
}

func (r *redactor) identifier() bool {
	for i := 0; i+1 < len(r.Identifiers); i += 2 {
		if r.rest[0] != r.Identifiers[i] {
			continue
		}
		for n := 1; n < len(r.rest); n++ {
			switch {
			case r.rest[n] != r.Identifiers[i+1]:
			case n+1 < len(r.rest) && r.rest[n+1] == r.Identifiers[i+1]: // stands for itself
				n++
			default:
				r.write(r.take(n + 1))
				return true
			}
		}
		r.cut()
		return true
	}
	return false
}

func (r *redactor) dollarQuoted() bool {
	end := strings.IndexByte(r.rest[1:], '$')
	if end < 0 || isDigit(r.rest[1]) { // $1 is a parameter
		return false
	}
	tag := r.rest[:end+2]
	for _, c := range []byte(tag[1 : end+1]) {
		if !isWord(c) {
			return false
		}
	}
	r.write("?")
	if r.HashComments { // an identifier, but for the code of MySQL's functions
		r.cut()
	} else {
		r.until(tag, len(tag))
	}
	return true
}

// number leaves that of a parameter.
func (r *redactor) number() {
	text := r.take(r.word('.'))
	if strings.IndexByte(r.Parameters, r.last) >= 0 {
		r.write(text)
		return
	}
	r.write("?")
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func isWord(c byte) bool {
	return isDigit(c) || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_' || c >= utf8.RuneSelf
}
