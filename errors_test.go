package dblock_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// named is a database of which only the name matters.
type named struct{ dblock.DB }

func (named) Name() string { return "postgres" }

func TestErrorReachesSentinelCauseAndDetails(t *testing.T) {
	driverErr := &dialect.Error{Class: dialect.Deadlock, Code: "40P01", Hint: "retry", Err: io.ErrUnexpectedEOF}
	err := dblock.NewError("lock", named{}, []dblock.Key{dblock.NewKey("account", "42")}, driverErr)
	var details *dblock.Error
	if !errors.Is(err, dblock.ErrDeadlock) || !errors.Is(err, io.ErrUnexpectedEOF) || !errors.As(err, &details) {
		t.Fatalf("%#v", err)
	}
	if errors.Is(err, dblock.ErrTimeout) {
		t.Errorf("%v is a timeout too", err)
	}
	if details.Code != "40P01" || details.Dialect != "postgres" {
		t.Errorf("%+v", details)
	}
	if want := "dblock: lock account/42 on postgres: deadlock: unexpected EOF (retry)"; err.Error() != want {
		t.Errorf("text  %s\nwant  %s", err, want)
	}
}

func TestNoErrorIsNil(t *testing.T) {
	if err := dblock.NewError("lock", named{}, nil, nil); err != nil {
		t.Errorf("%#v", err)
	}
}

func TestErrorNamesTheBlocker(t *testing.T) {
	err := &dblock.Error{Op: "try", Dialect: "mysql", Keys: []string{"a"}, Err: dblock.ErrNotAcquired,
		Blocker: &dblock.Blocker{Session: 4711, Application: "billing", User: "app", State: "idle",
			Since: time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)}}
	want := `dblock: try a on mysql: held by another session; held by session 4711 ("billing", user app, idle, since 2026-11-29T12:00:00Z)`
	if err.Error() != want {
		t.Errorf("text  %s\nwant  %s", err, want)
	}
}

func TestErrorAboutManyKeysStaysShort(t *testing.T) {
	keys := make([]dblock.Key, 1000)
	for i := range keys {
		keys[i] = dblock.NewKey("account", strings.Repeat("9", i%7+1))
	}
	err := dblock.NewError("lock", named{}, keys, dblock.ErrTimeout)
	if text := err.Error(); len(text) > 200 || !strings.Contains(text, "and 995 more") {
		t.Errorf("%s", text)
	}
}

func TestErrorAboutALongKeyStaysShort(t *testing.T) {
	err := dblock.NewError("lock", named{}, []dblock.Key{dblock.NewKey(strings.Repeat("🔒", 100_000))}, dblock.ErrTimeout)
	if text := err.Error(); len(text) > 200 || !strings.Contains(text, "🔒…") {
		t.Errorf("%d bytes: %.200s", len(text), text)
	}
}

func TestObserverFunc(t *testing.T) {
	var heard dblock.Event
	var o dblock.Observer = dblock.ObserverFunc(func(_ context.Context, e dblock.Event) { heard = e })
	o.Observe(t.Context(), dblock.Event{Kind: dblock.EventLost})
	if heard.Kind != dblock.EventLost {
		t.Errorf("heard %+v", heard)
	}
}
