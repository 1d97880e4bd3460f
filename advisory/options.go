package advisory

import (
	"cmp"
	"database/sql"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// Options shape a Locker. A nil *Options means all defaults.
type Options struct {
	// Application is the name under which the server's own views show the
	// locker's sessions. Default: "dblock".
	Application string
	// KeepAlive is the time between two signs of life on a session that is
	// otherwise idle, at least 10 ms. Where the server's end of a session is heard
	// at once (PostgreSQL through pgx) it finds dead networks only, default 5 s.
	// Elsewhere it is how soon any loss is noticed, default 500 ms and at most 5 s.
	KeepAlive time.Duration
	// AnswerWithin is how long the server may take to answer a sign of life, a
	// Check or a Release before the session counts as lost, at least 100 ms.
	// Default: 4 s.
	//
	// A network that goes dead without a word is thus noticed within KeepAlive +
	// AnswerWithin: by default 9 s on PostgreSQL through pgx, 4.5 s elsewhere. The
	// server frees the locks after that: it ends a session of which it hears
	// nothing for 2·KeepAlive + AnswerWithin + 1 s, be it of a paused process. SQL
	// Server has no such limit and frees the locks when its own TCP keep-alive
	// fails.
	AnswerWithin time.Duration
	// WaitLimit bounds every wait, of Lock, Do, InTx, OnSession, LockTx and DoTx, in
	// addition to its context. The time to connect counts.
	// Default: no limit.
	WaitLimit time.Duration
	// MaxWaits bounds the connections that wait for keys in the database, or hold what
	// they waited for. Calls beyond that try again and again, at random moments 5 to
	// 250 ms apart. Calls that wait for the same key need one connection together.
	// Default: 16.
	MaxWaits int
	// SessionPerLock gives each lock a connection of its own, for which it waits in the
	// database beside all others: nothing is passed on within the process, and a
	// connection that is lost costs one lock. Default: off.
	SessionPerLock bool
	// StatementGap is the longest time that a function of [InTx] or [OnSession] may
	// let pass between two of its statements: there are no other signs of life
	// meanwhile, and the server (not SQL Server) then ends the session, with the lock
	// and the work. It is also how long the server keeps the lock of a process that
	// vanished in such a function, where nothing else tells the server. Default: 1 min.
	StatementGap time.Duration
	// Isolation is the isolation level of the transactions that [InTx] and [DoTx] begin.
	// Default: READ COMMITTED on PostgreSQL and SQL Server, else the connection's.
	Isolation sql.IsolationLevel
	// Deadlock makes the transactions that [InTx] and [DoTx] begin more or less likely
	// victims of deadlocks, where the database has that. It costs a round trip or two for
	// each. Default: the server's.
	Deadlock deadlock.Settings
	// Retry says how often and how soon [DoTx] starts again. Default: that of
	// deadlock.Retry. Its Keys are set by DoTx, and its Observer is the one below
	// unless it has its own.
	Retry *deadlock.RetryOptions
	// Fencing draws a number from the lock table with every grant; see
	// [Lock.Token]. The table must have been set up; the numbers have rows of their
	// own in it, and wait for no row lock. Default: off.
	Fencing bool
	// Names has the name of each new key written into the lock table, in the
	// background and once, so that deadlock.Inspect, dblock graph and dblock ls can
	// tell it: PostgreSQL's own views have the id only. Where the server knows names
	// nothing is written. The table must have been set up; what cannot be written is
	// told to the Observer as an EventUnnamed and tried again later, and does not
	// matter to the locks. Default: off; the names of fenced locks are there anyway.
	Names bool
	// Schema and Table name the lock table for Fencing and Names. Default: "locks" in the
	// connection's default schema.
	Schema, Table string
	// Checker learns in which order keys are locked inside one another, for development and
	// tests. Default: none, which costs nothing.
	Checker *deadlock.Checker
	// Observer hears of waits, grants, releases and losses. Default: none.
	Observer dblock.Observer
}

const (
	keepAliveHeard   = 5 * time.Second
	keepAliveDefault = 500 * time.Millisecond
	keepAliveMin     = 10 * time.Millisecond
	// keepAliveMax is for sessions that hear nothing between heartbeats: a network
	// that is dead in one direction lets the operating system of the client end the
	// connection after 6 s, and thereby the server the session.
	keepAliveMax = 5 * time.Second

	maxWaitsDefault = 16

	answerWithinDefault = 4 * time.Second
	answerWithinMin     = 100 * time.Millisecond

	statementGapDefault = time.Minute
	statementGapMin     = time.Second // MySQL and MariaDB count in seconds
)

// resolve checks the options and fills in the defaults.
func resolve(db dblock.DB, given []*Options) (Options, error) {
	var o Options
	switch {
	case len(given) > 1:
		return o, dialect.Invalidf("give at most one Options value, not %d", len(given))
	case len(given) == 1 && given[0] != nil:
		o = *given[0]
	}
	if o.KeepAlive != 0 && o.KeepAlive < keepAliveMin {
		return o, dialect.Invalidf("KeepAlive %v: at least %v, or 0 for the default", o.KeepAlive, keepAliveMin)
	}
	if !db.Features().HearsLoss && o.KeepAlive > keepAliveMax {
		return o, dialect.Invalidf("KeepAlive %v: at most %v here, where only heartbeats notice a loss", o.KeepAlive, keepAliveMax)
	}
	if o.AnswerWithin != 0 && o.AnswerWithin < answerWithinMin {
		return o, dialect.Invalidf("AnswerWithin %v: at least %v, or 0 for the default", o.AnswerWithin, answerWithinMin)
	}
	if o.MaxWaits < 0 {
		return o, dialect.Invalidf("MaxWaits %d: must not be negative; 0 means the default", o.MaxWaits)
	}
	o.MaxWaits = cmp.Or(o.MaxWaits, maxWaitsDefault)
	if o.WaitLimit < 0 {
		return o, dialect.Invalidf("WaitLimit %v: must not be negative; 0 means no limit", o.WaitLimit)
	}
	if o.KeepAlive == 0 {
		o.KeepAlive = keepAliveDefault
		if db.Features().HearsLoss {
			o.KeepAlive = keepAliveHeard
		}
	}
	o.AnswerWithin = cmp.Or(o.AnswerWithin, answerWithinDefault)
	if o.StatementGap != 0 && o.StatementGap < statementGapMin {
		return o, dialect.Invalidf("StatementGap %v: at least %v, or 0 for the default", o.StatementGap, statementGapMin)
	}
	if o.Isolation < sql.LevelDefault || o.Isolation > sql.LevelLinearizable {
		return o, dialect.Invalidf("Isolation is %d: use a level of database/sql", o.Isolation)
	}
	if err := cmp.Or(o.Retry.Validate(), o.Deadlock.Check(db)); err != nil {
		return o, err
	}
	o.StatementGap = cmp.Or(o.StatementGap, statementGapDefault)
	if o.Application == "" {
		o.Application = "dblock"
	}
	return o, nil
}

// table is where fencing numbers come from, nil if none are wanted.
func (o *Options) table() *dialect.Table {
	if !o.Fencing {
		return nil
	}
	return &dialect.Table{Schema: o.Schema, Name: o.Table}
}
