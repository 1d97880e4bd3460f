package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// Diagnose runs the checks of the constructors, and looks at what else decides
// how long locks wait and live here: settings, as they are for this user and
// database, other software, and the user's privileges.
func (d *DB) Diagnose(ctx context.Context) (findings []dialect.Finding, err error) {
	p := &probe{db: d}
	defer func() { err = join(err, p.close()) }()
	return dialect.Diagnose(ctx, append(p.checks(),
		p.detail("read-only", p.readOnly),
		p.detail("cluster", p.cluster),
		p.detail("lock table", p.lockTable(dialect.Table{})),
		p.detail("once table", p.lockTable(dialect.Table{Name: dialect.OnceTable})),
		p.detail("privileges", p.privileges),
		p.detail("connections", p.connections),
		p.detail("lock memory", p.lockMemory),
		p.detail("timeouts", p.timeouts),
		p.detail("dead clients", p.deadClients),
		p.detail("deadlocks", p.deadlocks),
		p.detail("isolation", p.isolation),
		p.detail("durability", p.durability),
		p.detail("failover", p.failover),
	))
}

// detail looks only where the server is known.
func (p *probe) detail(name string, look func(ctx context.Context) (dialect.Finding, error)) dialect.Check {
	return dialect.Detail(name, classify, func(ctx context.Context) (dialect.Finding, error) {
		if p.foreign {
			return dialect.Finding{}, nil
		}
		return look(ctx)
	})
}

func (p *probe) query(ctx context.Context, query string, dest ...any) error {
	return p.a.conn.queryRow(ctx, query, nil, dest...)
}

// setting is a parameter of the server in its own unit, and as people write it.
type setting struct {
	Number float64
	Text   string
}

// settings leaves out those that the server does not have.
func (p *probe) settings(ctx context.Context, names ...string) (map[string]setting, error) {
	var text string
	err := p.query(ctx, `SELECT coalesce(json_object_agg(name, json_build_object(
			'Number', CASE WHEN vartype IN ('integer', 'real') THEN setting::float8 ELSE 0 END,
			'Text', current_setting(name))), '{}')::text
		FROM pg_settings WHERE name IN ('`+strings.Join(names, "', '")+`')`, &text)
	if err != nil {
		return nil, err
	}
	values := map[string]setting{}
	return values, json.Unmarshal([]byte(text), &values)
}

func (p *probe) readOnly(ctx context.Context) (dialect.Finding, error) {
	s, err := p.settings(ctx, "default_transaction_read_only")
	if err != nil || s["default_transaction_read_only"].Text != "on" {
		return dialect.Finding{}, err
	}
	return dialect.Finding{Level: dialect.Warning, Text: "default_transaction_read_only is on for this user or database",
		Advice: "row locks and fencing numbers write: begin their transactions READ WRITE, or change the default"}, nil
}

// cluster knows extensions with which several servers take writes. Each server
// has advisory locks of its own.
func (p *probe) cluster(ctx context.Context) (dialect.Finding, error) {
	var found string
	err := p.query(ctx, `SELECT coalesce(string_agg(extname, ', ' ORDER BY extname), '') FROM pg_extension
		WHERE extname IN ('bdr', 'citus', 'pgactive', 'spock')`, &found)
	if err != nil || found == "" {
		return dialect.Finding{}, err
	}
	return dialect.Finding{Level: dialect.Warning, Text: "several servers may take writes: extension " + found,
		Advice: "advisory locks exclude on one server only: let all who lock connect to the same one"}, nil
}

// lockTable is not looked at behind a pooler, since that takes a prepared statement.
func (p *probe) lockTable(t dialect.Table) func(ctx context.Context) (dialect.Finding, error) {
	return func(ctx context.Context) (dialect.Finding, error) {
		if p.shared {
			return dialect.Finding{}, nil
		}
		return dialect.TableFinding(ctx, p.db, t, func(ctx context.Context, privileges ...string) ([]string, error) {
			var lacks string
			err := p.query(ctx, `SELECT coalesce(string_agg(p, ','), '') FROM unnest('{`+strings.Join(privileges, ",")+`}'::text[]) AS p
				WHERE NOT has_table_privilege(to_regclass('`+strings.ReplaceAll(tableName(t), "'", "''")+`'), p)`, &lacks)
			return strings.FieldsFunc(lacks, func(c rune) bool { return c == ',' }), err
		})
	}
}

func (p *probe) privileges(ctx context.Context) (dialect.Finding, error) {
	var user string
	var may bool
	if err := p.query(ctx, "SELECT quote_ident(current_user), pg_has_role('pg_read_all_stats', 'USAGE')", &user, &may); err != nil {
		return dialect.Finding{}, err
	}
	if !may {
		return dialect.Finding{Level: dialect.Notice, Text: "who holds a lock is shown, but not what sessions of other users are doing",
			Advice: "GRANT pg_read_all_stats TO " + user}, nil
	}
	return dialect.Finding{Level: dialect.OK, Text: "who holds a lock, and what it does, is shown"}, nil
}

// crowded is the part of the connections from which on few are left.
const crowded = 0.8

func (p *probe) connections(ctx context.Context) (dialect.Finding, error) {
	var used, most, role, database int64
	err := p.query(ctx, `SELECT (SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database)::bigint,
		(SELECT sum(CASE name WHEN 'max_connections' THEN setting::bigint ELSE -setting::bigint END)
			FROM pg_settings WHERE name IN ('max_connections', 'superuser_reserved_connections', 'reserved_connections'))::bigint,
		(SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user)::bigint,
		(SELECT datconnlimit FROM pg_database WHERE datname = current_database())::bigint`, &used, &most, &role, &database)
	if err != nil {
		return dialect.Finding{}, err
	}
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("%d of %d for ordinary users are in use", used, most)}
	if role >= 0 {
		f.Text += fmt.Sprintf("; this user may have %d", role)
	}
	if database >= 0 {
		f.Text += fmt.Sprintf("; this database may have %d", database)
	}
	if float64(used) > crowded*float64(most) {
		f.Level = dialect.Warning
		f.Advice = "every session with locks takes one: raise max_connections, or make pools smaller"
	}
	return f, nil
}

// lockMemory has the formula of
// https://www.postgresql.org/docs/current/runtime-config-locks.html#GUC-MAX-LOCKS-PER-TRANSACTION.
func (p *probe) lockMemory(ctx context.Context) (dialect.Finding, error) {
	s, err := p.settings(ctx, "max_locks_per_transaction", "max_connections", "max_prepared_transactions")
	if err != nil {
		return dialect.Finding{}, err
	}
	var used int64
	if err := p.query(ctx, "SELECT count(*) FROM pg_locks WHERE NOT fastpath", &used); err != nil {
		return dialect.Finding{}, err
	}
	room := s["max_locks_per_transaction"].Number * (s["max_connections"].Number + s["max_prepared_transactions"].Number)
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("room for about %.0f advisory and table locks of all sessions, %d are held", room, used)}
	if float64(used) > crowded*room {
		f.Level, f.Advice = dialect.Warning, "when it is full all sessions fail: hold fewer keys, or raise max_locks_per_transaction"
	}
	return f, nil
}

// timeouts lists those that end a wait, a transaction or a session.
func (p *probe) timeouts(ctx context.Context) (dialect.Finding, error) {
	names := []string{"lock_timeout", "statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"}
	s, err := p.settings(ctx, names...)
	if err != nil {
		return dialect.Finding{}, err
	}
	var set []string
	for _, name := range names {
		if s[name].Number > 0 {
			set = append(set, name+" = "+s[name].Text)
		}
	}
	if set == nil {
		return dialect.Finding{Level: dialect.OK, Text: "none for this user and database"}, nil
	}
	return dialect.Finding{Level: dialect.Notice, Text: strings.Join(set, ", "),
		Advice: "dblock has its own on its sessions; your transactions, with the row locks and LockTx in them, are subject to them"}, nil
}

// patience is how long the locks of a vanished client may stay without a notice.
const patience = 15 * time.Minute

// deadClients is about the application's transactions: dblock's own sessions
// have keep-alives of their own.
// https://www.postgresql.org/docs/current/runtime-config-connection.html#RUNTIME-CONFIG-TCP
func (p *probe) deadClients(ctx context.Context) (dialect.Finding, error) {
	s, err := p.settings(ctx, "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "client_connection_check_interval")
	if err != nil {
		return dialect.Finding{}, err
	}
	after := time.Duration(s["tcp_keepalives_idle"].Number+s["tcp_keepalives_interval"].Number*s["tcp_keepalives_count"].Number) * time.Second
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("row locks of a client that vanished from the network stay for %v", after)}
	if after == 0 {
		f.Text = "row locks of a client that vanished are freed at once, on this local socket"
	}
	if _, known := s["client_connection_check_interval"]; !known {
		f.Level, f.Text = dialect.Notice, f.Text+", those of one that died in a wait until the wait ends"
		f.Advice = "PostgreSQL 14 and newer end such a wait"
	}
	if after > patience {
		f.Level = dialect.Notice
		f.Advice = "lower tcp_keepalives_idle, tcp_keepalives_interval and tcp_keepalives_count on the server; dblock does so on its own sessions"
	}
	return f, nil
}

func (p *probe) deadlocks(ctx context.Context) (dialect.Finding, error) {
	s, err := p.settings(ctx, "deadlock_timeout", "log_lock_waits")
	if err != nil {
		return dialect.Finding{}, err
	}
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("found after %s (deadlock_timeout); longer waits are logged: log_lock_waits is %s",
		s["deadlock_timeout"].Text, s["log_lock_waits"].Text)}
	if s["log_lock_waits"].Text == "off" {
		f.Text = fmt.Sprintf("found after %s (deadlock_timeout); longer waits are not logged: log_lock_waits is off", s["deadlock_timeout"].Text)
	}
	return f, nil
}

func (p *probe) isolation(ctx context.Context) (dialect.Finding, error) {
	s, err := p.settings(ctx, "default_transaction_isolation")
	if err != nil {
		return dialect.Finding{}, err
	}
	level := s["default_transaction_isolation"].Text
	f := dialect.Finding{Level: dialect.OK, Text: level + " by default"}
	if level == "repeatable read" || level == "serializable" {
		f.Level = dialect.Notice
		f.Advice = "a transaction reads as of its first statement, which LockTx is: what it reads after a wait is older than the lock; begin it READ COMMITTED"
	}
	return f, nil
}

// durability is that of fencing numbers. The sessions of advisory locks commit
// theirs durably themselves, as far as synchronous_commit goes.
func (p *probe) durability(ctx context.Context) (dialect.Finding, error) {
	s, err := p.settings(ctx, "fsync", "full_page_writes", "synchronous_commit")
	if err != nil {
		return dialect.Finding{}, err
	}
	var off []string
	for _, name := range []string{"fsync", "full_page_writes", "synchronous_commit"} {
		if s[name].Text == "off" {
			off = append(off, name)
		}
	}
	if off == nil {
		return dialect.Finding{Level: dialect.OK, Text: "what is committed, fencing numbers too, survives a crash"}, nil
	}
	f := dialect.Finding{Level: dialect.Warning, Text: strings.Join(off, ", ") + " off: a crash may take back what was committed, fencing numbers too",
		Advice: "turn it on"}
	if len(off) > 1 {
		f.Advice = "turn them on"
	}
	if off[0] == "synchronous_commit" {
		f.Level = dialect.Notice
		f.Advice = "dblock turns it on in its own sessions; turn it on in transactions that take fencing numbers of row locks"
	}
	return f, nil
}

func (p *probe) failover(ctx context.Context) (dialect.Finding, error) {
	var standbys int64
	var synchronous string
	err := p.query(ctx, "SELECT (SELECT count(*) FROM pg_stat_replication), current_setting('synchronous_standby_names')", &standbys, &synchronous)
	if err != nil {
		return dialect.Finding{}, err
	}
	if standbys == 0 {
		return dialect.Finding{Level: dialect.OK, Text: "no standby is connected"}, nil
	}
	f := dialect.Finding{Level: dialect.Notice, Text: "standbys: " + strconv.FormatInt(standbys, 10) + ", synchronous_standby_names: " + cmp.Or(synchronous, "none"),
		Advice: "a failover frees all advisory locks: guard writes by fencing numbers"}
	if synchronous == "" {
		f.Advice += ", whose latest are lost too without a synchronous standby"
	}
	return f, nil
}
