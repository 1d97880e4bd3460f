package migrations

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pressly/goose/v3/lock"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

func locker(t *testing.T, db dblock.DB, o *Options) lock.SessionLocker {
	t.Helper()
	l, err := SessionLocker(db, o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestWaiterPollsWithBackoffAndGoesOnWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, heard := &fakeDB{}, &recorder{}
		// One locker for holder and waiter: it must not keep the state of a wait.
		l := locker(t, db, &Options{Observer: heard})
		holder, waiter := new(sql.Conn), new(sql.Conn)
		for range 2 {
			*heard = recorder{}
			db.polls = nil
			if err := l.SessionLock(t.Context(), holder); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			var granted time.Time
			go func() {
				if err := l.SessionLock(t.Context(), waiter); err != nil {
					t.Error(err)
				}
				granted = time.Now()
			}()
			time.Sleep(time.Minute)
			released := time.Now()
			if err := l.SessionUnlock(t.Context(), holder); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			if granted.IsZero() || granted.Sub(released) >= time.Second {
				t.Errorf("granted %v after the release", granted.Sub(released))
			}
			if first := db.polls[1].Sub(began); first < 40*time.Millisecond || first > 60*time.Millisecond {
				t.Errorf("first pause %v, want about 50ms", first)
			}
			for i := 2; i < len(db.polls); i++ {
				if pause := db.polls[i].Sub(db.polls[i-1]); pause >= time.Second {
					t.Errorf("pause %d is %v", i, pause)
				}
			}
			if n := len(db.polls); n > 100 {
				t.Errorf("%d polls in a minute: no backoff", n)
			}
			if err := l.SessionUnlock(t.Context(), waiter); err != nil {
				t.Fatal(err)
			}
			checkAnnouncements(t, heard)
		}
	})
}

func checkAnnouncements(t *testing.T, heard *recorder) {
	t.Helper()
	var waits []time.Time
	for i, e := range heard.events {
		if e.Kind != dblock.EventWaiting {
			continue
		}
		waits = append(waits, heard.times[i])
		if e.Blocker == nil || e.Blocker.Waiting || e.Duration <= 0 || len(e.Keys) != 1 || e.Dialect != "postgres" {
			t.Errorf("announcement lacks for whom or how long: %+v", e)
		}
	}
	if len(waits) < 9 || len(waits) > 13 {
		t.Errorf("%d announcements in a minute", len(waits))
	}
	for i := 1; i < len(waits); i++ {
		if pause := waits[i].Sub(waits[i-1]); pause < announceEvery {
			t.Errorf("announced again after %v", pause)
		}
	}
	kinds := slices.DeleteFunc(heard.kinds(), func(k dblock.EventKind) bool { return k == dblock.EventWaiting })
	want := []dblock.EventKind{dblock.EventAcquired, dblock.EventReleased, dblock.EventAcquired, dblock.EventReleased}
	if !slices.Equal(kinds, want) {
		t.Errorf("events %v, want %v", kinds, want)
	}
}

func TestWaitEndsWithLimitAndContext(t *testing.T) {
	deadline := func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, 3*time.Second)
	}
	canceled := func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(ctx)
		time.AfterFunc(3*time.Second, cancel)
		return ctx, cancel
	}
	for _, c := range []struct {
		name    string
		limit   time.Duration
		context func(context.Context) (context.Context, context.CancelFunc)
		want    error
		says    string
	}{
		{"limit", 3 * time.Second, context.WithCancel, dblock.ErrTimeout, "wait limit of 3s"},
		{"deadline", 0, deadline, dblock.ErrTimeout, "after 3s"},
		{"cancel", time.Hour, canceled, dblock.ErrCanceled, "after 3s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				db := &fakeDB{}
				l := locker(t, db, &Options{WaitLimit: c.limit})
				if err := l.SessionLock(t.Context(), new(sql.Conn)); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := c.context(t.Context())
				defer cancel()
				waiter := new(sql.Conn)
				err := l.SessionLock(ctx, waiter)
				if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
					t.Fatalf("got %v", err)
				}
				if c.want == dblock.ErrTimeout && !strings.Contains(err.Error(), "held by session 1") {
					t.Errorf("does not name the holder: %v", err)
				}
				if db.sessions[1].closed {
					t.Error("a session that was refused is good, but was destroyed")
				}
				if err := l.SessionUnlock(t.Context(), waiter); !errors.Is(err, dblock.ErrNotHeld) {
					t.Errorf("unlock after a failed lock: %v", err)
				}
			})
		})
	}
}

func TestUnknownBlockerIsReportedNotFatal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, heard := &fakeDB{inspectErr: errors.New("no connection left")}, &recorder{}
		l := locker(t, db, &Options{Observer: heard, WaitLimit: time.Second})
		if err := l.SessionLock(t.Context(), new(sql.Conn)); err != nil {
			t.Fatal(err)
		}
		err := l.SessionLock(t.Context(), new(sql.Conn))
		if !errors.Is(err, dblock.ErrTimeout) || !errors.Is(err, db.inspectErr) {
			t.Errorf("got %v", err)
		}
		i := slices.IndexFunc(heard.events, func(e dblock.Event) bool { return e.Kind == dblock.EventWaiting })
		if i < 0 || !errors.Is(heard.events[i].Err, db.inspectErr) {
			t.Errorf("events: %+v", heard.events)
		}
	})
}

func TestDoubtfulSessionIsDestroyed(t *testing.T) {
	lost := &dialect.Error{Class: dblock.ErrLost, Code: "57P01"}
	t.Run("acquire", func(t *testing.T) {
		db := &fakeDB{acquireErr: lost}
		err := locker(t, db, nil).SessionLock(t.Context(), new(sql.Conn))
		var details *dblock.Error
		if !errors.As(err, &details) || !errors.Is(err, dblock.ErrLost) || details.Code != "57P01" ||
			details.Dialect != "postgres" || !slices.Equal(details.Keys, []string{"migrations/goose_db_version"}) {
			t.Errorf("got %#v", err)
		}
		if !db.sessions[0].closed {
			t.Error("the session was kept")
		}
	})
	t.Run("release", func(t *testing.T) {
		db, heard := &fakeDB{releaseErr: &dialect.Error{Class: dblock.ErrNotHeld}}, &recorder{}
		l, conn := locker(t, db, &Options{Observer: heard}), new(sql.Conn)
		if err := l.SessionLock(t.Context(), conn); err != nil {
			t.Fatal(err)
		}
		if err := l.SessionUnlock(t.Context(), conn); !errors.Is(err, dblock.ErrNotHeld) {
			t.Errorf("got %v", err)
		}
		if !db.sessions[0].closed {
			t.Error("the session was kept")
		}
		if want := []dblock.EventKind{dblock.EventAcquired, dblock.EventLost}; !slices.Equal(heard.kinds(), want) {
			t.Errorf("events %v, want %v", heard.kinds(), want)
		}
	})
}

func TestUnlockIgnoresTheCallersContext(t *testing.T) {
	db, conn := &fakeDB{}, new(sql.Conn)
	l := locker(t, db, nil)
	if err := l.SessionLock(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.SessionUnlock(ctx, conn); err != nil {
		t.Error(err)
	}
	if db.sessions[0].closed {
		t.Error("a connection that holds nothing was destroyed")
	}
}

func TestOneConnectionCannotTakeTheGuardTwice(t *testing.T) {
	l, conn := locker(t, &fakeDB{}, nil), new(sql.Conn)
	if err := l.SessionLock(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	if err := l.SessionLock(t.Context(), conn); !errors.Is(err, dblock.ErrNotAcquired) {
		t.Errorf("got %v", err)
	}
	if err := l.SessionUnlock(t.Context(), conn); err != nil {
		t.Error(err)
	}
}
