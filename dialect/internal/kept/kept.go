// Package kept keeps one connection for what must be done beside transactions, such
// as what has to be committed whatever becomes of them.
package kept

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// Conn is a connection that its users take turns with. It is opened for the first
// of them, and again after it broke. It is safe for concurrent use.
type Conn[C any] struct {
	open   func(ctx context.Context) (C, error)
	close  func(C) error
	broken func(error) bool
	turn   chan struct{} // holds one element while somebody uses conn
	conn   *C            // nil: not open

	isOpen    atomic.Bool // for who has not the turn
	preparing atomic.Bool
}

// New opens nothing yet. After an error of which broken is true the connection is of
// no more use.
func New[C any](open func(ctx context.Context) (C, error), close func(C) error, broken func(error) bool) *Conn[C] {
	return &Conn[C]{open: open, close: close, broken: broken, turn: make(chan struct{}, 1)}
}

// Use calls use with the connection. If one that had served before turns out to be
// broken, use is called once more, with a new one: it must be fit to be repeated.
func (k *Conn[C]) Use(ctx context.Context, use func(C) error) error {
	select {
	case k.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-k.turn }()
	for {
		served := k.conn != nil
		if !served {
			conn, err := k.open(ctx)
			if err != nil {
				return err
			}
			k.keep(conn)
		}
		err := use(*k.conn)
		if err == nil || !k.broken(err) {
			return err
		}
		_ = k.drop() // what closing it says is no news
		if !served || ctx.Err() != nil {
			return err
		}
	}
}

// Prepare opens the connection ahead of the call that needs it, by a way that may take
// long: nobody waits for it, or does it twice. If it fails, so may that call, with the
// error that tells why.
func (k *Conn[C]) Prepare(ctx context.Context, open func(ctx context.Context) (C, error)) {
	if k.isOpen.Load() || !k.preparing.CompareAndSwap(false, true) {
		return
	}
	defer k.preparing.Store(false)
	conn, err := open(ctx)
	if err != nil {
		return
	}
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	if k.conn != nil { // somebody has found one meanwhile
		_ = k.close(conn)
		return
	}
	k.keep(conn)
}

// keep has the turn, as drop has.
func (k *Conn[C]) keep(conn C) {
	k.conn = &conn
	k.isOpen.Store(true)
}

func (k *Conn[C]) drop() error {
	if k.conn == nil {
		return nil
	}
	conn := *k.conn
	k.conn = nil
	k.isOpen.Store(false)
	return k.close(conn)
}

// closeWithin bounds the wait for a user of the connection.
const closeWithin = 2 * time.Second

// Close closes the connection. An error of class Capacity says that somebody still
// uses it.
func (k *Conn[C]) Close() error {
	bound := time.NewTimer(closeWithin)
	defer bound.Stop()
	select {
	case k.turn <- struct{}{}:
	case <-bound.C:
		return &dialect.Error{Class: dialect.Capacity, Hint: "a call is still under way: close the DB after all calls have returned"}
	}
	defer func() { <-k.turn }()
	return k.drop()
}
