package mysql

import (
	"slices"
	"testing"
)

func TestWholeNumbersSortAsTheServerDoes(t *testing.T) {
	column := newUserColumn("id", "bigint", "", "")
	var literals []string
	for _, value := range []any{int64(10), "9", "+007", []byte("0"), "-0", int64(-9), "-10", "18446744073709551615", "18446744073709551614", int64(-1 << 63)} {
		literal, why := column.literal(value)
		if why != "" {
			t.Fatalf("%v %s", value, why)
		}
		literals = append(literals, literal)
	}
	slices.SortFunc(literals, column.compare())
	want := []string{"-9223372036854775808", "-10", "-9", "0", "0", "7", "9", "10", "18446744073709551614", "18446744073709551615"}
	if !slices.Equal(literals, want) {
		t.Errorf("%q, want %q", literals, want)
	}
	for _, wrong := range []any{"", "-", "+", "1_000", "0x1", " 1", "1.0", "1e3", 1.5} {
		if literal, why := column.literal(wrong); why == "" {
			t.Errorf("%q is taken for %s", wrong, literal)
		}
	}
}
