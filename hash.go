package dblock

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"iter"
	"strconv"

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

	digestLen         = 1 + 43 // "#" and 256 bits in base64
	digestReadableLen = MaxNameLen - digestLen
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

// parts are those of which encode wrote the encoding.
func parts(encoded string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for encoded != "" {
			n, i := 0, 0
			for ; encoded[i] != ':'; i++ {
				n = n*10 + int(encoded[i]-'0')
			}
			part, rest := encoded[i+1:i+1+n], encoded[i+1+n+1:]
			if !yield(part) {
				return
			}
			encoded = rest
		}
	}
}

func hash(encoded string) int64 { return int64(xxhash.Sum64String(encoded)) }

// serverName is the name of a key where the server wants a name: a readable
// part, "#", and the hash of the encoding as 16 hexadecimal digits. The scope,
// if there is one, counts as one more part in front; the readable part has at
// most its first 15 bytes.
func serverName(scope, encoded string) string {
	name := make([]byte, 0, MaxNameLen)
	digest := xxhash.New()
	if scope != "" {
		name = appendReadable(name, scope, scopeLen)
		_, _ = digest.WriteString(encode([]string{scope})) // cannot fail
	}
	first := scope == ""
	for part := range parts(encoded) {
		if !first {
			name = appendReadable(name, "/", readableLen)
		}
		name = appendReadable(name, part, readableLen)
		first = false
	}
	_, _ = digest.WriteString(encoded)
	const digits = "0123456789abcdef"
	name = append(name, '#')
	sum := digest.Sum64()
	for shift := 60; shift >= 0; shift -= 4 {
		name = append(name, digits[sum>>shift&0xf])
	}
	return string(name)
}

// appendReadable appends what the limit on the whole name's readable part leaves
// room for.
func appendReadable(name []byte, part string, limit int) []byte {
	for i := 0; i < len(part) && len(name) < limit; i++ {
		name = append(name, caseFree(part[i]))
	}
	return name
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
		r.Name = serverName(scope, k.encoded)
	}
	return r
}

// ResolveDigest is what rowlock.Once keeps of the key, as a row of a lock table: the id
// is the first 8 bytes of the SHA-256 of its encoding, big-endian, and the name a
// readable part of at most 20 bytes, "#", and the whole digest in base64url. What is
// locked by mistake costs a wait, but what is taken for done by mistake is lost, so
// that no sender must be able to choose ids that collide. The encoding of a raw key
// is its decimal digits.
func (k Key) ResolveDigest() dialect.Key {
	r := k.Resolve("")
	readable, encoded := "", k.encoded
	if k.raw {
		encoded = r.Name
		readable = r.Name
	} else {
		readable = r.Name[:len(r.Name)-hashLen]
	}
	digest := sha256.Sum256([]byte(encoded))
	r.ID = int64(binary.BigEndian.Uint64(digest[:]))
	r.Name = readable[:min(len(readable), digestReadableLen)] + "#" + base64.RawURLEncoding.EncodeToString(digest[:])
	return r
}
