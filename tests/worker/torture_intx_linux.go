package main

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// lockInTx writes the witness rows of all keys that it locks exclusively in one
// transaction on the session that holds them, guarded by nothing but the lock.
func (c *client) lockInTx() error {
	names, keys := c.choose()
	a := c.ask(names)
	a.Call = history.InTx
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c.record(a)

	w := &inTx{client: c, call: a, keys: keys}
	var err error
	if c.db.Name() == "postgres" {
		err = advisory.InTx(ctx, c.locks, func(ctx context.Context, tx pgx.Tx) error { return w.run(ctx, overPgx{c.db, tx}) }, keys...)
	} else {
		err = advisory.InTx(ctx, c.locks, func(ctx context.Context, tx *sql.Tx) error { return w.run(ctx, overSQL{c.db, tx}) }, keys...)
	}
	if !w.began {
		c.record(failure(history.Record{At: history.Now(), What: history.Refused, Op: a.Op}, err))
		return err
	}
	if err == nil {
		for _, write := range w.writes {
			write.At = history.Now()
			c.record(write)
		}
	}
	c.record(failure(history.Record{At: history.Now(), What: history.Released, Op: a.Op}, err))
	return err
}

// inTx is what happens between the grant and the commit.
type inTx struct {
	*client
	call   history.Record
	keys   []dblock.Key
	began  bool
	writes []history.Record // committed if the transaction is
}

func (w *inTx) run(ctx context.Context, tx statements) error {
	w.began = true
	lock, _ := advisory.FromContext(ctx)
	w.record(granted(w.call, lock, w.keys))
	defer func() { w.record(history.Record{At: history.Now(), What: history.Releasing, Op: w.call.Op}) }()

	for i, key := range w.keys {
		if w.call.Keys[i].Shared {
			continue
		}
		token, _ := lock.TokenOf(key)
		if err := w.write(ctx, tx, key, w.call.Keys[i].Name, token); err != nil {
			return w.db.Classify(err)
		}
	}
	return nil
}

// write adds one to a row in two statements. Each that succeeds is evidence.
func (w *inTx) write(ctx context.Context, tx statements, key dblock.Key, name string, token int64) error {
	at := history.Now()
	var n, fence int64
	if err := tx.row(ctx, readRow, []any{name, history.OnSession}, &n, &fence); err != nil {
		return err
	}
	w.record(history.Record{At: at, What: history.Held, Op: w.call.Op})
	if err := w.plantInTx(ctx, tx, key); err != nil {
		return err
	}
	pause(ctx, w.upTo(longestPause))
	at = history.Now()
	if _, err := tx.exec(ctx, "UPDATE witness SET n = ?, fence = ? WHERE name = ? AND way = ?", n+1, token, name, history.OnSession); err != nil {
		return err
	}
	if _, err := tx.exec(ctx, writeLog, name, history.OnSession, n+1, token, w.call.Op); err != nil {
		return err
	}
	w.record(history.Record{At: at, What: history.Held, Op: w.call.Op})
	w.writes = append(w.writes, history.Record{What: history.Wrote, Op: w.call.Op, Row: name, Way: history.OnSession, N: n + 1})
	return nil
}
