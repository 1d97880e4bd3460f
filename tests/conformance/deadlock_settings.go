package conformance

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/rowlock"
)

// Who gives way can be chosen where the database has that, and elsewhere asking for it
// is an error.
func deadlockSettings(t *testing.T, h *Harness) {
	d := h.Database(t)
	d.Setup(t)
	features := d.DB.Features()
	for _, refused := range []struct {
		has      bool
		settings deadlock.Settings
	}{
		{features.DeadlockTimeout, deadlock.Settings{Timeout: time.Second}},
		{features.DeadlockPriority, deadlock.Settings{Priority: 5}},
	} {
		if refused.has {
			continue
		}
		if _, err := advisory.New(d.DB, &advisory.Options{Deadlock: refused.settings}); !errors.Is(err, dblock.ErrUnsupported) {
			t.Errorf("%+v: %v, want %v", refused.settings, err, dblock.ErrUnsupported)
		}
		rows := rowlock.New(d.DB, &rowlock.Options{Deadlock: refused.settings})
		err := rowlock.InTx(testContext(t), rows, func(context.Context, dblock.Tx) error { return nil }, dblock.NewKey("a"))
		if !errors.Is(err, dblock.ErrUnsupported) || !strings.Contains(err.Error(), "deadlock.Retry") && !strings.Contains(err.Error(), "use the") {
			t.Errorf("%+v: %v, want %v with the alternative", refused.settings, err, dblock.ErrUnsupported)
		}
	}
	meek, bold := deadlock.Settings{Timeout: 5 * time.Millisecond}, deadlock.Settings{Timeout: 30 * time.Second}
	switch {
	case features.DeadlockPriority:
		meek, bold = deadlock.Settings{Priority: -5}, deadlock.Settings{Priority: 5}
	case !features.DeadlockTimeout:
		return
	}
	a, b := dblock.NewKey("a"), dblock.NewKey("b")
	type lockIn func(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) error
	for name, run := range map[string]func(t *testing.T, s deadlock.Settings) func(first dblock.Key, fn func(context.Context, dblock.Tx, lockIn) error) error{
		"rowlock.InTx": func(_ *testing.T, s deadlock.Settings) func(dblock.Key, func(context.Context, dblock.Tx, lockIn) error) error {
			rows := rowlock.New(d.DB, &rowlock.Options{Deadlock: s, Retry: once})
			return func(first dblock.Key, fn func(context.Context, dblock.Tx, lockIn) error) error {
				return rowlock.InTx(testContext(t), rows, func(ctx context.Context, tx dblock.Tx) error { return fn(ctx, tx, rows.Lock) }, first)
			}
		},
		"advisory.DoTx": func(t *testing.T, s deadlock.Settings) func(dblock.Key, func(context.Context, dblock.Tx, lockIn) error) error {
			l := newLocker(t, d.DB, &advisory.Options{Deadlock: s, Retry: once})
			return func(first dblock.Key, fn func(context.Context, dblock.Tx, lockIn) error) error {
				return advisory.DoTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error { return fn(ctx, tx, l.LockTx) }, first)
			}
		},
		"advisory.InTx": func(t *testing.T, s deadlock.Settings) func(dblock.Key, func(context.Context, dblock.Tx, lockIn) error) error {
			l := newLocker(t, d.DB, &advisory.Options{Deadlock: s})
			return func(first dblock.Key, fn func(context.Context, dblock.Tx, lockIn) error) error {
				return advisory.InTx(testContext(t), l, func(ctx context.Context, tx dblock.Tx) error { return fn(ctx, tx, l.LockTx) }, first)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 3 {
				var crossed, all sync.WaitGroup
				crossed.Add(2)
				cross := func(s deadlock.Settings, first, second dblock.Key, ready func(), want error) {
					in := run(t, s)
					all.Go(func() {
						err := in(first, func(ctx context.Context, tx dblock.Tx, lock lockIn) error {
							crossed.Done()
							crossed.Wait()
							ready()
							return lock(ctx, tx, second)
						})
						if !errors.Is(err, want) {
							t.Errorf("%+v: %v, want %v", s, err, want)
						}
					})
				}
				// PostgreSQL looks once, so the circle must be closed by then.
				cross(meek, a, b, func() { d.awaitBlocked(t, 1) }, dblock.ErrDeadlock)
				cross(bold, b, a, func() {}, nil)
				all.Wait()
			}
		})
	}
}
