package advisory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// operation is one key that a goroutine tries for or gives back on a multiplexed
// session.
type operation struct {
	key  dialect.Key
	try  bool
	done bool // granted, or given back
	err  error
	wake chan bool // false: it was carried out, true: the goroutine must lead; nil for one that led at once
}

// timedEvery is how many statements one is timed of.
const timedEvery = 32

// mostInOneExchange keeps a statement short enough to be quick.
const mostInOneExchange = 256

// exchange carries the operation out together with those of other goroutines. Who
// finds the session unused sends the statement for its own operation; meanwhile the
// others queue up, and the first of them leads the next statement for all. So one
// goroutine pays nothing for the others, and many share the round trips.
//
// No caller's context ends the statement, which would cost the connection and every
// lock on it; it is bounded by itself.
func (s *session) exchange(o *operation) {
	s.operations.Add(1)
	defer s.operations.Add(-1)
	s.mu.Lock()
	s.queue = append(s.queue, o)
	if s.leading {
		o.wake = make(chan bool, 1)
		s.mu.Unlock()
		if !<-o.wake {
			return
		}
		s.mu.Lock()
	}
	s.lead()
}

// lead carries out what is queued, then hands the lead on. The caller has s.mu, and lead
// unlocks it.
func (s *session) lead() {
	s.leading = true
	n := min(len(s.queue), mostInOneExchange)
	batch := append(s.batch[:0], s.queue[:n]...)
	s.queue = slices.Delete(s.queue, 0, n)
	s.mu.Unlock()

	s.carryOut(batch)
	for _, o := range batch[1:] { // the first is the leader's own
		o.wake <- false
	}
	clear(batch)
	s.batch = batch

	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) > 0 {
		s.queue[0].wake <- true
	} else {
		s.leading = false
	}
}

func (s *session) carryOut(batch []*operation) {
	tries, releases := s.tries[:0], s.releases[:0]
	for _, o := range batch {
		if o.try {
			tries = append(tries, o.key)
		} else {
			releases = append(releases, o.key)
		}
	}
	s.tries, s.releases = tries, releases
	var granted, released []bool
	var doubt error
	asked := false
	err := s.use(context.Background(), func() (err error) {
		asked = true
		began := time.Now()
		granted, released, err = s.conn.Exchange(began.Add(s.locker.options.AnswerWithin), tries, releases)
		if s.exchanges++; err == nil && s.exchanges%timedEvery == 1 {
			s.locker.timed(time.Since(began))
		}
		if err != nil {
			doubt = err
			granted = make([]bool, len(tries))
			released, err = s.resolve(tries, releases, err)
		}
		if err != nil {
			s.lose(err)
		}
		return err
	})
	if !asked && dialect.ClassOf(err) == "" { // the session has ended, unused
		err = &dialect.Error{Class: dblock.ErrLost, Err: err}
	}
	for _, o := range batch {
		switch {
		case err != nil:
			o.err = err
		case o.try:
			o.done, granted = granted[0], granted[1:]
			o.err = doubt
		default:
			o.done, released = released[0], released[1:]
		}
	}
}

// resolve finds out what a statement did before it failed: what it was granted is
// given back, and what it was to give back too. The questions can fail in the same way,
// and are then asked again. An error means that the session cannot be used any more.
func (s *session) resolve(tries, releases []dialect.Key, cause error) (released []bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.locker.options.AnswerWithin)
	defer cancel()
	err = cause
	for dialect.ClassOf(err) != dblock.ErrLost && ctx.Err() == nil {
		var left []dialect.Key
		if left, err = s.held(ctx, slices.Concat(tries, releases)); err == nil && len(left) > 0 {
			err = s.conn.Release(ctx, left)
		}
		if err == nil {
			return slices.Repeat([]bool{true}, len(releases)), nil
		}
	}
	if err == cause {
		return nil, cause
	}
	return nil, fmt.Errorf("%w, and nobody could find out what it did: %w", cause, err)
}

// held are those of the keys that the server says this session holds.
func (s *session) held(ctx context.Context, keys []dialect.Key) (held []dialect.Key, err error) {
	is, err := s.conn.Held(ctx, keys)
	for i, k := range keys {
		if err == nil && is[i] {
			held = append(held, k)
		}
	}
	return held, err
}
