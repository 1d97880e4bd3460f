package deadlock

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// InspectOptions shape [Inspect]. The zero value, and nil, mean the defaults.
type InspectOptions struct {
	// FullStatements shows the statements of sessions as they were sent, with the
	// values in them, which may be secrets. Default: off; statements are shortened
	// to about 200 characters, and strings and numbers in them become "?".
	FullStatements bool
	// Schema and Table name the lock table, from which keys have their names where
	// the server knows only ids. Default: "locks" in the connection's default schema.
	Schema, Table string
}

// The parts of a [Snapshot].
type (
	// Session is one connection to the server.
	Session = dialect.SnapshotSession
	// Target is what is locked.
	Target = dialect.Target
	// Lock is a lock that a session holds or waits for.
	Lock = dialect.SnapshotLock
	// Wait is one session that is in the way of another: an edge of the graph.
	Wait = dialect.SnapshotWait
	// Gap is something that could not be seen, and what would show it.
	Gap = dialect.Gap
)

// Snapshot is who holds locks and who waits for them, and for whom: advisory locks,
// and those of rows and tables that somebody waits for. It can be written as JSON
// (it marshals), and by [Snapshot.Text], [Snapshot.DOT] and [Snapshot.Mermaid].
type Snapshot struct {
	// Dialect is postgres, mysql, mariadb or sqlserver.
	Dialect string `json:"dialect"`
	// Taken is when, by the server's clock where it tells.
	Taken time.Time `json:"taken"`
	// Sessions are all that hold or wait, by their ids.
	Sessions []Session `json:"sessions"`
	// Locks are sorted by what is locked, holders before waiters.
	Locks []Lock `json:"locks"`
	// Waits are the edges from waiters to blockers. Of those who queue for the same
	// target, one waits only for holders and not for all who came before it.
	Waits []Wait `json:"waits"`
	// Cycles are deadlocks: in each, every session waits for the next one, and the
	// last for the first. One that the database sees does not last; one that it
	// cannot see, as between an advisory lock and a row lock on MySQL and MariaDB,
	// ends with a timeout. Where several cycles go through the same sessions, it is
	// the shortest.
	Cycles [][]int64 `json:"cycles"`
	// Roots are the sessions that block others and do not wait themselves.
	Roots []int64 `json:"roots"`
	// Gaps are what could not be seen.
	Gaps []Gap `json:"gaps"`
}

// Inspect takes a snapshot of the locks of a database, with one statement for each
// of the views that its server has, on a connection of the pool, which those who wait for
// locks may have used up: where the pool is small, inspect with a DB of its own, and give
// ctx a deadline. PostgreSQL's is
// that of one moment; those of the others are read within milliseconds, so that a
// session may be seen in a wait that has just ended. Where that would make a
// deadlock, Inspect looks again, and believes what it saw twice. MariaDB renews some
// views when nobody has looked for 100 ms, so that snapshots are that far apart.
//
// PostgreSQL does not list row locks that nobody waits for, so no database's are
// listed. It shows the row's place (page and number) instead of its key; the other
// servers show the values of the key, or SQL Server a hash of them.
//
// What is missing for want of a privilege or a plugin is in [Snapshot.Gaps] and no
// error. Errors: [dblock.ErrInvalidOption], [dblock.ErrTimeout],
// [dblock.ErrCanceled], [dblock.ErrLost], [dblock.ErrUnavailable].
func Inspect(ctx context.Context, db dblock.DB, opts ...*InspectOptions) (*Snapshot, error) {
	switch {
	case dialect.IsNil(db):
		return nil, fmt.Errorf("dblock: inspect: %w", dialect.Invalidf("db is nil"))
	case len(opts) > 1:
		return nil, dblock.NewError("inspect", db, nil, dialect.Invalidf("%d InspectOptions: at most one", len(opts)))
	}
	var o InspectOptions
	if len(opts) == 1 && opts[0] != nil {
		o = *opts[0]
	}
	request := dialect.SnapshotRequest{Table: dialect.Table{Schema: o.Schema, Name: o.Table}, FullStatements: o.FullStatements}
	seen, err := db.Snapshot(ctx, request)
	if err != nil {
		return nil, dblock.NewError("inspect", db, nil, err)
	}
	s := analyse(db.Name(), seen)
	if len(s.Cycles) == 0 {
		return s, nil
	}
	again, err := db.Snapshot(ctx, request)
	if err != nil {
		return nil, dblock.NewError("inspect", db, nil, err)
	}
	return confirmed(db.Name(), again, seen.Waits), nil
}

// confirmed has no cycle with a wait in it that was not there before. Sessions that
// wait for each other do so for a while; those that seem to, because a lock changed
// hands between one view and the next, do not do it twice.
func confirmed(name string, seen *dialect.Snapshot, before []Wait) *Snapshot {
	for {
		s := analyse(name, seen)
		n, cyclic := len(seen.Waits), s.cyclic()
		seen.Waits = slices.DeleteFunc(seen.Waits, func(w Wait) bool {
			return cyclic[waitEdge{w.Waiter, w.Blocker}] && !slices.Contains(before, w)
		})
		if len(seen.Waits) == n {
			return s
		}
	}
}

// analyse puts everything in an order that depends on nothing but what was seen,
// so that two snapshots can be compared.
func analyse(name string, seen *dialect.Snapshot) *Snapshot {
	s := &Snapshot{Dialect: name, Taken: seen.Taken.UTC(), Sessions: notNil(seen.Sessions), Locks: notNil(seen.Locks),
		Gaps: notNil(seen.Gaps), Cycles: [][]int64{}, Roots: []int64{}}
	slices.SortFunc(s.Sessions, func(a, b Session) int { return cmp.Compare(a.ID, b.ID) })
	for i := range s.Sessions {
		s.Sessions[i].Began = s.Sessions[i].Began.UTC()
	}
	for i := range s.Locks {
		s.Locks[i].Since = s.Locks[i].Since.UTC()
	}
	slices.SortFunc(s.Locks, func(a, b Lock) int {
		return cmp.Or(compareTargets(a.Target, b.Target), compareBools(a.Waiting, b.Waiting), a.Since.Compare(b.Since),
			cmp.Compare(a.Session, b.Session), cmp.Compare(a.Mode, b.Mode))
	})
	s.Gaps = uniqueGaps(s.Gaps)
	g := newGraph(seen.Waits)
	s.Waits = notNil(g.direct())
	s.Cycles = append(s.Cycles, g.cycles()...)
	waiting := s.waiting()
	s.Roots = slices.DeleteFunc(append(s.Roots, g.roots()...), func(id int64) bool { return waiting[id] })
	return s
}

// notNil makes JSON of nothing an empty list.
func notNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// uniqueGaps: several views may lack the same privilege.
func uniqueGaps(gaps []Gap) []Gap {
	unique := gaps[:0]
	for _, g := range gaps {
		if !slices.Contains(unique, g) {
			unique = append(unique, g)
		}
	}
	return unique
}

func compareTargets(a, b Target) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Row, b.Row))
}

func compareBools(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// alone are the waits for somebody who was not seen, for want of a privilege or because
// it has just ended.
func (s *Snapshot) alone() (waits []Lock) {
	explained := inLine(s.Waits)
	for _, l := range s.Locks {
		if l.Waiting && !explained[place{l.Session, l.Target}] {
			waits = append(waits, l)
		}
	}
	return waits
}

// session finds one by its id.
func (s *Snapshot) session(id int64) Session {
	i, found := slices.BinarySearchFunc(s.Sessions, id, func(x Session, id int64) int { return cmp.Compare(x.ID, id) })
	if !found {
		return Session{ID: id}
	}
	return s.Sessions[i]
}
