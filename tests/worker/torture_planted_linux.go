//go:build planted_bug

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// canPlant: the torture test must find each of these.
func canPlant(planted string) error {
	if !slices.Contains(history.Planted, planted) {
		return fmt.Errorf("no defect %q to plant", planted)
	}
	return nil
}

// now: a defect shows in one of five calls.
func (c *client) now(planted string) bool { return c.plan.Planted == planted && c.random.IntN(5) == 0 }

func (c *client) plant(lock *advisory.Lock) holder {
	switch {
	case c.now(history.ReleasedEarly):
		_ = lock.Release(context.Background()) // the worker goes on as if it had not
		return pretended{lock}
	case c.now(history.NotReleased):
		return pretended{lock}
	case c.now(history.OldToken):
		return outdated{lock}
	}
	return lock
}

// pretended is a lock that says that it is held, and released nothing.
type pretended struct{ *advisory.Lock }

func (pretended) Context() context.Context      { return context.Background() }
func (pretended) Check(context.Context) error   { return nil }
func (pretended) Release(context.Context) error { return nil }

// outdated has a fencing number that was due some seconds before, as an earlier holder's.
type outdated struct{ *advisory.Lock }

func (o outdated) TokenOf(key dblock.Key) (int64, bool) {
	token, ok := o.Lock.TokenOf(key)
	return token - (3 * time.Second).Microseconds(), ok
}

func (w *inTx) plantInTx(ctx context.Context, tx statements, key dblock.Key) error {
	if !w.now(history.ReleasedInTx) {
		return nil
	}
	var answer any
	if w.db.Name() == "postgres" {
		return tx.row(ctx, "SELECT pg_advisory_unlock(?)", []any{key.ID()}, &answer)
	}
	return tx.row(ctx, "SELECT RELEASE_LOCK(?)", []any{key.Name(w.db.Features().Scope)}, &answer)
}
