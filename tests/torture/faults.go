//go:build linux

package torture

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/proxy"
	"github.com/dblock-go/dblock/tests/servers"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// kind is a kind of fault.
type kind string

const (
	killSession     kind = "session killed"
	cancelStatement kind = "statement cancelled"
	killProcess     kind = "process killed"
	pauseProcess    kind = "process paused"
	freezeProcess   kind = "process paused for longer than the server waits"
	cutConnections  kind = "connections cut"
	resetPeer       kind = "connections reset"
	silence         kind = "network silent"
	latency         kind = "network slow"
	crashServer     kind = "server crashed"
	restartServer   kind = "server restarted"
)

// kinds are all of them. A run begins with each kind once, in random order.
var kinds = []kind{killSession, cancelStatement, killProcess, pauseProcess, freezeProcess,
	cutConnections, resetPeer, silence, latency, crashServer, restartServer}

// deck is what the later faults are drawn from, shuffled again each time it is
// empty. Few of those that stop everybody or keep others from the keys for long,
// so that more happens in the same time.
var deck = slices.Concat(
	slices.Repeat([]kind{killSession}, 16),
	slices.Repeat([]kind{cancelStatement, pauseProcess, cutConnections}, 4),
	slices.Repeat([]kind{killProcess}, 6),
	slices.Repeat([]kind{resetPeer, silence, latency}, 2),
	[]kind{freezeProcess, crashServer, restartServer},
)

// fault is one that was done.
type fault struct {
	Kind     kind
	From, To int64  // by history.Now
	Process  string // that it hit, empty: all
	Key      string // whose exclusive holder's session it hit, if so
}

// slot is one of the places where a process runs, behind a proxy of its own,
// until it is killed and the next one takes its place.
type slot struct {
	proxy   *proxy.Proxy
	process *process
	busy    bool // a fault that lasts goes on
}

// injector does faults. It connects to the server around the proxies.
type injector struct {
	torture
	t      testing.TB
	db     dblock.DB // only for its Inspect
	admin  *sql.DB
	names  map[string]string // of keys, by what the server's view shows
	random *rand.Rand
	slots  []*slot
	all    []*process // that were ever started

	mu      sync.Mutex // guards what lasting faults change: faults and slot.busy
	faults  []fault
	lasting sync.WaitGroup
}

const (
	shortestBreak = 300 * time.Millisecond // between two faults
	longestBreak  = 1500 * time.Millisecond
)

func newInjector(t testing.TB, o torture, db dblock.DB, admin *sql.DB, keys []dblock.Key) *injector {
	t.Helper()
	i := &injector{torture: o, t: t, db: db, admin: admin, names: map[string]string{}, random: rand.New(rand.NewPCG(o.seed, 0))}
	for _, key := range keys {
		i.names[fmt.Sprint(key.ID())] = key.String()
		i.names[key.Name(db.Features().Scope)] = key.String()
	}
	for range processes {
		s := &slot{proxy: proxy.New(t, o.dsn)}
		i.slots = append(i.slots, s)
		i.start(s)
	}
	return i
}

// start starts a fresh process.
func (i *injector) start(s *slot) {
	s.process = startProcess(i.t, i.program, history.Plan{DSN: s.proxy.DSN, Name: fmt.Sprintf("p%d", len(i.all)), Seed: i.random.Uint64(),
		Clients: clientsPerProcess, Keys: numberOfKeys, Planted: i.planted})
	i.all = append(i.all, s.process)
}

// records are what all processes wrote after a moment.
func (i *injector) records(since int64) (records []history.Record) {
	for _, p := range i.all {
		for _, r := range p.history() {
			if r.At > since {
				records = append(records, r)
			}
		}
	}
	return records
}

// inject does one fault after the other until ctx ends, and returns when none goes on
// any more.
func (i *injector) inject(ctx context.Context) {
	defer i.lasting.Wait()
	cards := i.shuffled(kinds)
	for i.rest(ctx) {
		if len(cards) == 0 {
			cards = i.shuffled(deck)
		}
		card := cards[0]
		cards = cards[1:]
		if !i.do(ctx, card) {
			cards = append(cards, card) // its turn comes again
		}
	}
}

func (i *injector) shuffled(kinds []kind) []kind {
	cards := slices.Clone(kinds)
	i.random.Shuffle(len(cards), func(a, b int) { cards[a], cards[b] = cards[b], cards[a] })
	return cards
}

// rest waits for the next fault; false when ctx has ended.
func (i *injector) rest(ctx context.Context) bool {
	timer := time.NewTimer(i.between(shortestBreak, longestBreak))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

func (i *injector) between(shortest, longest time.Duration) time.Duration {
	return shortest + time.Duration(i.random.Int64N(int64(longest-shortest)))
}

func (i *injector) done(f fault) {
	f.To = history.Now()
	i.mu.Lock()
	defer i.mu.Unlock()
	i.faults = append(i.faults, f)
}

// do does a fault, or returns false if there was nothing to do it to.
func (i *injector) do(ctx context.Context, k kind) bool {
	switch k {
	case killSession, cancelStatement:
		return i.hitSession(k)
	case crashServer:
		f := fault{Kind: k, From: history.Now()}
		i.server.Kill(i.t)
		i.server.Restart(i.t)
		i.done(f)
		return true
	case restartServer:
		f := fault{Kind: k, From: history.Now()}
		i.server.Restart(i.t)
		i.done(f)
		return true
	}
	s := i.idleSlot()
	if s == nil {
		return false
	}
	switch k {
	case killProcess:
		f := fault{Kind: k, From: history.Now(), Process: s.process.name}
		s.process.kill()
		i.done(f)
		i.start(s)
	case pauseProcess:
		i.pause(ctx, s, k, i.between(500*time.Millisecond, 4*time.Second))
	case freezeProcess:
		i.pause(ctx, s, k, i.frozen())
	case cutConnections:
		i.last(ctx, s, k, i.between(time.Millisecond, time.Second), s.proxy.Stop, s.proxy.Start)
	case resetPeer:
		i.toxic(ctx, s, k, i.between(100*time.Millisecond, time.Second), proxy.Reset)
	case silence:
		i.toxic(ctx, s, k, i.between(time.Second, 12*time.Second), proxy.Silence)
	case latency:
		i.toxic(ctx, s, k, i.between(time.Second, 5*time.Second), proxy.Latency)
	}
	return true
}

// frozen is longer than the server waits for a sign of life: its idle limit frees
// the locks of the process while that is stopped.
func (i *injector) frozen() time.Duration {
	const margin = 2 * time.Second
	o := dialect.SessionOptions{KeepAlive: 500 * time.Millisecond, AnswerWithin: 4 * time.Second}
	if i.db.Features().HearsLoss {
		o.KeepAlive = 5 * time.Second
	}
	return o.Silence() + margin
}

// idleSlot is one without a fault that lasts, nil if there is none.
func (i *injector) idleSlot() *slot {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, n := range i.random.Perm(len(i.slots)) {
		if s := i.slots[n]; !s.busy {
			return s
		}
	}
	return nil
}

// last does a fault that goes on for a while, beside others.
func (i *injector) last(ctx context.Context, s *slot, k kind, duration time.Duration, begin func(), end func() error) {
	i.mu.Lock()
	s.busy = true
	i.mu.Unlock()
	f := fault{Kind: k, From: history.Now(), Process: s.process.name}
	begin()
	i.lasting.Go(func() {
		timer := time.NewTimer(duration)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		if err := end(); err != nil {
			i.t.Errorf("end of %q: %v", k, err)
		}
		i.mu.Lock()
		s.busy = false
		i.mu.Unlock()
		i.done(f)
	})
}

func (i *injector) pause(ctx context.Context, s *slot, k kind, duration time.Duration) {
	p := s.process.cmd.Process
	i.last(ctx, s, k, duration,
		func() { i.must(k, p.Signal(syscall.SIGSTOP)) },
		func() error { return p.Signal(syscall.SIGCONT) })
}

// toxic lets a proxy do something to what flows both ways.
func (i *injector) toxic(ctx context.Context, s *slot, k kind, duration time.Duration, toxic string) {
	i.last(ctx, s, k, duration,
		func() { i.must(k, s.proxy.Poison(toxic)) },
		func() error { s.proxy.Heal(); return nil })
}

func (i *injector) must(k kind, err error) {
	if err != nil {
		i.t.Errorf("%s: %v", k, err)
	}
}

// hitSession kills a session that holds or waits for a key, or cancels its
// statement.
func (i *injector) hitSession(k kind) bool {
	const within = 5 * time.Second
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	found, err := i.db.Inspect(ctx)
	if err != nil || len(found) == 0 {
		return false // the server has just restarted, or nobody happens to lock
	}
	h := found[i.random.IntN(len(found))]
	f := fault{Kind: k, From: history.Now()}
	if !h.Waiting && h.Mode == dblock.Exclusive {
		f.Key = i.names[shown(h)]
	}
	_, err = i.admin.ExecContext(ctx, fmt.Sprintf(statement(i.server.Kind, k), h.Session))
	const noSuchThread = 1094
	var refused *mysql.MySQLError
	if errors.As(err, &refused) && refused.Number == noSuchThread {
		return false
	}
	i.must(k, err)
	i.done(f)
	return true
}

func statement(server servers.Kind, k kind) string {
	switch {
	case server == servers.KindPostgres && k == killSession:
		return "SELECT pg_terminate_backend(%d)"
	case server == servers.KindPostgres:
		return "SELECT pg_cancel_backend(%d)"
	case k == killSession:
		return "KILL %d"
	}
	return "KILL QUERY %d"
}

// shown is a key as a server's view shows it.
func shown(h dialect.Holding) string {
	if h.Name != "" {
		return h.Name
	}
	return fmt.Sprint(h.ID)
}
