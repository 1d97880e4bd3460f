package demo

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

var projectorKey = dblock.NewKey("dblock demo", "projector")

const (
	projectors = 3
	// stepTime is how long a step takes, between its write and its commit.
	stepTime = 100 * time.Millisecond
	// A leader is killed, or asked to end, after so many steps.
	stepsOfLeader = 5
)

// lead is the third act.
func (p *play) lead(ctx context.Context, c *cast, _ *facts) error {
	p.timeline.act("A single leader: three processes could run the projector, one at a time may.\n" +
		"   Each write carries the leader's fencing number.")
	running := map[string]*process{}
	for i := range projectors {
		name := fmt.Sprintf("projector-%d", i+1)
		projector, err := c.start("projector", name)
		if err != nil {
			return err
		}
		running[name] = projector
	}
	if err := c.cue(ctx); err != nil {
		return err
	}
	return p.follow(ctx, c, running)
}

// follow kills the first leader in the middle of a step, lets it write once more
// under its successor, and asks each of the others to end when it had its turn.
func (p *play) follow(ctx context.Context, c *cast, running map[string]*process) error {
	var killed, leader Event
	steps, late := 0, false
	for len(c.processes) > 0 {
		t, err := c.next(ctx)
		if err != nil {
			return err
		}
		e := t.Event
		switch {
		case e.Kind == kindLeading:
			leader, steps = e, 0
		case e.Kind == kindWrote:
			steps++
		case e.Kind == kindWorking && killed.Kind == "" && steps == stepsOfLeader:
			killed = p.timeline.direct(Event{Kind: kindKilled, Victim: e.Process, Fence: leader.Fence, Count: steps + 1})
			if err := running[e.Process].kill(); err != nil {
				return err
			}
			continue
		}
		if e.Kind != kindWrote || killed.Kind == "" || leader.Process == killed.Victim {
			continue
		}
		if !late {
			late = true
			if err := p.writeLate(ctx, killed); err != nil {
				return err
			}
		}
		if steps == stepsOfLeader {
			if err := running[leader.Process].stop(); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeLate is what the killed leader would do, had it only been paused.
func (p *play) writeLate(ctx context.Context, killed Event) error {
	result, err := p.db.SQL().ExecContext(ctx, fencedWrite(killed.Fence))
	if err != nil {
		return err
	}
	rows, err := result.RowsAffected()
	if err != nil {
		return err
	}
	p.timeline.direct(Event{Kind: kindLate, Fence: killed.Fence, Rows: rows})
	return nil
}

// fencedWrite changes nothing once a larger number has been written.
func fencedWrite(fence int64) string {
	return fmt.Sprintf("UPDATE %s SET position = position + 1, fence = %d WHERE id = 1 AND fence <= %[2]d", projectionTable, fence)
}

// projector waits until it may lead, and then does step after step.
func (c *child) projector(ctx context.Context) error {
	return c.withDB(ctx, func(db dblock.DB) error {
		locks, err := advisory.New(db, &advisory.Options{
			Application: c.name,
			Fencing:     true,
			Table:       locksTable,
			Observer:    dblock.ObserverFunc(c.tellWaiting),
		})
		if err != nil {
			return err
		}
		return errors.Join(c.leadOnce(ctx, db, locks), locks.Close())
	})
}

func (c *child) leadOnce(ctx context.Context, db dblock.DB, locks *advisory.Locker) error {
	lock, err := locks.Lock(ctx, projectorKey)
	if err != nil {
		return err
	}
	c.tell(Event{Kind: kindLeading, Fence: lock.Token(), Session: holder(ctx, db, projectorKey)})
	steps := 0
	// Who is asked to end finishes its step; who loses the lock does not.
	for err == nil && ctx.Err() == nil {
		if err = c.step(lock.Context(), db, lock.Token()); err == nil {
			steps++
			c.tell(Event{Kind: kindWrote})
		}
	}
	if err == nil {
		c.tell(Event{Kind: kindReleased, Fence: lock.Token(), Count: steps})
	}
	return errors.Join(err, lock.Release(ctx))
}

// step is one transaction of the projector.
func (c *child) step(ctx context.Context, db dblock.DB, fence int64) (err error) {
	tx, err := db.Begin(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tx.Rollback(context.WithoutCancel(ctx))) }()
	result, err := tx.ExecContext(ctx, fencedWrite(fence))
	if err != nil {
		return err
	}
	if err := oneRow(result); err != nil {
		return fmt.Errorf("fencing number %d is too old: %w", fence, err)
	}
	c.tell(Event{Kind: kindWorking})
	if err := work(ctx, stepTime); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO %s (position, fence, leader) SELECT position, fence, '%s' FROM %s",
		stepsTable, c.name, projectionTable))
	if err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// oneRow is an error unless a statement changed one row.
func oneRow(result sql.Result) error {
	n, err := result.RowsAffected()
	if err == nil && n != 1 {
		err = fmt.Errorf("%d rows were changed, not 1", n)
	}
	return err
}
