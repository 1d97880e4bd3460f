package sqlserver

import (
	"database/sql/driver"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

func TestShownName(t *testing.T) {
	for description, want := range map[string]string{
		"0:[a#0000000000000007]:(1a2b3c4d)": "a#0000000000000007",
		"0:a#0000000000000007:(1a2b3c4d)":   "a#0000000000000007",
		"5:[x:y]:(00000000)":                "x:y",
		"":                                  "",
	} {
		if got := shownName(description); got != want {
			t.Errorf("%q gave %q, want %q", description, got, want)
		}
	}
}

func TestInspect(t *testing.T) {
	long := dialect.Key{Name: "account/" + strings.Repeat("4", 39) + "#0123456789abcdef"}
	since := time.Date(2026, 11, 2, 3, 4, 5, 0, time.UTC)
	answers := answer{columns: make([]string, 9), rows: [][]driver.Value{
		{"0:[" + keyA.Name + "]:(1)", "X", "GRANT", int64(51), "app", append([]byte("dblock:billing"), 0, 0), "sa", "idle", since},
		{"0:[" + long.Name[:32] + "]:(2)", "S", "WAIT", int64(52), "app", nil, "sa", "active", nil},
		{"0:[other]:(3)", "U", "CONVERT", int64(-2), nil, nil, nil, nil, nil},
	}}
	_, d := openDB(t, answers, answers)
	got, err := d.Inspect(t.Context(), long, keyA)
	if err != nil {
		t.Fatal(err)
	}
	want := []dialect.Holding{
		{Name: keyA.Name, Session: 51, Application: "billing", User: "sa", State: "idle", Since: since},
		{Name: long.Name, Mode: dialect.Shared, Waiting: true, Session: 52, Application: "app", User: "sa", State: "active"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got, err = d.Inspect(t.Context()); err != nil || len(got) != 3 || got[1].Name != long.Name[:32] || got[2].Mode != dialect.Exclusive {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestInspectDenied(t *testing.T) {
	_, d := openDB(t, answer{err: serverError(300)})
	_, err := d.Inspect(t.Context())
	wantError(t, err, dialect.Denied, "300")
	if !strings.Contains(err.Error(), "GRANT VIEW SERVER STATE") {
		t.Errorf("%q does not name the permission", err)
	}
}

func TestApplicationName(t *testing.T) {
	for _, c := range []struct{ application, want string }{
		{"", "dblock"},
		{"billing", "billing"},
		{"'; DROP TABLE x; --", "'; DROP TABLE x; --"},
		{strings.Repeat("é", 100), strings.Repeat("é", 60)},
	} {
		stub, d := openDB(t)
		s, err := d.OpenSession(t.Context(), dialect.SessionOptions{Application: c.application})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		query := stub.sent("SET CONTEXT_INFO 0x")[0].query
		if c.application != "" && strings.Contains(query, c.application) {
			t.Errorf("the name stands in the text: %s", query)
		}
		literal := contextInfo(c.application)
		if len(literal) > 2+2*128 {
			t.Errorf("%s is longer than 128 bytes", literal)
		}
		if got := applicationOf(decodeHex(t, literal), "program"); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	if got := applicationOf([]byte{1, 2, 3}, "program"); got != "program" {
		t.Errorf("other software's bytes gave %q", got)
	}
}

func decodeHex(t *testing.T, literal string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.TrimPrefix(literal, "0x"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}
