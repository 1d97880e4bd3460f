package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dblock-go/dblock"
)

// Invariant is something that must hold in the end.
type Invariant struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	Text string `json:"text"` // what was found
}

// facts are what the invariants are checked on: what the processes told, and
// what the database has in the end.
type facts struct {
	events   []Event
	applied  []int64     // goose's record, without its version 0
	balances map[int]int // by account
	steps    []step      // by position
	held     []string    // what is left in the server's lock view
}

// step is one row that a leader wrote.
type step struct {
	position int
	fence    int64
	leader   string
}

// check is pure: all that it knows is in the facts.
func check(f facts) []Invariant {
	return []Invariant{
		result("migrations_applied_once", f.migrationsAppliedOnce),
		result("money_kept", f.moneyKept),
		result("no_deadlock", f.noDeadlock),
		result("one_leader_at_a_time", f.oneLeaderAtATime),
		result("killed_leader_replaced", f.killedLeaderReplaced),
		result("late_write_refused", f.lateWriteRefused),
		result("nothing_left_locked", f.nothingLeftLocked),
	}
}

func result(name string, check func() (ok bool, text string)) Invariant {
	ok, text := check()
	return Invariant{Name: name, OK: ok, Text: text}
}

func allOK(all []Invariant) bool {
	return !slices.ContainsFunc(all, func(i Invariant) bool { return !i.OK })
}

func (f facts) of(kind Kind) []Event {
	return slices.DeleteFunc(slices.Clone(f.events), func(e Event) bool { return e.Kind != kind })
}

func (f facts) migrationsAppliedOnce() (bool, string) {
	var by []string
	var told []int64
	reports := f.of(kindMigrated)
	for _, e := range reports {
		if len(e.Versions) > 0 {
			by = append(by, e.Process)
			told = append(told, e.Versions...)
		}
	}
	slices.Sort(told)
	recorded := slices.Sorted(slices.Values(f.applied))
	if len(reports) != replicas || !slices.Equal(told, versions) || !slices.Equal(recorded, versions) {
		return false, fmt.Sprintf("each migration once: %s by %s, recorded %s; expected %s",
			numbers(told), strings.Join(by, " and "), numbers(recorded), numbers(versions))
	}
	return true, fmt.Sprintf("each of %s was applied once, by %s; %d replicas came up",
		plural(len(versions), "migration"), strings.Join(by, " and "), len(reports))
}

func (f facts) moneyKept() (bool, string) {
	expected := map[int]int{}
	before, after, count := 0, 0, 0
	for account := range owners {
		expected[account] = opening
		before += opening
		after += f.balances[account]
	}
	for _, e := range f.of(kindMoved) {
		expected[e.From] -= e.Count * e.Amount
		expected[e.To] += e.Count * e.Amount
		count += e.Count
	}
	ok := before == after && count == len(tellers)*transfersOfTeller
	var accounts []string
	for _, account := range slices.Sorted(maps.Keys(owners)) {
		text := fmt.Sprintf("%s has %d", owners[account], f.balances[account])
		if f.balances[account] != expected[account] {
			ok = false
			text += fmt.Sprintf(" instead of %d", expected[account])
		}
		accounts = append(accounts, text)
	}
	verdict := "money was neither made nor lost"
	if !ok {
		verdict = "money was made or lost, or transfers are missing"
	}
	return ok, fmt.Sprintf("%s: %d before, %d after %s; %s", verdict, before, after, plural(count, "transfer"), strings.Join(accounts, ", "))
}

func (f facts) noDeadlock() (bool, string) {
	deadlocks := 0
	for _, e := range f.of(kindMoved) {
		deadlocks += e.Deadlocks
	}
	if deadlocks > 0 {
		return false, fmt.Sprintf("deadlocks: %d, although every transfer locks its accounts in one order", deadlocks)
	}
	return true, "no deadlock, although the transfers went in opposite directions"
}

func (f facts) oneLeaderAtATime() (bool, string) {
	leaders := f.of(kindLeading)
	leaderOf := map[int64]string{}
	var numbered []string
	last := int64(0)
	for _, e := range leaders {
		if e.Fence <= last {
			return false, fmt.Sprintf("fencing numbers must grow: %s got %d after %d", e.Process, e.Fence, last)
		}
		last = e.Fence
		leaderOf[e.Fence] = e.Process
		numbered = append(numbered, fmt.Sprintf("%d %s", e.Fence, e.Process))
	}
	fence := int64(0)
	for i, s := range f.steps {
		switch {
		case s.position != i+1:
			return false, fmt.Sprintf("one leader at a time: step %d is missing or doubled", i+1)
		case s.fence < fence:
			return false, fmt.Sprintf("one leader at a time: step %d has number %d after %d", s.position, s.fence, fence)
		case leaderOf[s.fence] != s.leader:
			return false, fmt.Sprintf("one leader at a time: step %d is of %s with number %d, which it never got", s.position, s.leader, s.fence)
		}
		fence = s.fence
	}
	if len(leaders) != projectors || len(f.steps) == 0 {
		return false, fmt.Sprintf("%s led, of %d; %s", plural(len(leaders), "process"), projectors, plural(len(f.steps), "step"))
	}
	return true, fmt.Sprintf("one leader at a time, by fencing number: %s; %s, none lost or out of order",
		strings.Join(numbered, ", "), plural(len(f.steps), "step"))
}

// successor is who led after the kill.
func (f facts) successor() (killed, next Event) {
	for _, e := range f.events {
		switch {
		case e.Kind == kindKilled:
			killed = e
		case e.Kind == kindLeading && killed.Kind != "":
			return killed, e
		}
	}
	return killed, next
}

func (f facts) killedLeaderReplaced() (bool, string) {
	killed, next := f.successor()
	if next.Kind == "" || next.Fence <= killed.Fence || next.Process == killed.Victim {
		return false, "nobody took over from the killed leader with a larger fencing number"
	}
	return true, fmt.Sprintf("%s took over %.0f ms after %s was killed", next.Process, next.MS-killed.MS, killed.Victim)
}

// takeover is how long nobody led after the kill, in milliseconds.
func takeover(events []Event) float64 {
	killed, next := facts{events: events}.successor()
	return next.MS - killed.MS
}

func (f facts) lateWriteRefused() (bool, string) {
	killed := f.of(kindKilled)
	late := f.of(kindLate)
	if len(killed) != 1 || len(late) != 1 || late[0].Fence != killed[0].Fence || late[0].Rows != 0 {
		return false, "a late write with the killed leader's fencing number must be refused"
	}
	return true, fmt.Sprintf("a late write with the killed leader's fencing number %d was refused", late[0].Fence)
}

func (f facts) nothingLeftLocked() (bool, string) {
	if len(f.held) > 0 {
		return false, "still in the server's lock view: " + strings.Join(f.held, "; ")
	}
	return true, "no lock is left in the server's lock view"
}

const (
	// The server may need a moment to notice that a process is gone.
	goneWithin = 5 * time.Second
	lookEvery  = 50 * time.Millisecond
)

// look reads from the database what the invariants are about.
func (p *play) look(ctx context.Context, f *facts) (err error) {
	f.balances = map[int]int{}
	err = p.read(ctx, fmt.Sprintf("SELECT version_id FROM %s WHERE version_id > 0 ORDER BY id", versionsTable), func(scan scan) error {
		var version int64
		err := scan(&version)
		f.applied = append(f.applied, version)
		return err
	})
	err = errors.Join(err, p.read(ctx, fmt.Sprintf("SELECT id, balance FROM %s", accountsTable), func(scan scan) error {
		var account, balance int
		err := scan(&account, &balance)
		f.balances[account] = balance
		return err
	}))
	err = errors.Join(err, p.read(ctx, fmt.Sprintf("SELECT position, fence, leader FROM %s ORDER BY position", stepsTable), func(scan scan) error {
		var s step
		err := scan(&s.position, &s.fence, &s.leader)
		f.steps = append(f.steps, s)
		return err
	}))
	if err != nil {
		return err
	}
	f.held, err = p.held(ctx)
	return err
}

type scan func(into ...any) error

func (p *play) read(ctx context.Context, query string, row func(scan scan) error) error {
	rows, err := p.db.SQL().QueryContext(ctx, query)
	if err != nil {
		return fmt.Errorf("%s: %w", query, p.db.Classify(err))
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows.Scan); err != nil {
			return fmt.Errorf("%s: %w", query, err)
		}
	}
	return rows.Err()
}

// held is what the server still shows of the locks of the processes, which are
// all gone.
func (p *play) held(ctx context.Context) ([]string, error) {
	scope := p.db.Features().Scope
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for began := time.Now(); ; {
		holdings, err := p.db.Inspect(ctx, guardKey.Resolve(scope), projectorKey.Resolve(scope))
		if err != nil {
			return nil, dblock.NewError("look for locks", p.db, []dblock.Key{guardKey, projectorKey}, err)
		}
		if len(holdings) == 0 {
			return nil, nil
		}
		if time.Since(began) > goneWithin {
			var held []string
			for _, h := range holdings {
				held = append(held, dblock.DescribeBlocker(h))
			}
			return held, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
