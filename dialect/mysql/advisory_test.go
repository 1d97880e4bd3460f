package mysql

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

func TestOnlySafeNamesBecomeSQL(t *testing.T) {
	for _, name := range []string{"a", "-9223372036854775808", "shop/account/42#0123456789abcdef", strings.Repeat("z", 64)} {
		if err := checkKeys([]dialect.Key{{Name: name}}); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"", strings.Repeat("z", 65), "A", "é", "a b", "a'b", `a\b`, "a\x00b", "a`b", "a*b", "a?b", "\n"} {
		if err := checkKeys([]dialect.Key{{Name: "a"}, {Name: name}}); !errors.Is(err, dialect.InvalidKey) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if err := checkKeys([]dialect.Key{{Name: "a", Mode: dialect.Shared}}); !errors.Is(err, dialect.Unsupported) {
		t.Errorf("a shared key: %v", err)
	}
}

// A wait is never for ever, nor a try, by rounding.
func TestWaitSeconds(t *testing.T) {
	if n := waitSeconds(context.Background()); n != 365*24*3600+1 {
		t.Errorf("without a deadline: %d s", n)
	}
	for _, wait := range []time.Duration{-time.Hour, 0, 1, 400 * time.Microsecond, 200 * time.Millisecond, 1500 * time.Millisecond, time.Hour, 1<<63 - 1} {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		n := waitSeconds(ctx)
		cancel()
		if wait = min(wait, longestWait); n < 1 || time.Duration(n)*time.Second < wait || n > int64(max(0, wait)/time.Second)+2 {
			t.Errorf("%v became %d s", wait, n)
		}
	}
}

func TestSecondsRoundUp(t *testing.T) {
	for d, want := range map[time.Duration]int64{1: 1, time.Second - 1: 1, time.Second: 1, time.Second + 1: 2, time.Hour: 3600, 0: 0, longestWait: 365 * 24 * 3600} {
		if n := seconds(d); n != want {
			t.Errorf("%v became %d s", d, n)
		}
	}
}
