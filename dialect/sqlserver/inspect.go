package sqlserver

import (
	"context"
	"database/sql"
	"errors"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// inspectQuery lists the application locks of the current database. Times are
// the server's local ones and made UTC here.
//
// https://learn.microsoft.com/sql/relational-databases/system-dynamic-management-views/sys-dm-tran-locks-transact-sql
const inspectQuery = `
SELECT RTRIM(l.resource_description), l.request_mode, l.request_status, CONVERT(bigint, l.request_session_id),
	s.program_name, s.context_info, s.login_name,
	CASE WHEN s.status <> 'sleeping' THEN 'active' WHEN s.open_transaction_count > 0 THEN 'idle in transaction' WHEN s.status = 'sleeping' THEN 'idle' END,
	DATEADD(minute, -DATEPART(tzoffset, SYSDATETIMEOFFSET()),
		CASE WHEN l.request_status <> 'GRANT' THEN DATEADD(second, -w.wait_duration_ms / 1000, SYSDATETIME())
			ELSE COALESCE(t.transaction_begin_time, s.login_time) END)
FROM sys.dm_tran_locks AS l
LEFT JOIN sys.dm_exec_sessions AS s ON s.session_id = l.request_session_id
LEFT JOIN sys.dm_os_waiting_tasks AS w ON w.resource_address = l.lock_owner_address AND w.session_id = l.request_session_id
LEFT JOIN sys.dm_tran_active_transactions AS t ON l.request_owner_type = 'TRANSACTION' AND t.transaction_id = l.request_owner_id
WHERE l.resource_type = 'APPLICATION' AND l.resource_database_id = DB_ID()
ORDER BY CASE l.request_status WHEN 'GRANT' THEN 0 ELSE 1 END, w.wait_duration_ms DESC;`

// shownLen is how many characters of a lock's name the server shows.
const shownLen = 32

// Inspect needs the permission VIEW SERVER STATE (VIEW DATABASE STATE on Azure
// SQL); without it the error is of class dialect.Denied.
//
// The server shows only the first 32 characters of a name. For given keys every
// lock whose shown part fits is listed under the full name of the first key that
// it fits; without keys a longer name is cut off.
func (d *DB) Inspect(ctx context.Context, keys ...dialect.Key) ([]dialect.Holding, error) {
	holdings, err := d.inspect(ctx, keys)
	if err == nil {
		return holdings, nil
	}
	err = classify(ctx, err)
	var e *dialect.Error
	if errors.As(err, &e) && e.Class == dialect.Denied {
		e.Hint = grantView
	}
	return nil, err
}

func (d *DB) inspect(ctx context.Context, keys []dialect.Key) ([]dialect.Holding, error) {
	rows, err := d.db.QueryContext(ctx, inspectQuery)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var holdings []dialect.Holding
	for rows.Next() {
		var description, mode, status string
		var program, login, state sql.NullString
		var info []byte
		var since sql.NullTime
		var h dialect.Holding
		if err := rows.Scan(&description, &mode, &status, &h.Session, &program, &info, &login, &state, &since); err != nil {
			return nil, err
		}
		var wanted bool
		if h.Name, wanted = match(shownName(description), keys); !wanted {
			continue
		}
		h.Mode = modeOf(mode)
		h.Waiting = status != "GRANT"
		h.Application = applicationOf(info, program.String)
		h.User = login.String
		h.State = state.String
		if since.Valid {
			h.Since = since.Time.UTC()
		}
		holdings = append(holdings, h)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return holdings, nil
}

// shownName reads the description of an application lock: the id of its
// principal, a colon, up to 32 characters of its name, which servers put in
// brackets, a colon and a hash in parentheses.
func shownName(description string) string {
	_, name, _ := strings.Cut(description, ":")
	if end := strings.LastIndex(name, ":("); end >= 0 {
		name = name[:end]
	}
	if inner, ok := strings.CutPrefix(name, "["); ok {
		name = strings.TrimSuffix(inner, "]")
	}
	return name
}

// match finds the key that a shown name stands for. Without keys every name is
// wanted.
func match(shown string, keys []dialect.Key) (name string, wanted bool) {
	for _, k := range keys {
		if shown == k.Name || len(shown) == shownLen && strings.HasPrefix(k.Name, shown) {
			return k.Name, true
		}
	}
	return shown, len(keys) == 0
}

// modeOf: application locks of other software may have modes that dblock does
// not take; those that some others share count as shared.
func modeOf(mode string) dialect.Mode {
	if mode == "S" || mode == "IS" {
		return dialect.Shared
	}
	return dialect.Exclusive
}
