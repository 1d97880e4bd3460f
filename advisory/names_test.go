package advisory_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
)

// namingServer is a server that does not know the names of keys.
type namingServer struct {
	*fakeServer

	mu      sync.Mutex
	failing bool
	table   dialect.Table
	written []string
	writes  int
}

func (s *namingServer) WriteNames(_ context.Context, t dialect.Table, rows []dialect.Key) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes++
	if s.failing {
		return &dialect.Error{Class: dialect.Setup}
	}
	s.table = t
	for _, r := range rows {
		s.written = append(s.written, fmt.Sprintf("%d %s", r.ID, r.Name))
	}
	return nil
}

func (s *namingServer) row(k dblock.Key) string {
	key := k.Resolve("")
	return fmt.Sprintf("%d %s", dialect.FenceRows([]dialect.Key{key})[0].ID, key.Name)
}

func (s *namingServer) seen() (rows []string, writes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.written), s.writes
}

func lockAndRelease(t *testing.T, l *advisory.Locker, keys ...dblock.Key) {
	t.Helper()
	lock, err := l.Lock(t.Context(), keys...)
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestNamesAreWrittenOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &namingServer{fakeServer: newFakeServer()}
		l, err := advisory.New(s, &advisory.Options{Names: true, Schema: "app", Table: "my_locks"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		one, other := dblock.NewKey("account", "1"), dblock.NewKey("account", "2")
		for range 3 {
			lockAndRelease(t, l, one)
			lockAndRelease(t, l, other, one, dblock.RawKey(7))
		}
		synctest.Wait()
		rows, _ := s.seen()
		slices.Sort(rows)
		want := []string{s.row(one), s.row(other)}
		slices.Sort(want)
		if !slices.Equal(rows, want) || s.table != (dialect.Table{Schema: "app", Name: "my_locks"}) {
			t.Errorf("written %q into %v, want %q", rows, s.table, want)
		}
	})
}

func TestNamesAreNotWrittenUnlessWanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &namingServer{fakeServer: newFakeServer()}
		l, err := advisory.New(s)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		lockAndRelease(t, l, dblock.NewKey("account", "1"))
		synctest.Wait()
		if _, writes := s.seen(); writes != 0 {
			t.Errorf("%d writes", writes)
		}
	})
}

func TestNamesThatCannotBeWrittenAreToldAndTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &namingServer{fakeServer: newFakeServer(), failing: true}
		var mu sync.Mutex
		var told []dblock.Event
		l, err := advisory.New(s, &advisory.Options{Names: true, Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
			mu.Lock()
			defer mu.Unlock()
			if e.Kind == dblock.EventUnnamed {
				told = append(told, e)
			}
		})})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		key := dblock.NewKey("account", "1")
		for range 100 { // a table that is missing costs one statement now and then
			lockAndRelease(t, l, key)
		}
		synctest.Wait()
		if _, writes := s.seen(); writes != 1 {
			t.Errorf("%d writes", writes)
		}
		mu.Lock()
		if len(told) != 1 || !errors.Is(told[0].Err, dblock.ErrSetup) || told[0].Dialect != "fake" || len(told[0].Keys) != 1 {
			t.Errorf("told %+v", told)
		}
		mu.Unlock()
		s.mu.Lock()
		s.failing = false
		s.mu.Unlock()
		time.Sleep(11 * time.Second)
		lockAndRelease(t, l, key)
		synctest.Wait()
		if rows, _ := s.seen(); !slices.Equal(rows, []string{s.row(key)}) {
			t.Errorf("written %q", rows)
		}
	})
}

func TestCloseEndsTheWriterOfNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // which fails where a goroutine is left
		s := &namingServer{fakeServer: newFakeServer(), failing: true}
		l, err := advisory.New(s, &advisory.Options{Names: true})
		if err != nil {
			t.Fatal(err)
		}
		lockAndRelease(t, l, dblock.NewKey(strings.Repeat("x", 100)))
		synctest.Wait()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
}
