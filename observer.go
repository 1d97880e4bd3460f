package dblock

import (
	"context"
	"log/slog"
	"time"
)

// EventKind says what an [Event] reports.
type EventKind string

const (
	// EventWaiting: a call has waited for a while and goes on waiting. Blocker
	// says for whom, where the server tells.
	EventWaiting EventKind = "waiting"
	// EventAcquired: the keys are held; Duration is how long that took.
	EventAcquired EventKind = "acquired"
	// EventReleased: the keys were given back; Duration is how long they were held.
	EventReleased EventKind = "released"
	// EventLost: the session that held the keys is gone; Duration is how long they
	// were held.
	EventLost EventKind = "lost"
	// EventRetried: a transaction starts again after a deadlock or serialization
	// failure, or a call draws a new session because the idle one it was given
	// had died; Duration is the pause before.
	EventRetried EventKind = "retried"
	// EventUnnamed: the names of keys could not be written, for which
	// advisory.Options.Names asks.
	EventUnnamed EventKind = "unnamed"
)

// Event is one step in the life of a lock.
type Event struct {
	Kind     EventKind
	Dialect  string
	Keys     []Key
	Duration time.Duration
	Blocker  *Blocker // for EventWaiting, where the server tells
	Err      error    // for EventLost, EventRetried and EventUnnamed: why; for EventWaiting: why the blocker is unknown, if it is
}

// Observer hears of the life of locks: for logs, metrics, traces. It is called
// on the goroutine that does the work, from several at once, so it must be
// quick, safe for concurrent use, and neither panic nor close what it observes.
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// ObserverFunc makes an Observer of a function.
type ObserverFunc func(ctx context.Context, e Event)

// Observe calls f, if there is one.
func (f ObserverFunc) Observe(ctx context.Context, e Event) {
	if f != nil {
		f(ctx, e)
	}
}

// SlogObserver logs each event: what is lost as an error, waits, retries
// and names that could not be written as warnings, the rest at debug level. A nil logger means slog.Default.
func SlogObserver(logger *slog.Logger) Observer {
	return ObserverFunc(func(ctx context.Context, e Event) {
		l := logger
		if l == nil {
			l = slog.Default()
		}
		level := slog.LevelDebug
		switch e.Kind {
		case EventLost:
			level = slog.LevelError
		case EventWaiting, EventRetried, EventUnnamed:
			level = slog.LevelWarn
		}
		if !l.Enabled(ctx, level) {
			return
		}
		keys := make([]string, len(e.Keys))
		for i, k := range e.Keys {
			keys[i] = k.String()
		}
		attrs := []slog.Attr{
			slog.String("database", e.Dialect),
			slog.Any("keys", keys),
			slog.Duration("duration", e.Duration),
		}
		if e.Blocker != nil {
			attrs = append(attrs, slog.String("blocker", DescribeBlocker(*e.Blocker)))
		}
		if e.Err != nil {
			attrs = append(attrs, slog.Any("error", e.Err))
		}
		l.LogAttrs(ctx, level, "dblock: "+string(e.Kind), attrs...)
	})
}
