package mysql

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// Inspect lists the advisory locks of the whole server, without those of a probe
// that goes on, or those of the keys.
//
// All of them, and on MySQL the application's name, need a privilege that an
// application seldom has; the error of class Denied names it. Those of given keys
// need none, but then who waits is shown for the sessions of the same user only.
//
// On MariaDB all of them need the plugin metadata_lock_info; and of a statement
// that waits for several locks the first is shown.
func (db *DB) Inspect(ctx context.Context, keys ...dialect.Key) ([]dialect.Holding, error) {
	if err := checkKeys(keys); err != nil {
		return nil, err
	}
	conn, err := db.pool.Conn(ctx)
	if err != nil {
		return nil, db.failure(ctx, err)
	}
	defer conn.Close()
	holdings, err := db.flavor.inspect(ctx, conn, keys)
	if err != nil {
		return nil, db.failure(ctx, err)
	}
	if len(keys) == 0 {
		holdings = slices.DeleteFunc(holdings, func(h dialect.Holding) bool { return strings.HasPrefix(h.Name, probePrefix) })
	}
	slices.SortFunc(holdings, func(a, b dialect.Holding) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(place(a), place(b)), a.Since.Compare(b.Since), cmp.Compare(a.Session, b.Session))
	})
	return holdings, nil
}

// place puts holders before waiters.
func place(h dialect.Holding) int {
	if h.Waiting {
		return 1
	}
	return 0
}

// inspectMySQL needs no privilege for given keys, but shows more with it.
func inspectMySQL(ctx context.Context, conn dialect.Querier, keys []dialect.Key) ([]dialect.Holding, error) {
	holdings, err := metadataLocks(ctx, conn, keys)
	if err == nil || len(keys) == 0 {
		return holdings, err
	}
	if isNumber(err, errTableAccessDenied) || dialect.ClassOf(err) == dialect.Setup {
		return locksOf(ctx, conn, keys)
	}
	return nil, err
}

// metadataLocks reads https://dev.mysql.com/doc/refman/en/performance-schema-metadata-locks-table.html.
func metadataLocks(ctx context.Context, conn dialect.Querier, keys []dialect.Key) ([]dialect.Holding, error) {
	var enabled string
	_, err := queryRow(ctx, conn, "SELECT enabled FROM performance_schema.setup_instruments WHERE name = 'wait/lock/metadata/sql/mdl'", &enabled)
	if err != nil {
		return nil, withGrant(err, "GRANT SELECT ON performance_schema.* TO this user")
	}
	if enabled != "YES" {
		return nil, &dialect.Error{Class: dialect.Setup, Hint: "the server does not watch its locks: start it with performance_schema = ON and" +
			" UPDATE performance_schema.setup_instruments SET enabled = 'YES' WHERE name = 'wait/lock/metadata/sql/mdl'"}
	}
	query := fmt.Sprintf(`
		SELECT l.object_name, l.lock_status = 'PENDING', t.processlist_id, COALESCE(t.processlist_user, ''),
			COALESCE(t.processlist_command, ''), COALESCE(t.processlist_state, ''), COALESCE(t.processlist_time, 0),
			COALESCE(v.variable_value, a.attr_value, ''), COALESCE(s.variable_value, 0)
		FROM performance_schema.metadata_locks l
		JOIN performance_schema.threads t ON t.thread_id = l.owner_thread_id
		LEFT JOIN performance_schema.user_variables_by_thread v ON v.thread_id = t.thread_id AND v.variable_name = '%s'
		LEFT JOIN performance_schema.user_variables_by_thread s ON s.thread_id = t.thread_id AND s.variable_name = '%s'
		LEFT JOIN performance_schema.session_connect_attrs a ON a.processlist_id = t.processlist_id AND a.attr_name = 'program_name'
		WHERE l.object_type = 'USER LEVEL LOCK'`, applicationVariable, sinceVariable)
	if len(keys) > 0 {
		names := make([]string, len(keys))
		for i, key := range keys {
			names[i] = literal(key)
		}
		query += " AND l.object_name IN (" + strings.Join(names, ", ") + ")"
	}
	rows, err := conn.QueryContext(ctx, query)
	if err != nil {
		return nil, withGrant(err, "GRANT SELECT ON performance_schema.* TO this user")
	}
	defer rows.Close()
	var holdings []dialect.Holding
	for rows.Next() {
		var h dialect.Holding
		var p process
		var since float64
		if err := rows.Scan(&h.Name, &h.Waiting, &p.id, &p.user, &p.command, &p.state, &p.seconds, &h.Application, &since); err != nil {
			return nil, err
		}
		if since > 0 {
			h.Since = time.Unix(int64(since), 0)
		}
		p.describe(&h)
		holdings = append(holdings, h)
	}
	return holdings, rows.Err()
}

// inspectMariaDB asks the plugin for all locks
// (https://mariadb.com/docs/server/reference/plugins/other-plugins/metadata-lock-info-plugin),
// which knows the holders only.
func inspectMariaDB(ctx context.Context, conn dialect.Querier, keys []dialect.Key) ([]dialect.Holding, error) {
	if len(keys) > 0 {
		return locksOf(ctx, conn, keys)
	}
	// The process list would leave out the sessions of others without a word; this
	// table wants the same privilege.
	var transactions int
	if _, err := queryRow(ctx, conn, "SELECT COUNT(*) FROM information_schema.innodb_trx", &transactions); err != nil {
		return nil, withGrant(err, "GRANT PROCESS ON *.* TO this user")
	}
	rows, err := conn.QueryContext(ctx, "SELECT table_schema, thread_id FROM information_schema.metadata_lock_info WHERE lock_type = 'User lock'")
	if isNumber(err, errUnknownTable) {
		return nil, &dialect.Error{Class: dialect.Setup, Err: err, Hint: "MariaDB shows who holds locks by a plugin: INSTALL SONAME 'metadata_lock_info'"}
	}
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var holders []dialect.Holding
	for rows.Next() {
		var h dialect.Holding
		if err := rows.Scan(&h.Name, &h.Session); err != nil {
			return nil, err
		}
		holders = append(holders, h)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return withProcesses(ctx, conn, holders, nil)
}

// locksOf needs no privilege.
func locksOf(ctx context.Context, conn dialect.Querier, keys []dialect.Key) ([]dialect.Holding, error) {
	if err := checkKeys(keys); err != nil {
		return nil, err
	}
	names := make([]string, len(keys))
	for i, key := range keys {
		names[i] = key.Name
	}
	ids, err := holdersOf(ctx, conn, names)
	if err != nil {
		return nil, err
	}
	var holders []dialect.Holding
	for i, id := range ids {
		if id.Valid {
			holders = append(holders, dialect.Holding{Name: keys[i].Name, Session: id.Int64})
		}
	}
	return withProcesses(ctx, conn, holders, keys)
}

// holdersOf asks for the sessions that hold locks of the names, which may be other
// software's. It needs no privilege.
func holdersOf(ctx context.Context, conn dialect.Querier, names []string) ([]sql.NullInt64, error) {
	ids, dest, columns := make([]sql.NullInt64, len(names)), make([]any, len(names)), make([]string, len(names))
	for i, name := range names {
		dest[i], columns[i] = &ids[i], fmt.Sprintf("IS_USED_LOCK(_utf8mb4 x'%x')", name)
	}
	_, err := queryRow(ctx, conn, "SELECT "+strings.Join(columns, ", "), dest...)
	return ids, err
}

// withProcesses adds what the process list knows about the holders, and who waits
// for one of the keys, or for any.
func withProcesses(ctx context.Context, conn dialect.Querier, holders []dialect.Holding, keys []dialect.Key) ([]dialect.Holding, error) {
	processes, err := processList(ctx, conn)
	if err != nil {
		return nil, err
	}
	applications, err := programNames(ctx, conn)
	if err != nil {
		return nil, err
	}
	all := holders
	for _, p := range processes {
		if name := p.waitsFor(); name != "" && (len(keys) == 0 || slices.ContainsFunc(keys, func(k dialect.Key) bool { return k.Name == name })) {
			all = append(all, dialect.Holding{Name: name, Waiting: true, Session: p.id})
		}
	}
	for i := range all {
		h := &all[i]
		if p, ok := processes[h.Session]; ok {
			p.describe(h)
		}
		h.Application = applications[h.Session]
	}
	return all, nil
}

// stateUserLock is that of a process that waits for an advisory lock.
const stateUserLock = "User lock"

// process is a line of https://dev.mysql.com/doc/refman/en/show-processlist.html.
type process struct {
	id                               int64
	user, host, command, state, text string
	seconds                          int64 // that the session has been in its state
}

func processList(ctx context.Context, conn dialect.Querier) (map[int64]process, error) {
	rows, err := conn.QueryContext(ctx, "SHOW FULL PROCESSLIST")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	processes := map[int64]process{}
	for rows.Next() {
		var p process
		var ignored any
		var state, text sql.NullString
		var seconds sql.NullInt64
		// MariaDB has one column more: Progress.
		dest := []any{&p.id, &p.user, &p.host, &ignored, &p.command, &seconds, &state, &text}
		for len(dest) < len(columns) {
			dest = append(dest, &ignored)
		}
		if err := rows.Scan(dest...); err != nil {
			return nil, err
		}
		p.state, p.text, p.seconds = state.String, text.String, seconds.Int64
		processes[p.id] = p
	}
	return processes, rows.Err()
}

// programNames are shown to sessions of the same user without a privilege.
// https://dev.mysql.com/doc/refman/en/performance-schema-session-account-connect-attrs-table.html
func programNames(ctx context.Context, conn dialect.Querier) (map[int64]string, error) {
	rows, err := conn.QueryContext(ctx, "SELECT processlist_id, attr_value FROM performance_schema.session_account_connect_attrs"+
		" WHERE attr_name = 'program_name' AND attr_value IS NOT NULL")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	names := map[int64]string{}
	for rows.Next() {
		var id int64
		var name string
		if err := rows.Scan(&id, &name); err != nil {
			return nil, err
		}
		names[id] = name
	}
	return names, rows.Err()
}

// getLockCall finds names without quotes and backslashes in them, which have other
// meanings there, and that are not too long for a lock.
var getLockCall = regexp.MustCompile(`(?i)\bGET_LOCK\s*\(\s*(?:'([^'\\]{1,64})'|"([^"\\]{1,64})")\s*,(\s*0\s*\))?`)

// waitsFor is the name of the advisory lock that the process waits for, if any, and if
// its statement tells.
func (p process) waitsFor() string {
	name, _ := p.waitsForOneOf(func(string) bool { return false })
	return name
}

// waitsForOneOf is the first lock that the statement asks for and that the process does not
// hold yet, or the last if it seems to hold them all: the views are not of one moment. The
// name is empty where the statement has none in quotes.
func (p process) waitsForOneOf(holds func(name string) bool) (name string, waits bool) {
	if p.state != stateUserLock {
		return "", false
	}
	calls := getLockCall.FindAllStringSubmatch(p.text, -1)
	for _, call := range calls {
		if try := call[3] != ""; try {
			continue
		}
		if name = call[1] + call[2]; !holds(name) {
			break
		}
	}
	return name, name != "" || calls == nil
}

func (p process) describe(h *dialect.Holding) {
	h.Session, h.User = p.id, p.user
	switch {
	case p.command == "Sleep":
		h.State = "idle"
	case p.state != "":
		h.State = p.state
	default:
		h.State = "active"
	}
	if h.Waiting {
		h.Since = time.Now().Add(-time.Duration(p.seconds) * time.Second)
	}
}

// withGrant names the privilege that would help.
func withGrant(err error, grant string) error {
	for _, number := range []uint16{errTableAccessDenied, errSpecificAccessDenied} {
		if isNumber(err, number) {
			return &dialect.Error{Class: dialect.Denied, Code: strconv.Itoa(int(number)), Err: err, Hint: grant}
		}
	}
	return err
}
