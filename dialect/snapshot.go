package dialect

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"
)

// SnapshotRequest says what [DB.Snapshot] shall show.
type SnapshotRequest struct {
	// Table is the lock table whose rows tell the names of keys.
	Table Table
	// FullStatements shows statements as the clients sent them, values included.
	// Otherwise they go through [Syntax.Redact].
	FullStatements bool
}

// Snapshot is who holds locks and who waits for them, as the server shows it at one
// moment. What a server does not tell is empty.
//
// All advisory locks are in it, and those of rows, tables and transactions that
// somebody waits for.
type Snapshot struct {
	Taken    time.Time
	Sessions []SnapshotSession // those that the locks and waits name
	Locks    []SnapshotLock
	Waits    []SnapshotWait
	Gaps     []Gap
}

// SnapshotSession is one connection to the server. Its ID is 0 where the server
// names none, as for a prepared transaction.
type SnapshotSession struct {
	ID          int64     `json:"id"`
	Application string    `json:"application,omitempty"`
	Host        string    `json:"host,omitempty"`
	User        string    `json:"user,omitempty"`
	State       string    `json:"state,omitempty"`     // active, idle, idle in transaction, …
	Began       time.Time `json:"began,omitzero"`      // its transaction, zero if it has none
	Statement   string    `json:"statement,omitempty"` // the one that it runs, or where the server keeps it, that it ran last
}

// LockKind is what kind of thing is locked.
type LockKind string

const (
	KindAdvisory    LockKind = "advisory"    // a key
	KindRow         LockKind = "row"         // a row, or the place of one in an index
	KindTable       LockKind = "table"       // a table, as DDL locks it
	KindTransaction LockKind = "transaction" // the end of another transaction, because of a row that the server does not name
	KindOther       LockKind = "other"       // something of the server's own
)

// Target is what is locked.
type Target struct {
	Kind LockKind `json:"kind"`
	// Key is an advisory key as the server calls it: a name, or an id in decimal. Of
	// the kinds transaction and other it is what the server tells.
	Key string `json:"key,omitempty"`
	// Name is that of a key whose server knows ids only, and of the key that a row
	// of the lock table stands for, if the lock table has it.
	Name string `json:"name,omitempty"`
	// Table of a row or table lock, with the schema where that is not the default.
	Table string `json:"table,omitempty"`
	// Row is the row's key, or whatever else the server knows it by.
	Row string `json:"row,omitempty"`
}

// Describe is the target in a few words: "key account/42", "row 7 of accounts". It may
// contain whatever characters other software uses.
func (t Target) Describe() string {
	switch t.Kind {
	case KindAdvisory:
		return "key " + cmp.Or(t.Name, t.Key, "unknown")
	case KindRow:
		return strings.Join(strings.Fields("row "+cmp.Or(t.Name, t.Row)+" of "+t.Table), " ")
	case KindTable:
		return "table " + t.Table
	case KindTransaction:
		return "transaction " + t.Key
	}
	return strings.TrimSpace(t.Key + " " + t.Table)
}

// SnapshotLock is a lock that a session holds or waits for.
type SnapshotLock struct {
	Target
	Session int64     `json:"session"`
	Mode    string    `json:"mode,omitempty"` // exclusive or shared for advisory locks, else the server's word
	Waiting bool      `json:"waiting"`
	Since   time.Time `json:"since,omitzero"` // when the wait began; for a holder, when its transaction or else its session began
}

// SnapshotWait is one session that is in the way of another: because it holds the
// target, or because it came first.
type SnapshotWait struct {
	Waiter  int64 `json:"waiter"`
	Blocker int64 `json:"blocker"`
	Target
}

// Gap is something that the user of the snapshot was not allowed to see, or that
// the server does not record.
type Gap struct {
	Kind   LockKind `json:"kind,omitempty"` // of the locks that are missing; empty: details of sessions or keys are
	What   string   `json:"what"`
	Remedy string   `json:"remedy"` // the GRANT, or the plugin
}

// Namer is implemented by databases whose server knows advisory keys by their ids
// only.
type Namer interface {
	// WriteNames adds the rows to the lock table that are not there yet, so that
	// snapshots tell the names of the keys that they are the FenceRows of.
	WriteNames(ctx context.Context, t Table, rows []Key) error
}

// Mentioned drops the sessions that no lock and no wait names, and adds bare ones
// for those that the server did not list.
func (s *Snapshot) Mentioned() {
	mentioned := map[int64]bool{}
	for _, l := range s.Locks {
		mentioned[l.Session] = true
	}
	for _, w := range s.Waits {
		mentioned[w.Waiter], mentioned[w.Blocker] = true, true
	}
	s.Sessions = slices.DeleteFunc(s.Sessions, func(x SnapshotSession) bool {
		known := mentioned[x.ID]
		delete(mentioned, x.ID)
		return !known
	})
	for id := range mentioned {
		s.Sessions = append(s.Sessions, SnapshotSession{ID: id})
	}
}

// AddHolders adds what sessions in the way of others must hold, but do not by the
// locks that the server listed.
func (s *Snapshot) AddHolders() {
	type place struct {
		session int64
		target  Target
	}
	listed := map[place]bool{}
	for _, l := range s.Locks {
		listed[place{l.Session, l.Target}] = true
	}
	for _, w := range s.Waits {
		p := place{w.Blocker, w.Target}
		if w.Kind == KindAdvisory || w.Kind == KindTable || listed[p] {
			continue
		}
		listed[p] = true
		s.Locks = append(s.Locks, SnapshotLock{Target: w.Target, Session: w.Blocker})
	}
}

// Name fills in the names of what is locked, empty for what has none.
func (s *Snapshot) Name(of func(Target) string) {
	for i, l := range s.Locks {
		s.Locks[i].Name = of(l.Target)
	}
	for i, w := range s.Waits {
		s.Waits[i].Name = of(w.Target)
	}
}
