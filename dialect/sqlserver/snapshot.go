package sqlserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// locksQuery lists the application locks of the current database, and what else is
// waited for in it. It does without OBJECT_NAME and reads the catalog with NOLOCK:
// neither must wait for who changes a table.
//
// https://learn.microsoft.com/sql/relational-databases/system-dynamic-management-views/sys-dm-tran-locks-transact-sql
const locksQuery = `
SELECT RTRIM(l.resource_type), RTRIM(l.resource_description), COALESCE(n.name + '.' + o.name, ''),
	l.request_mode, l.request_status, CONVERT(bigint, l.request_session_id), COALESCE(CONVERT(varchar(20), l.lock_owner_address, 1), ''),
	DATEADD(minute, -DATEPART(tzoffset, SYSDATETIMEOFFSET()), COALESCE(t.transaction_begin_time, s.login_time))
FROM sys.dm_tran_locks AS l
LEFT JOIN sys.partitions AS p WITH (NOLOCK) ON l.resource_type IN ('KEY', 'RID', 'PAGE', 'HOBT') AND p.hobt_id = l.resource_associated_entity_id
LEFT JOIN sys.objects AS o WITH (NOLOCK) ON o.object_id = CASE l.resource_type WHEN 'OBJECT' THEN l.resource_associated_entity_id ELSE p.object_id END
LEFT JOIN sys.schemas AS n WITH (NOLOCK) ON n.schema_id = o.schema_id
LEFT JOIN sys.dm_exec_sessions AS s ON s.session_id = l.request_session_id
LEFT JOIN sys.dm_tran_active_transactions AS t ON l.request_owner_type = 'TRANSACTION' AND t.transaction_id = l.request_owner_id
WHERE l.resource_database_id = DB_ID() AND (l.resource_type = 'APPLICATION' OR l.request_status <> 'GRANT');`

// tasksQuery lists who waits for a lock, and for whom.
//
// https://learn.microsoft.com/sql/relational-databases/system-dynamic-management-views/sys-dm-os-waiting-tasks-transact-sql
const tasksQuery = `
SELECT CONVERT(bigint, w.session_id), CONVERT(bigint, w.blocking_session_id), COALESCE(CONVERT(varchar(20), w.resource_address, 1), ''), w.wait_duration_ms
FROM sys.dm_os_waiting_tasks AS w
WHERE w.wait_type LIKE 'LCK[_]%' AND w.blocking_session_id IS NOT NULL AND w.blocking_session_id <> w.session_id;`

// sessionsQuery wants how much of a statement to read, and the sessions.
//
// https://learn.microsoft.com/sql/relational-databases/system-dynamic-management-views/sys-dm-exec-sessions-transact-sql
const sessionsQuery = `
SELECT CONVERT(bigint, s.session_id), s.program_name, s.context_info, s.host_name, s.login_name,
	CASE WHEN s.status <> 'sleeping' THEN 'active' WHEN s.open_transaction_count > 0 THEN 'idle in transaction' ELSE 'idle' END,
	DATEADD(minute, -DATEPART(tzoffset, SYSDATETIMEOFFSET()), b.began), LEFT(q.text, %d)
FROM sys.dm_exec_sessions AS s
LEFT JOIN sys.dm_exec_requests AS r ON r.session_id = s.session_id
OUTER APPLY (SELECT TOP (1) c.most_recent_sql_handle AS handle FROM sys.dm_exec_connections AS c WHERE c.session_id = s.session_id) AS c
OUTER APPLY sys.dm_exec_sql_text(COALESCE(r.sql_handle, c.handle)) AS q
OUTER APPLY (SELECT MIN(t.transaction_begin_time) AS began FROM sys.dm_tran_session_transactions AS st
	JOIN sys.dm_tran_active_transactions AS t ON t.transaction_id = st.transaction_id WHERE st.session_id = s.session_id) AS b
WHERE s.session_id IN (%s);`

const (
	grantView = "GRANT VIEW SERVER STATE TO the login, on Azure SQL GRANT VIEW DATABASE STATE TO the user"
	// Of statements that will be shortened so much is read, of others all.
	shortStatement, wholeStatement = 4000, 1 << 30
)

var syntax = dialect.Syntax{Strings: `'"`, Identifiers: "[]", Parameters: "@", NestedComments: true, UnicodeSigns: true}

// Snapshot needs the permission VIEW SERVER STATE (VIEW DATABASE STATE on Azure
// SQL), without which all of it is a gap. The server shows the first 32 characters
// of a key's name, and of a row a hash of its key. A word without quotes that EXEC
// takes for a string is shown as a word.
func (d *DB) Snapshot(ctx context.Context, r dialect.SnapshotRequest) (*dialect.Snapshot, error) {
	s := &dialect.Snapshot{Taken: time.Now()}
	err := classify(ctx, d.snapshot(ctx, s, r))
	var e *dialect.Error
	if errors.As(err, &e) && e.Class == dialect.Denied {
		return &dialect.Snapshot{Taken: s.Taken, Gaps: []dialect.Gap{{Kind: dialect.KindAdvisory, What: "who holds and who waits for locks", Remedy: grantView}}}, nil
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (d *DB) snapshot(ctx context.Context, s *dialect.Snapshot, r dialect.SnapshotRequest) error {
	ofAddress := map[string]int{} // in s.Locks
	err := d.rows(ctx, locksQuery, func(rows *sql.Rows) error {
		var kind, description, table, mode, status, address string
		var since sql.NullTime
		var l dialect.SnapshotLock
		if err := rows.Scan(&kind, &description, &table, &mode, &status, &l.Session, &address, &since); err != nil {
			return err
		}
		l.Target, l.Mode, l.Waiting = target(kind, description, table), mode, status != "GRANT"
		if l.Kind == dialect.KindAdvisory {
			l.Mode = modeOf(mode).String()
		}
		if !l.Waiting && since.Valid {
			l.Since = since.Time.UTC()
		}
		if l.Waiting {
			ofAddress[address] = len(s.Locks)
		}
		s.Locks = append(s.Locks, l)
		return nil
	})
	if err != nil {
		return err
	}
	err = d.rows(ctx, tasksQuery, func(rows *sql.Rows) error {
		var w dialect.SnapshotWait
		var address string
		var milliseconds int64
		if err := rows.Scan(&w.Waiter, &w.Blocker, &address, &milliseconds); err != nil {
			return err
		}
		i, known := ofAddress[address]
		if !known {
			return nil // of another database, or granted meanwhile
		}
		s.Locks[i].Since = s.Taken.Add(-time.Duration(milliseconds) * time.Millisecond).UTC()
		w.Target = s.Locks[i].Target
		s.Waits = append(s.Waits, w)
		return nil
	})
	if err != nil {
		return err
	}
	s.AddHolders()
	s.Mentioned()
	return d.describeSessions(ctx, s, r)
}

func target(kind, description, table string) dialect.Target {
	switch kind {
	case "APPLICATION":
		return dialect.Target{Kind: dialect.KindAdvisory, Key: shownName(description)}
	case "OBJECT":
		return dialect.Target{Kind: dialect.KindTable, Table: table}
	case "KEY", "RID":
		return dialect.Target{Kind: dialect.KindRow, Table: table, Row: description}
	case "PAGE":
		return dialect.Target{Kind: dialect.KindRow, Table: table, Row: "page " + description}
	}
	return dialect.Target{Kind: dialect.KindOther, Key: strings.TrimSpace(strings.ToLower(kind) + " " + description), Table: table}
}

// describeSessions fills in what the server knows about the sessions of s.
func (d *DB) describeSessions(ctx context.Context, s *dialect.Snapshot, r dialect.SnapshotRequest) error {
	if len(s.Sessions) == 0 {
		return nil
	}
	var ids []string
	for _, x := range s.Sessions {
		ids = append(ids, strconv.FormatInt(x.ID, 10))
	}
	length := shortStatement
	if r.FullStatements {
		length = wholeStatement
	}
	return d.rows(ctx, fmt.Sprintf(sessionsQuery, length, strings.Join(ids, ", ")), func(rows *sql.Rows) error {
		var program, host, login, statement sql.NullString
		var info []byte
		var began sql.NullTime
		var x dialect.SnapshotSession
		if err := rows.Scan(&x.ID, &program, &info, &host, &login, &x.State, &began, &statement); err != nil {
			return err
		}
		x.Application, x.Host, x.User, x.Statement = applicationOf(info, program.String), host.String, login.String, statement.String
		if began.Valid {
			x.Began = began.Time.UTC()
		}
		if !r.FullStatements {
			x.Statement = syntax.Redact(x.Statement)
		}
		if i := slices.IndexFunc(s.Sessions, func(known dialect.SnapshotSession) bool { return known.ID == x.ID }); i >= 0 {
			s.Sessions[i] = x
		}
		return nil
	})
}

// rows calls with each row of one source.
func (d *DB) rows(ctx context.Context, query string, scan func(rows *sql.Rows) error) error {
	rows, err := d.db.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}
