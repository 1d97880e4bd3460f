package postgres

import (
	"context"
	"database/sql"

	"github.com/dblock-go/dblock/dialect"
)

// advisoryLocks are the locks on keys of one bigint in this database, from
// https://www.postgresql.org/docs/current/view-pg-locks.html: classid holds the
// high half of the key, objid the low one. waitstart came with PostgreSQL 14.
const advisoryLocks = `SELECT (l.classid::bigint << 32) | l.objid::bigint AS id, l.mode = 'ShareLock' AS shared,
	l.granted, l.pid, (to_jsonb(l) ->> 'waitstart')::timestamptz AS waitstart
	FROM pg_locks AS l
	WHERE l.locktype = 'advisory' AND l.objsubid = 1
	AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())`

// Inspect lists the advisory locks of one bigint, dblock's and others', holders
// before waiters. Those by which a constructor tries the server are left out,
// unless they are for keys that were asked for. What a session does is hidden
// from users who are neither its owner nor a member of pg_read_all_stats.
func (d *DB) Inspect(ctx context.Context, keys ...dialect.Key) ([]dialect.Holding, error) {
	holdings, err := obtain(ctx,
		func(ctx context.Context) ([]dialect.Holding, error) { return d.inspect(ctx, keys) },
		func([]dialect.Holding) error { return nil })
	return holdings, classify(ctx, err)
}

func (d *DB) inspect(ctx context.Context, keys []dialect.Key) (holdings []dialect.Holding, err error) {
	rows, err := d.sql.QueryContext(ctx, `SELECT l.id, l.shared, NOT l.granted, coalesce(l.pid, 0),
		coalesce(a.application_name, ''), coalesce(a.usename, ''), coalesce(a.state, ''),
		CASE WHEN l.granted THEN coalesce(a.xact_start, a.backend_start) ELSE coalesce(l.waitstart, a.query_start) END AS since
		FROM (`+advisoryLocks+`) AS l LEFT JOIN pg_stat_activity AS a USING (pid)
		WHERE l.id = ANY($1::bigint[]) OR $1::bigint[] = '{}' AND a.application_name IS DISTINCT FROM '`+probeApplication+`'
		ORDER BY l.id, l.granted DESC, since, l.pid`, intArray(keys))
	if err != nil {
		return nil, classify(ctx, err)
	}
	defer func() { err = classify(ctx, join(err, rows.Close())) }()
	for rows.Next() {
		var h dialect.Holding
		var shared bool
		var since sql.NullTime
		if err := rows.Scan(&h.ID, &shared, &h.Waiting, &h.Session, &h.Application, &h.User, &h.State, &since); err != nil {
			return nil, err
		}
		if shared {
			h.Mode = dialect.Shared
		}
		h.Since = since.Time
		holdings = append(holdings, h)
	}
	return holdings, rows.Err()
}
