package dblock_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
)

// The golden vectors freeze the algorithm: a change to any of them would let two
// versions of a program hold one key at the same time.
var golden = []struct {
	what    string
	parts   []string
	id      int64
	name    string // without a scope, as on SQL Server
	inShop  string // in the scope "Shop", as on MySQL and MariaDB
	readsAs string
}{
	{"one part", []string{"orders"}, 3159355595250078158, "orders#2bd8492cc60611ce", "shop/orders#63a9c0fd2f367e53", "orders"},
	{"two parts", []string{"account", "42"}, -9025438081853769558, "account/42#82bf33e224d2b8aa", "shop/account/42#56c226c674141f58", "account/42"},
	{"parts never merge", []string{"a", "bc"}, 836168875130887437, "a/bc#0b9aab29666a1d0d", "shop/a/bc#b01b8a8ee2f03738", "a/bc"},
	{"parts never merge, the other way", []string{"ab", "c"}, -5242055901198723363, "ab/c#b74079ee744f56dd", "shop/ab/c#fff82288985ca5f3", "ab/c"},
	{"a slash is not a border of parts", []string{"a/bc"}, -5936490745805539983, "a/bc#ad9d591e9bddf571", "shop/a/bc#3f7528a47fbe4636", "\"a/bc\""},
	{"a netstring inside a part", []string{"1:a,1:b,"}, -8953857569990320566, "1_a_1_b_#83bd81facb48de4a", "shop/1_a_1_b_#6e1f14bf74b106b2", "1:a,1:b,"},
	{"case counts", []string{"Orders"}, -3120754189873303517, "orders#d4b0da99494a3023", "shop/orders#6d9dd743efc02e24", "Orders"},
	{"an empty part at the end", []string{"a", ""}, 7366123532751529943, "a/#6639ba535d4ce7d7", "shop/a/#dfb0b19848b5c6cc", "a/\"\""},
	{"an empty part in front", []string{"", "a"}, -3375908334229057274, "/a#d1265d419fff1106", "shop//a#758c72e1bbe4a654", "\"\"/a"},
	{"NUL", []string{"a\x00b"}, 481848521687078691, "a_b#06afdead72b49723", "shop/a_b#d496bdbf30d8e277", "\"a\\x00b\""},
	{"emoji", []string{"🔒"}, 8589699332018456123, "____#7734be08445ec63b", "shop/____#35444928ca4c3f08", "🔒"},
	{"accents", []string{"é"}, 3216647485894395338, "__#2ca3d3d88c6385ca", "shop/__#cae0d962ebff27f8", "é"},
	{"300 characters", []string{strings.Repeat("x", 300)}, -5939319592905916121, "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx#ad934c4c51534127", "shop/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx#4692c8029814279e", strings.Repeat("x", 300)},
	{"64 multi-byte characters", []string{strings.Repeat("ü", 64)}, -7414027600650982960, "_______________________________________________#991c152dac41a9d0", "shop/__________________________________________#34d945c6ab985431", strings.Repeat("ü", 64)},
	{"invalid UTF-8", []string{"\xff"}, 7127197758942296346, "_#62e8e499a9b7391a", "shop/_#67e32fd69df10e4e", "\"\\xff\""},
	{"id 0", []string{"hash-d\x9d\xb6\xe8\x90\xff\xd0\x8b"}, 0, "hash-d_______#0000000000000000", "shop/hash-d_______#d81e9a40a06d184c", "\"hash-d\\x9d\\xb6\\xe8\\x90\\xffЋ\""},
	{"id -1", []string{"hash-\xbb\xc7k\x04\x11\x9a\x95\xe7"}, -1, "hash-__k_____#ffffffffffffffff", "shop/hash-__k_____#179b821fb45ae28a", "\"hash-\\xbb\\xc7k\\x04\\x11\\x9a\\x95\\xe7\""},
	{"the smallest id, top bit set alone", []string{"hash-\x9dTe\x07\x03\"w["}, math.MinInt64, "hash-_te___w_#8000000000000000", "shop/hash-_te___w_#75a5c18a9311455c", "\"hash-\\x9dTe\\a\\x03\\\"w[\""},
	{"the largest id", []string{"hash-S\xb4\x95)90\xeaq"}, math.MaxInt64, "hash-s___90_q#7fffffffffffffff", "shop/hash-s___90_q#d7d36aedf2705f0e", "\"hash-S\\xb4\\x95)90\\xeaq\""},
}

func TestGoldenVectors(t *testing.T) {
	for _, g := range golden {
		t.Run(g.what, func(t *testing.T) {
			k := dblock.NewKey(g.parts...)
			if k.ID() != g.id {
				t.Errorf("id %d, want %d", k.ID(), g.id)
			}
			if got := k.Name(""); got != g.name {
				t.Errorf("name %q, want %q", got, g.name)
			}
			if got := k.Name("Shop"); got != g.inShop {
				t.Errorf("name in the scope Shop %q, want %q", got, g.inShop)
			}
			if got := k.String(); got != g.readsAs {
				t.Errorf("reads %q, want %q", got, g.readsAs)
			}
		})
	}
}

func TestRawKeyIsItsNumberEverywhere(t *testing.T) {
	for id, name := range map[int64]string{
		0: "0", -1: "-1", 4097083626: "4097083626",
		math.MinInt64: "-9223372036854775808", math.MaxInt64: "9223372036854775807",
	} {
		k := dblock.RawKey(id)
		if k.ID() != id || k.Name("") != name || k.Name("Shop") != name || k.String() != name || !k.Valid() {
			t.Errorf("RawKey(%d): id %d, name %q, in a scope %q, reads %q, valid %v",
				id, k.ID(), k.Name(""), k.Name("Shop"), k, k.Valid())
		}
	}
}

func TestAKeyWithoutAByteIsInvalid(t *testing.T) {
	for _, k := range []dblock.Key{{}, dblock.NewKey(), dblock.NewKey(""), dblock.NewKey("", "")} {
		if k.Valid() || k.Shared().Valid() {
			t.Errorf("%#v is valid", k)
		}
	}
}

func TestSharedIsTheSameKeyInAnotherMode(t *testing.T) {
	k := dblock.NewKey("a")
	s := k.Shared()
	if s.ID() != k.ID() || s.Mode() != dblock.Shared || k.Mode() != dblock.Exclusive {
		t.Errorf("shared: id %d mode %v; exclusive: id %d mode %v", s.ID(), s.Mode(), k.ID(), k.Mode())
	}
}

// FuzzNames holds what every server needs: any two keys have distinct encodings,
// and any name fits the narrowest limit and the alphabet without case.
func FuzzNames(f *testing.F) {
	f.Add("account", "42", "Shop")
	f.Add("", "\x00", "")
	f.Add("3:a,", "🔒", strings.Repeat("d", 64))
	f.Fuzz(func(t *testing.T, a, b, scope string) {
		k := dblock.NewKey(a, b)
		if !k.Valid() {
			if a != "" || b != "" {
				t.Fatalf("(%q, %q) is invalid", a, b)
			}
			return
		}
		name := k.Name(scope)
		if len(name) > dblock.MaxNameLen || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789._-/#") != "" {
			t.Errorf("(%q, %q) in %q: name %q", a, b, scope, name)
		}
		if merged := dblock.NewKey(a + b); merged == k {
			t.Errorf("(%q, %q) equals (%q)", a, b, a+b)
		}
		if swapped := dblock.NewKey(b, a); a != b && swapped == k {
			t.Errorf("(%q, %q) equals its reverse", a, b)
		}
		if scope != "" {
			asPart := dblock.NewKey(scope, a, b).Name("")
			if name[len(name)-16:] != asPart[len(asPart)-16:] {
				t.Errorf("%q: the hash is not that of the scope as one more part, %q", name, asPart)
			}
		}
	})
}

func TestPartsAreThoseOfNewKey(t *testing.T) {
	for _, parts := range [][]string{{"account", "42"}, {"a/b", ""}, {"\x00:,"}} {
		if got := dblock.NewKey(parts...).Shared().Parts(); !slices.Equal(got, parts) {
			t.Errorf("%q, want %q", got, parts)
		}
	}
	if got := dblock.RawKey(1).Parts(); got != nil {
		t.Errorf("a raw key has parts %q", got)
	}
}

func TestGoldenDigests(t *testing.T) {
	for _, g := range []struct {
		key  dblock.Key
		id   int64
		name string
	}{
		{dblock.NewKey("account", "42"), -4748130695333464653, "account/42#vhtASg2FNbPKgzqC_VgpzVr6CFKa3a-ScsRDRvSnTHU"},
		{dblock.NewKey("a", "bc"), -3355402010311887090, "a/bc#0W83pji6dw7_Xl2hbkLHL0TcRP1Nou7_ppiHftH9mGw"},
		{dblock.NewKey("Message With A Long Name", "🔒"), 7533739184941393617, "message_with_a_long_#aI0334zfZtEt-GhDdUL04h4TVOpWc2G9qC0hzgOjKtY"},
		{dblock.RawKey(-7), -6381368507315139091, "-7#p3DTJwydze3xLtn9cERPfIqVwmyuPK6b2GdJkJCi8Us"},
	} {
		if r := g.key.ResolveDigest(); r.ID != g.id || r.Name != g.name || len(r.Name) > dblock.MaxNameLen {
			t.Errorf("%s: id %d, name %q; want %d, %q", g.key, r.ID, r.Name, g.id, g.name)
		}
	}
}
