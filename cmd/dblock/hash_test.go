package main

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
)

func TestKeysAreReadAsTheirParts(t *testing.T) {
	for text, want := range map[string]dblock.Key{
		"account":     dblock.NewKey("account"),
		"account/42":  dblock.NewKey("account", "42"),
		"/var/lock":   dblock.NewKey("", "var", "lock"),
		"a//b":        dblock.NewKey("a", "", "b"),
		"a/":          dblock.NewKey("a", ""),
		"a,b c":       dblock.NewKey("a,b c"),
		"raw:4097":    dblock.RawKey(4097),
		"raw:-1":      dblock.RawKey(-1),
		"RAW:1":       dblock.NewKey("RAW:1"),
		"4097":        dblock.NewKey("4097"),
		"schlüssel/🔑": dblock.NewKey("schlüssel", "🔑"),
	} {
		var k keyArg
		if err := k.UnmarshalText([]byte(text)); err != nil || k.Key != want {
			t.Errorf("%q: %v, %v; want %v", text, k.Key, err, want)
		}
	}
	for _, text := range []string{"", "/", "//", "raw:", "raw:x", "raw:9223372036854775808"} {
		var k keyArg
		if err := k.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q: read as %v", text, k.Key)
		}
	}
}

func TestHash(t *testing.T) {
	key := dblock.NewKey("account", "42")
	want := []hashed{
		{
			Key: "account/42", ID: -9025438081853769558, Hex: "82bf33e224d2b8aa",
			ClassID: 0x82bf33e2, ObjID: 0x24d2b8aa,
			MySQL: key.Name("shop"), SQLServer: key.Name(""),
		},
		{
			Key: "-1", ID: -1, Hex: "ffffffffffffffff",
			ClassID: 0xffffffff, ObjID: 0xffffffff, MySQL: "-1", SQLServer: "-1",
		},
	}
	var got []hashed
	term := run(t, nil, 0, "hash", "--json", "--database", "shop", "account/42", "raw:-1")
	if err := json.Unmarshal([]byte(term.out.String()), &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %+v; want %+v", err, got, want)
	}

	for args, want := range map[string]string{
		"--dsn mysql://me:secret@host/shop":             key.Name("shop"),
		"--dsn mariadb://host/Shop?tls=true":            key.Name("Shop"),
		"--dsn mysql://host/other --database shop":      key.Name("shop"),
		"--dsn mysql://host":                            "",
		"--dsn postgres://host/shop":                    "",
		"--dsn sqlserver://host/instance?database=shop": "",
	} {
		term := run(t, nil, 0, append([]string{"hash", "--json", "account/42"}, strings.Fields(args)...)...)
		var got []hashed
		if err := json.Unmarshal([]byte(term.out.String()), &got); err != nil || got[0].MySQL != want {
			t.Errorf("%s: %v, %+v; want %q", args, err, got, want)
		}
	}

	term = run(t, nil, 0, "hash", "account/42")
	for _, part := range []string{"pg_advisory_lock(-9025438081853769558)", "give --database", key.Name("")} {
		if !strings.Contains(term.out.String(), part) {
			t.Errorf("without %q:\n%s", part, &term.out)
		}
	}
}
