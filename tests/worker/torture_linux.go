package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/torture/history"
)

const (
	longestPause = 10 * time.Millisecond // between two steps, mostly
	longestRest  = 10 * time.Second      // of a holder that does nothing for once
	patience     = 3 * time.Second       // of a call that has no shorter one
)

// torture takes locks, works under them and gives them back, and writes down
// each step, until it is told to drain by a line on standard input; then it
// holds nothing and waits for the end of the input. Its argument is a
// history.Plan.
func torture(args []string) error {
	var plan history.Plan
	if len(args) != 1 {
		return fmt.Errorf("usage: worker torture PLAN")
	}
	if err := json.Unmarshal([]byte(args[0]), &plan); err != nil {
		return err
	}
	if err := canPlant(plan.Planted); err != nil {
		return err
	}
	running, ended := orders()
	t := &torturer{plan: plan, records: history.NewWriter(os.Stdout)}
	if err := t.open(running); err != nil {
		return err
	}
	var clients sync.WaitGroup
	for i := range plan.Clients {
		c := &client{torturer: t, name: fmt.Sprintf("%s-%d", plan.Name, i), random: rand.New(rand.NewPCG(plan.Seed, uint64(i)))}
		clients.Go(func() { c.run(running) })
	}
	clients.Wait()
	t.record(history.Record{At: history.Now(), What: history.Drained})
	<-ended
	return t.close()
}

// orders are what standard input says: running ends with its first line, ended
// is closed at its end, by which the process ends too if nobody told it to drain.
func orders() (running context.Context, ended <-chan struct{}) {
	running, drain := context.WithCancel(context.Background())
	end := make(chan struct{})
	go func() {
		lines := bufio.NewScanner(os.Stdin)
		if !lines.Scan() {
			os.Exit(1) // who started this process is gone
		}
		drain()
		for lines.Scan() {
		}
		close(end)
	}()
	return running, end
}

type torturer struct {
	plan    history.Plan
	records *history.Writer
	db      dblock.DB // nil if the server was never there
	locks   *advisory.Locker
}

func (t *torturer) record(r history.Record) {
	if err := t.records.Write(r); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

// open opens the database, again and again while a fault makes that impossible.
func (t *torturer) open(running context.Context) error {
	for running.Err() == nil {
		ctx, cancel := context.WithTimeout(running, patience)
		db, err := open(ctx, t.plan.DSN)
		cancel()
		if err == nil {
			t.db = db
			t.locks, err = advisory.New(db, &advisory.Options{Application: t.plan.Name, Fencing: true, StatementGap: patience})
			return err
		}
		switch dialect.ClassOf(err) {
		case dblock.ErrUnavailable, dblock.ErrTimeout, dblock.ErrCanceled, dblock.ErrLost:
			pause(running, longestPause)
		default:
			return err
		}
	}
	return nil
}

func (t *torturer) close() error {
	if t.db == nil {
		return nil
	}
	return errors.Join(t.locks.Close(), t.db.Close())
}

// client is one goroutine that locks.
type client struct {
	*torturer
	name   string
	random *rand.Rand
	calls  int
}

func (c *client) run(running context.Context) {
	for running.Err() == nil && c.db != nil {
		call := c.lock
		if c.random.IntN(4) == 0 {
			call = c.lockInTx
		}
		if err := call(); errors.Is(err, dblock.ErrUnavailable) {
			pause(running, c.upTo(10*longestPause))
		}
		pause(running, c.upTo(longestPause))
	}
}

// lock makes one call for some keys, works under the lock and gives it back.
func (c *client) lock() error {
	names, keys := c.choose()
	a := c.ask(names)
	call, limit := c.locks.Lock, patience
	a.Call = history.Wait
	switch c.random.IntN(5) {
	case 0, 1:
		a.Call, call = history.Try, c.locks.TryLock
	case 2:
		limit = c.upTo(200 * time.Millisecond)
	case 3:
		a.Call = history.Cancel
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if a.Call == history.Cancel {
		defer time.AfterFunc(c.upTo(200*time.Millisecond), cancel).Stop()
	}
	c.record(a)
	lock, err := call(ctx, keys...)
	if err != nil {
		c.record(failure(history.Record{At: history.Now(), What: history.Refused, Op: a.Op}, err))
		return err
	}
	h := c.plant(lock)
	c.record(granted(a, h, keys))
	stop := context.AfterFunc(lock.Context(), func() {
		if errors.Is(lock.Err(), dblock.ErrLost) {
			c.record(history.Record{At: history.Now(), What: history.Lost, Op: a.Op})
		}
	})
	c.work(a, h, keys)
	c.release(a, h)
	stop()
	return nil
}

// work uses the lock for some steps, or until its loss is heard.
func (c *client) work(a history.Record, h holder, keys []dblock.Key) {
	for range 1 + c.random.IntN(3) {
		if !c.step(a, h, keys) {
			return
		}
	}
}

func (c *client) step(a history.Record, h holder, keys []dblock.Key) (goOn bool) {
	ctx, cancel := context.WithTimeout(h.Context(), patience)
	defer cancel()
	if c.random.IntN(30) == 0 {
		pause(ctx, c.upTo(longestRest)) // while only the session's monitor would notice a loss
	}
	pause(ctx, c.upTo(longestPause))
	i := c.random.IntN(len(keys))
	if a.Keys[i].Shared || c.random.IntN(2) == 0 {
		c.check(ctx, a, h)
		return ctx.Err() == nil
	}
	token, _ := h.TokenOf(keys[i])
	return c.writeFenced(ctx, a, a.Keys[i].Name, token) && ctx.Err() == nil
}

// check is evidence if it succeeds.
func (c *client) check(ctx context.Context, a history.Record, h holder) {
	at := history.Now()
	if err := h.Check(ctx); err == nil {
		c.record(history.Record{At: at, What: history.Held, Op: a.Op})
	}
}

func (c *client) release(a history.Record, h holder) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if c.random.IntN(2) == 0 {
		cancel() // a release works nevertheless
	}
	c.record(history.Record{At: history.Now(), What: history.Releasing, Op: a.Op})
	err := h.Release(ctx)
	c.record(failure(history.Record{At: history.Now(), What: history.Released, Op: a.Op}, err))
}

// choose picks one to three keys, each maybe shared.
func (c *client) choose() ([]history.Key, []dblock.Key) {
	var names []history.Key
	var keys []dblock.Key
	for _, i := range c.random.Perm(c.plan.Keys)[:1+c.random.IntN(min(3, c.plan.Keys))] {
		name := history.Key{Name: fmt.Sprintf("k%d", i), Shared: c.db.Features().Shared && c.random.IntN(3) == 0}
		key := dblock.NewKey(name.Name)
		if name.Shared {
			key = key.Shared()
		}
		names, keys = append(names, name), append(keys, key)
	}
	return names, keys
}

// ask begins the record of a call.
func (c *client) ask(names []history.Key) history.Record {
	c.calls++
	return history.Record{At: history.Now(), What: history.Ask, Op: fmt.Sprintf("%s-%d", c.name, c.calls), Keys: names}
}

func granted(a history.Record, h tokens, keys []dblock.Key) history.Record {
	r := history.Record{At: history.Now(), What: history.Granted, Op: a.Op, Keys: slices.Clone(a.Keys)}
	for i := range r.Keys {
		r.Keys[i].Token, _ = h.TokenOf(keys[i])
	}
	return r
}

// failure completes a record with an error, which may be nil.
func failure(r history.Record, err error) history.Record {
	if err != nil {
		r.Class, r.Error = string(dialect.ClassOf(err)), err.Error()
	}
	return r
}

// upTo is a random time.
func (c *client) upTo(longest time.Duration) time.Duration {
	return time.Duration(c.random.Int64N(int64(longest))) + 1
}

// pause ends with ctx at the latest.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// tokens are fencing numbers, holder the part of an advisory.Lock that work
// needs.
type tokens interface {
	TokenOf(key dblock.Key) (int64, bool)
}

type holder interface {
	tokens
	Context() context.Context
	Check(ctx context.Context) error
	Release(ctx context.Context) error
}
