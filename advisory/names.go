package advisory

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

const (
	// mostNames are remembered as written. Beyond that all are forgotten, and each
	// written once more, which changes nothing.
	mostNames = 10_000
	// namesAhead may wait to be written. Others are left for their next lock.
	namesAhead = 1000
	// namesWithin bounds the writing of some names.
	namesWithin = 10 * time.Second
	// namesPause follows names that could not be written.
	namesPause = 10 * time.Second
)

// names writes those of keys into the lock table, for [Options.Names], on a
// goroutine of the locker. The calls only look whether a key is new.
type names struct {
	locker *Locker
	writer dialect.Namer
	fresh  chan namedKey

	mu    sync.Mutex
	known map[int64]struct{}
}

type namedKey struct {
	of  dblock.Key
	row dialect.Key
}

// newNames is nil where no names are wanted, or the server knows them itself.
func newNames(l *Locker) *names {
	writer, ok := l.db.(dialect.Namer)
	if !ok || !l.options.Names {
		return nil
	}
	n := &names{locker: l, writer: writer, fresh: make(chan namedKey, namesAhead), known: map[int64]struct{}{}}
	l.monitors.Go(n.run)
	return n
}

// note has the names of new keys written some time.
func (n *names) note(keys []dblock.Key) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, k := range keys {
		if _, known := n.known[k.ID()]; known {
			continue
		}
		key := k.Resolve("")
		if key.Name != strconv.FormatInt(key.ID, 10) { // a raw key has no other name
			select {
			case n.fresh <- namedKey{k, key}:
			default:
				return
			}
		}
		if len(n.known) >= mostNames {
			clear(n.known)
		}
		n.known[key.ID] = struct{}{}
	}
}

func (n *names) forget() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.known)
}

// run ends with the locker.
func (n *names) run() {
	for {
		select {
		case <-n.locker.closing.Done():
			return
		case first := <-n.fresh:
			if !n.write(n.batch(first)) {
				return
			}
		}
	}
}

// batch is all that is there.
func (n *names) batch(first namedKey) []namedKey {
	all := []namedKey{first}
	for {
		select {
		case next := <-n.fresh:
			all = append(all, next)
		default:
			return all
		}
	}
}

// write reports whether to go on. After a failure the names are tried again with
// the next locks of their keys, but not at once.
func (n *names) write(all []namedKey) bool {
	keys, rows := make([]dblock.Key, len(all)), make([]dialect.Key, len(all))
	for i, k := range all {
		keys[i], rows[i] = k.of, k.row
	}
	closing := n.locker.closing
	ctx, cancel := context.WithTimeout(closing, namesWithin)
	defer cancel()
	err := n.writer.WriteNames(ctx, dialect.Table{Schema: n.locker.options.Schema, Name: n.locker.options.Table}, dialect.FenceRows(rows))
	if err == nil || closing.Err() != nil {
		return err == nil
	}
	n.locker.observe(ctx, dblock.Event{Kind: dblock.EventUnnamed, Keys: keys, Err: err})
	pause := time.NewTimer(namesPause)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-closing.Done():
		return false
	}
	n.forget()
	return true
}
