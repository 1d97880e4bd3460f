package dblock

import (
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/dblock-go/dblock/dialect"
)

// The functions of this file are frozen: programs of other versions and in
// other languages compute the same values. hash_test.go holds golden vectors.

// MaxNameLen is the length of the longest server-side name, in bytes, which are
// characters too. It is the limit of MySQL, the narrowest of the databases.
const MaxNameLen = 64

const (
	hashLen     = 1 + 16 // "#" and a 64-bit number in hexadecimal
	scopeLen    = 15     // of the scope, so that it leaves room for the key
	readableLen = MaxNameLen - hashLen
)

// encode writes each part as a netstring (https://cr.yp.to/proto/netstrings.txt):
// its length in bytes, a colon, the bytes, a comma. So ("a", "bc") and ("ab", "c")
// differ.
func encode(parts []string) string {
	n := 0
	for _, p := range parts {
		n += len(p) + 22
	}
	b := make([]byte, 0, n)
	for _, p := range parts {
		b = strconv.AppendInt(b, int64(len(p)), 10)
		b = append(b, ':')
		b = append(b, p...)
		b = append(b, ',')
	}
	return string(b)
}

// decode is the inverse of encode for what encode wrote.
func decode(encoded string) []string {
	var parts []string
	for encoded != "" {
		digits, rest, _ := strings.Cut(encoded, ":")
		n, _ := strconv.Atoi(digits)
		parts = append(parts, rest[:n])
		encoded = rest[n+1:]
	}
	return parts
}

func hash(encoded string) int64 { return int64(xxhash.Sum64String(encoded)) }

// serverName is the name of a key where the server wants a name: a readable
// part, "#", and the hash of the encoding as 16 hexadecimal digits. The scope,
// if there is one, counts as one more part in front; the readable part has at
// most its first 15 bytes.
func serverName(scope string, parts []string) string {
	var b strings.Builder
	b.Grow(MaxNameLen)
	if scope != "" {
		writeReadable(&b, scope, scopeLen)
	}
	for i, p := range parts {
		if i > 0 || scope != "" {
			writeReadable(&b, "/", readableLen)
		}
		writeReadable(&b, p, readableLen)
	}
	if scope != "" {
		parts = append([]string{scope}, parts...)
	}
	digits := strconv.FormatUint(xxhash.Sum64String(encode(parts)), 16)
	b.WriteByte('#')
	b.WriteString("0000000000000000"[len(digits):])
	b.WriteString(digits)
	return b.String()
}

// writeReadable appends what the limit on the whole name's readable part leaves
// room for.
func writeReadable(b *strings.Builder, part string, limit int) {
	for i := 0; i < len(part) && b.Len() < limit; i++ {
		b.WriteByte(caseFree(part[i]))
	}
}

// caseFree maps a byte to an alphabet in which every server tells all names
// apart, whatever its rules for case, accents and spaces.
func caseFree(c byte) byte {
	switch {
	case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '.', c == '-', c == '_', c == '/':
		return c
	case 'A' <= c && c <= 'Z':
		return c + ('a' - 'A')
	}
	return '_'
}

// ResolveID is [Key.Resolve] without the name, for what is locked by id.
func (k Key) ResolveID() dialect.Key {
	return dialect.Key{ID: k.id, Label: k.label(), Mode: k.mode}
}

// Resolve computes what a database locks for the key; see [Key.Name] for the
// scope.
func (k Key) Resolve(scope string) dialect.Key {
	r := k.ResolveID()
	if k.raw {
		r.Name = strconv.FormatInt(k.id, 10)
	} else {
		r.Name = serverName(scope, decode(k.encoded))
	}
	return r
}
