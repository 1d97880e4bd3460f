package mysql

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

var syntax = dialect.Syntax{Strings: `'"`, Identifiers: "``", Parameters: "@$", HashComments: true, DollarQuotes: true}

// Snapshot shows the whole server, of which advisory locks are a part. MySQL is
// asked for its performance_schema, MariaDB for its information_schema, each view
// once, within milliseconds but not at the same moment; names of the keys of rows
// are read from the lock table after that.
//
// MariaDB knows who holds tables and advisory locks, but not who waits for them:
// that is told from the statements of those whose state says that they wait. Its
// views of row locks are renewed only when nobody has looked at them for 100 ms, so
// that the snapshots of one DB are at least so far apart.
func (db *DB) Snapshot(ctx context.Context, r dialect.SnapshotRequest) (*dialect.Snapshot, error) {
	conn, err := db.pool.Conn(ctx)
	if err != nil {
		return nil, db.failure(ctx, err)
	}
	defer conn.Close()
	l := &survey{conn: conn, views: db.views, s: &dialect.Snapshot{Taken: time.Now()}, ofThread: map[int64]int64{}, rows: map[rowWait]bool{},
		sessions: map[int64]dialect.SnapshotSession{}, inState: map[int64]time.Time{}, since: map[int64]time.Time{}}
	if err := db.flavor.snapshot(ctx, l); err != nil {
		return nil, db.failure(ctx, err)
	}
	l.goOn()
	l.waitForMetadata()
	for _, x := range l.sessions {
		l.s.Sessions = append(l.s.Sessions, x)
	}
	l.s.AddHolders()
	l.s.Mentioned()
	if !r.FullStatements {
		for i, x := range l.s.Sessions {
			l.s.Sessions[i].Statement = syntax.Redact(x.Statement)
		}
	}
	if err := db.nameRows(ctx, l, r.Table); err != nil {
		return nil, db.failure(ctx, err)
	}
	return l.s, nil
}

// survey is a snapshot that is being taken.
type survey struct {
	conn     *sql.Conn
	views    innodbViews
	s        *dialect.Snapshot
	sessions map[int64]dialect.SnapshotSession
	ofThread map[int64]int64     // sessions by performance_schema's threads
	inState  map[int64]time.Time // since when sessions are in their state
	since    map[int64]time.Time // when sessions of dblock's own began
	metadata []metadataLock
	rows     map[rowWait]bool // those that are in s.Locks
}

type rowWait struct {
	session int64
	target  dialect.Target
}

// query calls with each row of one source. What this user may not read, or the
// server does not have, becomes the gap.
func (l *survey) query(ctx context.Context, query string, gap dialect.Gap, scan func(rows *sql.Rows) error) (seen bool, err error) {
	err = l.each(ctx, query, scan)
	if refused(err) {
		l.s.Gaps = append(l.s.Gaps, gap)
		return false, nil
	}
	return err == nil, err
}

func (l *survey) each(ctx context.Context, query string, scan func(rows *sql.Rows) error) (err error) {
	rows, err := l.conn.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer func() { err = join(err, rows.Close()) }()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

func refused(err error) bool {
	return slices.ContainsFunc([]uint16{errTableAccessDenied, errSpecificAccessDenied, errDatabaseAccessDenied, errUnknownTable, errNoSuchTable},
		func(number uint16) bool { return isNumber(err, number) })
}

// snapshotMySQL asks for the threads last, so that it has those of all locks that
// it saw, but of sessions that have ended.
func snapshotMySQL(ctx context.Context, l *survey) error {
	watches, err := l.watches(ctx)
	if err != nil {
		return err
	}
	if watches {
		if err := l.readMetadata(ctx); err != nil {
			return err
		}
	}
	waits, err := l.readDataLockWaits(ctx)
	if err != nil {
		return err
	}
	seen, err := l.readThreads(ctx)
	if err != nil {
		return err
	}
	for i := range l.metadata {
		l.metadata[i].session = l.ofThread[l.metadata[i].thread]
	}
	l.metadata = slices.DeleteFunc(l.metadata, func(m metadataLock) bool { return m.session == 0 }) // it has ended
	if !seen || !watches {
		// What everybody may see of their own sessions, and of the keys that these wait for.
		if err := l.readProcesses(ctx); err != nil {
			return err
		}
		if err := l.readUserLocks(ctx); err != nil {
			return err
		}
	}
	if err := l.holdOnce(ctx); err != nil {
		return err
	}
	for _, w := range waits {
		waiter, lives := l.ofThread[w.waiter]
		blocker, ofSession := l.ofThread[w.blocker]
		if lives && (ofSession || w.blocker == 0) {
			l.waitForRow(waiter, blocker, w)
		}
	}
	return nil
}

// watches reports whether MySQL records metadata locks at all, as it does by default.
func (l *survey) watches(ctx context.Context) (bool, error) {
	var enabled string
	const of = "wait/lock/metadata/sql/mdl"
	seen, err := l.query(ctx, "SELECT enabled FROM performance_schema.setup_instruments WHERE name = '"+of+"'",
		dialect.Gap{Kind: dialect.KindAdvisory, What: "who holds and who waits for advisory locks and tables", Remedy: grantPerformanceSchema},
		func(rows *sql.Rows) error { return rows.Scan(&enabled) })
	if seen && enabled != "YES" {
		l.s.Gaps = append(l.s.Gaps, dialect.Gap{Kind: dialect.KindAdvisory, What: "who holds and who waits for advisory locks and tables",
			Remedy: "performance_schema = ON in the server's configuration, and UPDATE performance_schema.setup_instruments SET enabled = 'YES' WHERE name = '" + of + "'"})
	}
	return enabled == "YES", err
}

const grantPerformanceSchema = "GRANT SELECT ON performance_schema.* TO this user"

// readMetadata reads https://dev.mysql.com/doc/refman/en/performance-schema-metadata-locks-table.html.
func (l *survey) readMetadata(ctx context.Context) error {
	_, err := l.query(ctx, "SELECT object_type, COALESCE(object_schema, ''), COALESCE(object_name, ''), lock_type, lock_status, COALESCE(owner_thread_id, 0)"+
		" FROM performance_schema.metadata_locks WHERE object_type IN ('USER LEVEL LOCK', 'TABLE', 'SCHEMA', 'GLOBAL', 'COMMIT', 'BACKUP LOCK')",
		dialect.Gap{Kind: dialect.KindAdvisory, What: "who holds and who waits for advisory locks and tables", Remedy: grantPerformanceSchema},
		func(rows *sql.Rows) error {
			var m metadataLock
			var schema, name, status string
			if err := rows.Scan(&m.object, &schema, &name, &m.mode, &status, &m.thread); err != nil {
				return err
			}
			m.pending = status != "GRANTED"
			m.target = metadataTarget(m.object, schema, name)
			l.metadata = append(l.metadata, m)
			return nil
		})
	return err
}

// dataLockWait is a line of https://dev.mysql.com/doc/refman/en/performance-schema-data-lock-waits-table.html.
type dataLockWait struct {
	waiter, blocker int64 // threads
	target          dialect.Target
	mode            string
}

// readDataLockWaits comes with what is waited for, from
// https://dev.mysql.com/doc/refman/en/performance-schema-data-locks-table.html.
func (l *survey) readDataLockWaits(ctx context.Context) (waits []dataLockWait, err error) {
	_, err = l.query(ctx, `SELECT COALESCE(w.requesting_thread_id, 0), COALESCE(w.blocking_thread_id, 0),
			r.object_schema, r.object_name, COALESCE(r.index_name, ''), r.lock_type, r.lock_mode, COALESCE(r.lock_data, '')
		FROM performance_schema.data_lock_waits AS w
		JOIN performance_schema.data_locks AS r ON r.engine_lock_id = w.requesting_engine_lock_id AND r.engine = w.engine`,
		dialect.Gap{Kind: dialect.KindRow, What: "who waits for rows", Remedy: grantPerformanceSchema + "; MySQL has the view since 8.0.1"},
		func(rows *sql.Rows) error {
			var w dataLockWait
			var schema, table, index, kind, data string
			if err := rows.Scan(&w.waiter, &w.blocker, &schema, &table, &index, &kind, &w.mode, &data); err != nil {
				return err
			}
			w.target = rowTarget(schema+"."+table, index, kind, data)
			waits = append(waits, w)
			return nil
		})
	return waits, err
}

// rowTarget: InnoDB locks the place of a row in an index; that in the primary key
// stands for the row itself.
func rowTarget(table, index, kind, data string) dialect.Target {
	if kind == "TABLE" {
		return dialect.Target{Kind: dialect.KindTable, Table: table}
	}
	if index != "" && index != "PRIMARY" {
		data = fmt.Sprintf("%s: %s", index, data)
	}
	return dialect.Target{Kind: dialect.KindRow, Table: table, Row: data}
}

// goOn leaves out waits for keys and tables that have ended meanwhile.
func (l *survey) goOn() {
	type holding struct {
		session int64
		target  dialect.Target
	}
	holds := map[holding]bool{}
	for _, m := range l.metadata {
		holds[holding{m.session, m.target}] = holds[holding{m.session, m.target}] || !m.pending
	}
	l.metadata = slices.DeleteFunc(l.metadata, func(m metadataLock) bool {
		if m.object != userLevelLock {
			return m.pending && l.isIdle(m.session)
		}
		x, known := l.sessions[m.session]
		return m.pending && (known && x.State != stateUserLock || holds[holding{m.session, m.target}])
	})
}

func (l *survey) isIdle(session int64) bool {
	return strings.HasPrefix(l.sessions[session].State, "idle")
}

func (l *survey) waitForRow(waiter, blocker int64, w dataLockWait) {
	if l.isIdle(waiter) || l.sessions[waiter].State == stateUserLock { // the wait has ended
		return
	}
	l.s.Waits = append(l.s.Waits, dialect.SnapshotWait{Waiter: waiter, Blocker: blocker, Target: w.target})
	key := rowWait{waiter, w.target}
	if l.rows[key] {
		return
	}
	l.rows[key] = true
	l.s.Locks = append(l.s.Locks, dialect.SnapshotLock{Target: w.target, Session: waiter, Mode: w.mode, Waiting: true, Since: l.inState[waiter]})
}

// readThreads reads https://dev.mysql.com/doc/refman/en/performance-schema-threads-table.html,
// with what sessions of dblock's own say of themselves.
func (l *survey) readThreads(ctx context.Context) (bool, error) {
	return l.query(ctx, fmt.Sprintf(`
		SELECT t.thread_id, t.processlist_id, COALESCE(t.processlist_user, ''), COALESCE(t.processlist_host, ''),
			COALESCE(t.processlist_command, ''), COALESCE(t.processlist_state, ''), COALESCE(t.processlist_time, 0),
			COALESCE(t.processlist_info, e.sql_text, ''), COALESCE(v.variable_value, a.attr_value, ''), COALESCE(s.variable_value, 0),
			COALESCE(x.timer_wait DIV 1000000000, -1)
		FROM performance_schema.threads AS t
		LEFT JOIN performance_schema.events_transactions_current AS x ON x.thread_id = t.thread_id AND x.state = 'ACTIVE'
		LEFT JOIN performance_schema.events_statements_current AS e ON e.thread_id = t.thread_id AND e.nesting_event_level = 0
		LEFT JOIN performance_schema.user_variables_by_thread AS v ON v.thread_id = t.thread_id AND v.variable_name = '%s'
		LEFT JOIN performance_schema.user_variables_by_thread AS s ON s.thread_id = t.thread_id AND s.variable_name = '%s'
		LEFT JOIN performance_schema.session_connect_attrs AS a ON a.processlist_id = t.processlist_id AND a.attr_name = 'program_name'
		WHERE t.type = 'FOREGROUND' AND t.processlist_id IS NOT NULL`, applicationVariable, sinceVariable),
		dialect.Gap{What: "what the sessions of other users are and do", Remedy: grantPerformanceSchema},
		func(rows *sql.Rows) error {
			var thread, transaction int64 // the latter in milliseconds
			var since float64
			var p process
			var application string
			if err := rows.Scan(&thread, &p.id, &p.user, &p.host, &p.command, &p.state, &p.seconds, &p.text, &application, &since, &transaction); err != nil {
				return err
			}
			l.ofThread[thread] = p.id
			if since > 0 {
				l.since[p.id] = time.Unix(int64(since), 0)
			}
			l.addSession(p, application)
			if transaction >= 0 {
				l.inTransaction(p.id, time.Duration(transaction)*time.Millisecond)
			}
			return nil
		})
}

func (l *survey) addSession(p process, application string) {
	var h dialect.Holding
	p.describe(&h)
	l.inState[p.id] = l.ago(p.seconds)
	l.sessions[p.id] = dialect.SnapshotSession{ID: p.id, Application: application, Host: p.host, User: p.user, State: h.State, Statement: p.text}
}

func (l *survey) ago(seconds int64) time.Time {
	return l.s.Taken.Add(-time.Duration(max(seconds, 0)) * time.Second)
}

// inTransaction tells that a session is in one, and since when if that is known.
func (l *survey) inTransaction(session int64, age time.Duration) {
	x, ok := l.sessions[session]
	if !ok {
		return
	}
	if age >= 0 {
		x.Began = l.s.Taken.Add(-age)
	}
	if x.State == "idle" {
		x.State = "idle in transaction"
	}
	l.sessions[session] = x
}

// readProcesses reads the process list, where everybody finds at least their own
// sessions.
func (l *survey) readProcesses(ctx context.Context) error {
	processes, err := processList(ctx, l.conn)
	if err != nil {
		return err
	}
	applications, err := programNames(ctx, l.conn)
	if err != nil {
		return err
	}
	for id, p := range processes {
		if _, known := l.sessions[id]; !known {
			l.addSession(p, applications[id])
		}
	}
	return nil
}

// readUserLocks finds who waits for an advisory lock among the processes, and who
// holds those that are not known yet.
func (l *survey) readUserLocks(ctx context.Context) error {
	held := map[string]bool{}
	type holding struct {
		session int64
		name    string
	}
	holds := map[holding]bool{}
	for _, m := range l.metadata {
		if m.object == userLevelLock {
			held[m.target.Key], holds[holding{m.session, m.target.Key}] = true, true
		}
	}
	var unknown []string
	for _, x := range l.sessions {
		name, waits := process{state: x.State, text: x.Statement}.waitsForOneOf(func(name string) bool { return holds[holding{x.ID, name}] })
		if !waits {
			continue
		}
		if name == "" {
			l.s.Gaps = append(l.s.Gaps, dialect.Gap{What: fmt.Sprintf("which advisory lock session %d waits for, and for whom", x.ID),
				Remedy: "its statement would tell if it had the name in quotes, and no parameter"})
		}
		target := metadataTarget(userLevelLock, "", name)
		l.metadata = append(l.metadata, metadataLock{object: userLevelLock, target: target, mode: modeExclusive, pending: true, session: x.ID})
		if name != "" && !held[name] {
			held[name] = true
			unknown = append(unknown, name)
		}
	}
	if unknown == nil {
		return nil
	}
	return l.addHolders(ctx, unknown)
}

// addHolders asks who holds advisory locks of these names at this moment.
func (l *survey) addHolders(ctx context.Context, names []string) error {
	holders, err := holdersOf(ctx, l.conn, names)
	for i, id := range holders {
		if id.Valid {
			l.metadata = append(l.metadata, metadataLock{object: userLevelLock, target: metadataTarget(userLevelLock, "", names[i]), mode: modeExclusive, session: id.Int64})
		}
	}
	return err
}

// holdOnce asks for the holders of advisory locks that several sessions seem to hold:
// these have changed hands while the view was read.
func (l *survey) holdOnce(ctx context.Context) error {
	holders := map[string]int{}
	for _, m := range l.metadata {
		if m.object == userLevelLock && !m.pending {
			holders[m.target.Key]++
		}
	}
	var doubtful []string
	for name, n := range holders {
		if n > 1 {
			doubtful = append(doubtful, name)
		}
	}
	if doubtful == nil {
		return nil
	}
	l.metadata = slices.DeleteFunc(l.metadata, func(m metadataLock) bool {
		return m.object == userLevelLock && !m.pending && holders[m.target.Key] > 1
	})
	return l.addHolders(ctx, doubtful)
}

// snapshotMariaDB reads
// https://mariadb.com/docs/server/reference/plugins/other-plugins/metadata-lock-info-plugin and
// https://mariadb.com/docs/server/reference/system-tables/information-schema/information-schema-tables/information-schema-innodb-tables/information-schema-innodb_lock_waits-table,
// the last three views from one cache, which is filled once for them all.
func snapshotMariaDB(ctx context.Context, l *survey) error {
	if err := l.views.renewed(ctx); err != nil {
		return err
	}
	defer l.views.read()
	if _, err := l.query(ctx, "SELECT lock_type, COALESCE(table_schema, ''), COALESCE(table_name, ''), lock_mode, thread_id FROM information_schema.metadata_lock_info",
		dialect.Gap{Kind: dialect.KindAdvisory, What: "who holds advisory locks, but for those that somebody waits for, and tables", Remedy: "INSTALL SONAME 'metadata_lock_info'"},
		func(rows *sql.Rows) error {
			var m metadataLock
			var kind, schema, name string
			if err := rows.Scan(&kind, &schema, &name, &m.mode, &m.session); err != nil {
				return err
			}
			m.mode = strings.TrimPrefix(m.mode, "MDL_")
			switch kind {
			case "User lock":
				m.object, schema, name, m.mode = userLevelLock, "", schema, modeExclusive
			case "Table metadata lock":
				m.object = "TABLE"
			default:
				return nil
			}
			m.target = metadataTarget(m.object, schema, name)
			l.metadata = append(l.metadata, m)
			return nil
		}); err != nil {
		return err
	}
	if err := l.readProcesses(ctx); err != nil {
		return err
	}
	if err := l.readUserLocks(ctx); err != nil {
		return err
	}
	l.waitForTables()
	sessions, err := l.readTransactions(ctx)
	if err != nil || len(sessions) < 2 { // nobody is in anybody's way, or this user may not see
		return err
	}
	type lock struct {
		target dialect.Target
		mode   string
	}
	locks := map[string]lock{}
	if _, err := l.query(ctx, "SELECT lock_id, lock_mode, lock_type, lock_table, COALESCE(lock_index, ''), COALESCE(lock_data, '') FROM information_schema.innodb_locks",
		dialect.Gap{Kind: dialect.KindRow, What: "who waits for rows", Remedy: "GRANT PROCESS ON *.* TO this user"},
		func(rows *sql.Rows) error {
			var id, mode, kind, table, index, data string
			if err := rows.Scan(&id, &mode, &kind, &table, &index, &data); err != nil {
				return err
			}
			locks[id] = lock{rowTarget(strings.ReplaceAll(table, "`", ""), index, kind, data), mode}
			return nil
		}); err != nil {
		return err
	}
	_, err = l.query(ctx, "SELECT requesting_trx_id, requested_lock_id, blocking_trx_id FROM information_schema.innodb_lock_waits",
		dialect.Gap{Kind: dialect.KindRow, What: "who waits for rows", Remedy: "GRANT PROCESS ON *.* TO this user"},
		func(rows *sql.Rows) error {
			var waiter, id, blocker string
			if err := rows.Scan(&waiter, &id, &blocker); err != nil {
				return err
			}
			if l.lives(sessions[waiter]) && (l.lives(sessions[blocker]) || sessions[blocker] == 0) {
				l.waitForRow(sessions[waiter], sessions[blocker], dataLockWait{target: locks[id].target, mode: locks[id].mode})
			}
			return nil
		})
	return err
}

// innodbViews are those of transactions and their locks. It has when they were read last,
// unless somebody reads them.
type innodbViews chan time.Time

// viewsRenewed is after how long InnoDB fills its views again: it takes 100 ms
// (https://github.com/MariaDB/server/blob/10.11/storage/innobase/trx/trx0i_s.cc), and
// must not come a moment too early.
const viewsRenewed = 105 * time.Millisecond

func newInnodbViews() innodbViews {
	v := make(innodbViews, 1)
	v <- time.Time{}
	return v
}

// renewed waits until the views will show what is now. If it succeeds, call read.
func (v innodbViews) renewed(ctx context.Context) error {
	select {
	case last := <-v:
		pause := time.NewTimer(time.Until(last.Add(viewsRenewed)))
		defer pause.Stop()
		select {
		case <-pause.C:
			return nil
		case <-ctx.Done():
			v <- last
			return ctx.Err()
		}
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (v innodbViews) read() { v <- time.Now() }

// readTransactions tells sessions by transactions.
// https://dev.mysql.com/doc/refman/en/information-schema-innodb-trx-table.html
func (l *survey) readTransactions(ctx context.Context) (sessions map[string]int64, err error) {
	// Who holds a table is in a transaction, though the view may not have it yet.
	for _, m := range l.metadata {
		if m.object == "TABLE" && !m.pending {
			l.inTransaction(m.session, -1)
		}
	}
	sessions = map[string]int64{}
	// The view has the server's own time zone.
	_, err = l.query(ctx, `SELECT trx_id, trx_mysql_thread_id, COALESCE(TIMESTAMPDIFF(SECOND, CONVERT_TZ(trx_started, 'SYSTEM', @@time_zone), NOW()), 0)
		FROM information_schema.innodb_trx`,
		dialect.Gap{Kind: dialect.KindAdvisory, What: "sessions of other users, who of them waits for what, and all that wait for rows", Remedy: "GRANT PROCESS ON *.* TO this user"},
		func(rows *sql.Rows) error {
			var id string
			var session, age int64
			if err := rows.Scan(&id, &session, &age); err != nil {
				return err
			}
			sessions[id] = session
			l.inTransaction(session, time.Duration(max(age, 0))*time.Second)
			return nil
		})
	return sessions, err
}

// lives is false of a session that a view shows although it has ended.
func (l *survey) lives(session int64) bool {
	_, ok := l.sessions[session]
	return ok
}

// namesWithin bounds the wait for the lock table, which may be what everybody waits for.
const namesWithin = time.Second

// nameRows asks the lock table for the names that belong to the rows of its own.
func (db *DB) nameRows(ctx context.Context, l *survey, table dialect.Table) error {
	schema, name := db.resolve(table)
	own := schema + "." + name
	ids := map[string]bool{}
	for _, x := range l.s.Locks {
		if _, err := strconv.ParseInt(x.Row, 10, 64); err == nil && x.Kind == dialect.KindRow && x.Table == own {
			ids[x.Row] = true
		}
	}
	if len(ids) == 0 {
		return nil
	}
	var list []string
	for id := range ids {
		list = append(list, id)
	}
	names := map[string]string{}
	within, cancel := context.WithTimeout(ctx, namesWithin)
	defer cancel()
	err := l.each(within, fmt.Sprintf("SELECT id, name FROM %s WHERE id IN (%s)", db.quoted(table), strings.Join(list, ", ")),
		func(rows *sql.Rows) error {
			var id, name string
			if err := rows.Scan(&id, &name); err != nil {
				return err
			}
			names[id] = name
			return nil
		})
	gap := dialect.Gap{What: "the names of keys"}
	switch {
	case err == nil:
	case isNumber(err, errUnknownColumn):
		gap.What += ": " + db.quoted(table) + " is not dblock's lock table"
		gap.Remedy = "tell which table is"
	case refused(err):
		gap.Remedy = "GRANT SELECT ON " + db.quoted(table) + " TO this user"
	case within.Err() != nil && ctx.Err() == nil:
		gap.What += ": " + db.quoted(table) + " is locked"
		gap.Remedy = "look again when it is not"
	default:
		return err
	}
	if gap.Remedy != "" {
		l.s.Gaps = append(l.s.Gaps, gap)
		return nil
	}
	l.s.Name(func(t dialect.Target) string {
		if t.Kind == dialect.KindRow && t.Table == own {
			return names[t.Row]
		}
		return ""
	})
	return nil
}
