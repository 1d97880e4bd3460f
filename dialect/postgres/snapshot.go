package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// snapshotQuery reads each view once, pg_locks, as the server does, at one moment:
// https://www.postgresql.org/docs/current/view-pg-locks.html,
// https://www.postgresql.org/docs/current/monitoring-stats.html#MONITORING-PG-STAT-ACTIVITY-VIEW.
// It does not ask pg_blocking_pids, which looks anew for each waiter: where locks change
// hands all the time, the answers for two of them would make a cycle that never was.
// Who waits for a row waits for its holder's transaction, and meanwhile holds the
// row's place in line, which tells which one it is. Parallel workers are their leader.
const snapshotQuery = `WITH a AS MATERIALIZED (
		SELECT *, coalesce((to_jsonb(s) ->> 'leader_pid')::int, pid) AS leader FROM pg_stat_activity AS s
	), l AS MATERIALIZED (
		SELECT *, ROW(locktype, database, relation, page, tuple, virtualxid, transactionid, classid, objid, objsubid)::text AS target FROM pg_locks
	), t AS MATERIALIZED (
		SELECT pid, relation, page, tuple FROM l WHERE locktype = 'tuple' AND granted
	), w AS MATERIALIZED (
		SELECT a.leader AS pid, l.target, l.locktype, l.classid, l.objid, l.objsubid, coalesce(l.relation, t.relation) AS relation,
			coalesce(l.page, t.page) AS page, coalesce(l.tuple, t.tuple) AS tuple, l.transactionid, l.mode,
			coalesce((to_jsonb(l) ->> 'waitstart')::timestamptz, a.query_start) AS since
		FROM l JOIN a USING (pid)
		LEFT JOIN t ON l.locktype = 'transactionid' AND t.pid = l.pid
		WHERE NOT l.granted AND a.datname = current_database() AND a.application_name IS DISTINCT FROM '` + probeApplication + `'
	), h AS MATERIALIZED (
		SELECT coalesce(a.leader, l.pid, 0) AS pid, l.target, l.locktype, l.classid, l.objid, l.objsubid, l.relation, l.mode
		FROM l LEFT JOIN a USING (pid)
		WHERE l.granted AND a.application_name IS DISTINCT FROM '` + probeApplication + `' AND (
			l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
			OR l.target IN (SELECT target FROM w))
	)
	SELECT json_build_object('taken', clock_timestamp(),
	'held', (SELECT json_agg(json_build_object('session', pid, 'target', target, 'type', locktype, 'class', classid::bigint, 'object', objid::bigint, 'part', objsubid,
		'table', relation::regclass::text, 'mode', mode)) FROM h),
	'waiting', (SELECT json_agg(json_build_object('session', pid, 'target', target, 'type', locktype, 'class', classid::bigint, 'object', objid::bigint, 'part', objsubid,
		'table', relation::regclass::text, 'place', '(' || page || ',' || tuple || ')', 'transaction', transactionid::text, 'mode', mode, 'since', since)) FROM w),
	'sessions', (SELECT json_agg(json_build_object('id', pid, 'application', application_name, 'host', coalesce(client_hostname, host(client_addr)), 'user', usename,
		'state', coalesce(state, backend_type), 'since', backend_start, 'began', xact_start, 'statement', query))
		FROM a WHERE pid IN (SELECT pid FROM h UNION ALL SELECT pid FROM w)))`

// conflicts are the modes that are in the way of each mode, from the table in
// https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-TABLES.
var conflicts = map[string][]string{
	"AccessShareLock":          {"AccessExclusiveLock"},
	"RowShareLock":             {"ExclusiveLock", "AccessExclusiveLock"},
	"RowExclusiveLock":         {"ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"},
	"ShareUpdateExclusiveLock": {"ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"},
	"ShareLock":                {"RowExclusiveLock", "ShareUpdateExclusiveLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"},
	"ShareRowExclusiveLock":    {"RowExclusiveLock", "ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"},
	"ExclusiveLock":            {"RowShareLock", "RowExclusiveLock", "ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"},
	"AccessExclusiveLock":      {"AccessShareLock", "RowShareLock", "RowExclusiveLock", "ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"},
}

// namesWithin bounds the wait for the lock table, which may be what everybody waits for.
const namesWithin = time.Second

// hiddenStatement stands for one of another user's.
const hiddenStatement = "<insufficient privilege>"

var syntax = dialect.Syntax{Strings: `'`, Identifiers: `""`, Parameters: "$", NestedComments: true, DollarQuotes: true}

// seen is the answer to snapshotQuery.
type seen struct {
	Taken    time.Time
	Held     []seenLock
	Waiting  []seenLock
	Sessions []struct {
		ID                             int64
		Application, Host, User, State string
		Since, Began                   *time.Time
		Statement                      string
	}
}

// seenLock is a line of pg_locks.
type seenLock struct {
	Session       int64
	Target        string // whatever is locked, as one text
	Type          string
	Class, Object int64
	Part          int
	Table, Place  string
	Transaction   string
	Mode          string
	Since         *time.Time
}

// isInTheWay reports whether l, which is held or waits, is what a waiter waits for. Who came
// first goes first, unless it holds the target already.
func (l seenLock) isInTheWay(of seenLock, waits bool) bool {
	return l.Session != of.Session && slices.Contains(conflicts[of.Mode], l.Mode) && (!waits || l.cameBefore(of))
}

func (l seenLock) cameBefore(other seenLock) bool {
	return cmp.Or(instant(l.Since).Compare(instant(other.Since)), cmp.Compare(l.Session, other.Session)) < 0
}

// Snapshot reads pg_locks and pg_stat_activity in one statement; a second one asks
// the lock table, if there is one, for the names of the keys. Row locks are not in
// pg_locks, so of them only those that somebody waits for are seen. Everybody may
// see who holds and who waits; what other users do takes pg_read_all_stats.
func (d *DB) Snapshot(ctx context.Context, r dialect.SnapshotRequest) (*dialect.Snapshot, error) {
	s, err := obtain(ctx,
		func(ctx context.Context) (*dialect.Snapshot, error) { return d.snapshot(ctx, r) },
		func(*dialect.Snapshot) error { return nil })
	return s, classify(ctx, err)
}

func (d *DB) snapshot(ctx context.Context, r dialect.SnapshotRequest) (*dialect.Snapshot, error) {
	var answer []byte
	if err := d.sql.QueryRowContext(ctx, snapshotQuery).Scan(&answer); err != nil {
		return nil, err
	}
	var all seen
	if err := json.Unmarshal(answer, &all); err != nil {
		return nil, fmt.Errorf("reading the server's locks: %w", err)
	}
	s := &dialect.Snapshot{Taken: all.Taken}
	hidden := false
	since := map[int64]time.Time{}
	for _, x := range all.Sessions {
		since[x.ID] = instant(cmp.Or(x.Began, x.Since))
		if x.Statement == hiddenStatement {
			hidden, x.State, x.Statement = true, "", ""
		} else if !r.FullStatements {
			x.Statement = syntax.Redact(x.Statement)
		}
		s.Sessions = append(s.Sessions, dialect.SnapshotSession{ID: x.ID, Application: x.Application, Host: x.Host, User: x.User,
			State: x.State, Began: instant(x.Began), Statement: x.Statement})
	}
	if hidden {
		s.Gaps = append(s.Gaps, dialect.Gap{What: "what the sessions of other users are and do", Remedy: "GRANT pg_read_all_stats TO this user"})
	}
	held, waiting := byTarget(all.Held), byTarget(all.Waiting)
	blocks := map[dialect.SnapshotWait]bool{} // by whom, and what
	for _, l := range all.Waiting {
		lock := l.lock()
		lock.Waiting = true
		s.Locks = append(s.Locks, lock)
		wait := func(others []seenLock, wait bool) {
			for _, other := range others {
				if other.isInTheWay(l, wait) {
					s.Waits = append(s.Waits, dialect.SnapshotWait{Waiter: l.Session, Blocker: other.Session, Target: lock.Target})
					blocks[dialect.SnapshotWait{Blocker: other.Session, Target: lock.Target}] = true
				}
			}
		}
		wait(held[l.Target], false)
		wait(waiting[l.Target], true)
	}
	for _, l := range all.Held {
		lock := l.lock()
		lock.Since = since[lock.Session]
		if lock.Kind == dialect.KindAdvisory || lock.Kind == dialect.KindTable && blocks[dialect.SnapshotWait{Blocker: lock.Session, Target: lock.Target}] {
			s.Locks = append(s.Locks, lock)
		}
	}
	s.AddHolders()
	s.Mentioned()
	for i, x := range s.Sessions {
		if x.ID == 0 {
			s.Sessions[i].State = "prepared transaction"
		}
	}
	return s, d.nameKeys(ctx, s, r.Table)
}

func byTarget(locks []seenLock) map[string][]seenLock {
	m := map[string][]seenLock{}
	for _, l := range locks {
		m[l.Target] = append(m[l.Target], l)
	}
	return m
}

func instant(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

func (l seenLock) lock() dialect.SnapshotLock {
	held := dialect.SnapshotLock{Session: l.Session, Mode: l.Mode, Since: instant(l.Since)}
	switch {
	case l.Type == "advisory":
		held.Kind, held.Key, held.Mode = dialect.KindAdvisory, l.key(), dialect.Exclusive.String()
		if l.Mode == "ShareLock" {
			held.Mode = dialect.Shared.String()
		}
	case l.Place != "":
		held.Kind, held.Table, held.Row = dialect.KindRow, l.Table, l.Place
	case l.Type == "relation":
		held.Kind, held.Table = dialect.KindTable, l.Table
	case l.Type == "transactionid":
		held.Kind, held.Key = dialect.KindTransaction, l.Transaction
	default:
		held.Kind, held.Key, held.Table = dialect.KindOther, l.Type, l.Table
	}
	return held
}

// key is that of one bigint, or a pair of other software's.
func (l seenLock) key() string {
	if l.Part == 1 {
		return strconv.FormatInt(l.Class<<32|l.Object, 10)
	}
	return fmt.Sprintf("(%d,%d)", int32(l.Class), int32(l.Object))
}

// WriteNames commits by itself.
func (d *DB) WriteNames(ctx context.Context, t dialect.Table, rows []dialect.Key) error {
	_, err := d.sql.ExecContext(ctx, "INSERT INTO "+tableName(t)+" (id, name) SELECT DISTINCT ON (id) id, name FROM unnest($1::bigint[], $2::text[]) AS n(id, name)"+
		" ORDER BY id ON CONFLICT DO NOTHING", intArray(rows), nameArray(rows))
	return classify(ctx, err)
}

// nameKeys asks the lock table for the names of ids, be they of its own rows or of
// advisory locks, and of the rows that are waited for.
func (d *DB) nameKeys(ctx context.Context, s *dialect.Snapshot, table dialect.Table) (err error) {
	var ids []dialect.Key
	var places []string
	for _, l := range s.Locks {
		switch id, failure := strconv.ParseInt(l.Key, 10, 64); {
		case l.Kind == dialect.KindAdvisory && failure == nil:
			ids = append(ids, dialect.Key{ID: id})
		case l.Kind == dialect.KindRow:
			places = append(places, l.Row)
		}
	}
	if ids == nil && places == nil {
		return nil
	}
	// A key whose lock is fenced has a row apart.
	apart := dialect.FenceRows(ids)
	within, cancel := context.WithTimeout(ctx, namesWithin)
	defer cancel()
	rows, err := d.sql.QueryContext(within, "SELECT id, name, tableoid::regclass::text, ctid::text FROM "+tableName(table)+
		" WHERE id = ANY($1::bigint[]) OR ctid = ANY($2::tid[])", intArray(append(apart, ids...)), textArray(places))
	switch {
	case dialect.ClassOf(explain(err)) == dialect.Setup:
		return nil
	case dialect.ClassOf(explain(err)) == dialect.Denied:
		s.Gaps = append(s.Gaps, dialect.Gap{What: "the names of keys", Remedy: "GRANT SELECT ON " + tableName(table) + " TO this user"})
		return nil
	case strings.HasPrefix(sqlState(err), "42"): // syntax_error_or_access_rule_violation: no such column, no such operator
		s.Gaps = append(s.Gaps, dialect.Gap{What: "the names of keys: " + tableName(table) + " is not dblock's lock table", Remedy: "tell which table is"})
		return nil
	case err != nil && within.Err() != nil && ctx.Err() == nil:
		s.Gaps = append(s.Gaps, dialect.Gap{What: "the names of keys: " + tableName(table) + " is locked", Remedy: "look again when it is not"})
		return nil
	case err != nil:
		return err
	}
	defer func() { err = join(err, rows.Close()) }()
	names, ofRow := map[dialect.Target]string{}, map[int64]string{}
	for rows.Next() {
		var id int64
		var name, table, place string
		if err := rows.Scan(&id, &name, &table, &place); err != nil {
			return err
		}
		ofRow[id] = name
		names[dialect.Target{Kind: dialect.KindRow, Table: table, Row: place}] = name
	}
	for i, key := range ids {
		for _, row := range []int64{key.ID, apart[i].ID} {
			if name := ofRow[row]; isNameOf(key.ID, name) {
				names[dialect.Target{Kind: dialect.KindAdvisory, Key: strconv.FormatInt(key.ID, 10)}] = name
				break
			}
		}
	}
	s.Name(func(t dialect.Target) string { return names[t] })
	return rows.Err()
}

// isNameOf is false of the name in a row that is there for another key: an advisory id of
// other software's may be the number of any row. Names end with the id.
func isNameOf(id int64, name string) bool {
	return name == strconv.FormatInt(id, 10) || strings.HasSuffix(name, fmt.Sprintf("#%016x", uint64(id)))
}
