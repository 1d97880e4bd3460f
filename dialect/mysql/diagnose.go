package mysql

import (
	"cmp"
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

// Diagnose runs the checks of the constructors, and looks at what else decides
// how long locks wait and live here: settings, as the pool's sessions have them,
// and the user's privileges.
func (db *DB) Diagnose(ctx context.Context) (findings []dialect.Finding, err error) {
	p := &probe{db: db}
	defer func() { err = db.failure(ctx, join(err, p.close())) }()
	if err := p.identify(ctx); err != nil {
		return nil, err
	}
	values, err := variables(ctx, p.a, "SESSION", diagnosed...)
	if err != nil {
		return nil, err
	}
	s := settings{values: values}
	return dialect.Diagnose(ctx, append(p.checks(),
		p.detail("lock table", p.lockTable(dialect.Table{})),
		p.detail("once table", p.lockTable(dialect.Table{Name: dialect.OnceTable})),
		p.detail("privileges", p.privileges),
		p.detail("connections", func(ctx context.Context) (dialect.Finding, error) { return p.connections(ctx, s) }),
		p.detail("timeouts", s.timeouts),
		p.detail("dead clients", s.deadClients),
		p.detail("deadlocks", s.deadlocks),
		p.detail("isolation", s.isolation),
		p.detail("durability", s.durability),
		p.detail("failover", func(ctx context.Context) (dialect.Finding, error) { return p.failover(ctx, s) }),
	))
}

// detail looks only where the server is known.
func (p *probe) detail(name string, look func(ctx context.Context) (dialect.Finding, error)) dialect.Check {
	return dialect.Detail(name, p.db.failure, func(ctx context.Context) (dialect.Finding, error) {
		if p.foreign {
			return dialect.Finding{}, nil
		}
		return look(ctx)
	})
}

// settings are variables of the pool's sessions. One that the server does not
// have is empty, and 0 as a number.
type settings struct{ values map[string]string }

var diagnosed = []string{
	"wait_timeout", "idle_transaction_timeout", "idle_write_transaction_timeout", // the latter two of MariaDB
	mysqlFlavor.statementLimit, mariadbFlavor.statementLimit,
	"innodb_lock_wait_timeout", "innodb_rollback_on_timeout", "innodb_deadlock_detect",
	"max_connections", "max_user_connections",
	"transaction_isolation", "tx_isolation", mysqlFlavor.readOnly, mariadbFlavor.readOnly,
	"innodb_flush_log_at_trx_commit", "innodb_doublewrite", "log_bin", "sync_binlog",
}

func (s settings) number(name string) float64 {
	n, err := strconv.ParseFloat(s.values[name], 64)
	if err != nil {
		return 0
	}
	return n
}

func (s settings) seconds(name string) time.Duration {
	return time.Duration(s.number(name) * float64(time.Second))
}

// lockTable has the server explain what takes a privilege, which takes it too:
// https://dev.mysql.com/doc/refman/en/explain.html
func (p *probe) lockTable(t dialect.Table) func(ctx context.Context) (dialect.Finding, error) {
	table := p.db.quoted(t)
	statements := map[string]string{
		"SELECT": "SELECT id, name, fence FROM " + table,
		"INSERT": "INSERT INTO " + table + " (id, name) VALUES (0, '')",
		"UPDATE": "UPDATE " + table + " SET fence = 0 WHERE id = 0",
		"DELETE": "DELETE FROM " + table + " WHERE id = 0",
	}
	return func(ctx context.Context) (dialect.Finding, error) {
		return dialect.TableFinding(ctx, p.db, t, func(ctx context.Context, privileges ...string) (lacks []string, err error) {
			for _, privilege := range privileges {
				_, err := p.a.ExecContext(ctx, "EXPLAIN "+statements[privilege])
				switch {
				case isNumber(err, errTableAccessDenied), isNumber(err, errColumnAccessDenied):
					lacks = append(lacks, privilege)
				case err != nil:
					return nil, err
				}
			}
			return lacks, nil
		})
	}
}

// privileges tries what `dblock ls` does.
func (p *probe) privileges(ctx context.Context) (dialect.Finding, error) {
	_, err := p.db.flavor.inspect(ctx, p.a, nil)
	var e *dialect.Error
	switch {
	case err == nil:
		return dialect.Finding{Level: dialect.OK, Text: "who holds a lock is shown by `dblock ls`"}, nil
	case errors.As(p.db.failure(ctx, err), &e) && (e.Class == dialect.Denied || e.Class == dialect.Setup):
		return dialect.Finding{Level: dialect.Notice, Text: "`dblock ls` does not show this user who holds a lock; an acquire that fails names its holder all the same", Advice: e.Hint}, nil
	}
	return dialect.Finding{}, err
}

// crowded is the part of the connections from which on few are left.
const crowded = 0.8

func (p *probe) connections(ctx context.Context, s settings) (dialect.Finding, error) {
	var name string
	var used int64
	if _, err := queryRow(ctx, p.a, "SHOW GLOBAL STATUS LIKE 'Threads_connected'", &name, &used); err != nil {
		return dialect.Finding{}, err
	}
	most := s.number("max_connections")
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("%d of %.0f are in use", used, most)}
	if own := s.number("max_user_connections"); own > 0 {
		f.Text += fmt.Sprintf("; this user may have %.0f", own)
	}
	if float64(used) > crowded*most {
		f.Level = dialect.Warning
		f.Advice = "every session with locks takes one: raise max_connections, or make pools smaller"
	}
	return f, nil
}

func (s settings) timeouts(context.Context) (dialect.Finding, error) {
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("row locks wait for %v at most (innodb_lock_wait_timeout)", s.seconds("innodb_lock_wait_timeout"))}
	for _, name := range []string{mysqlFlavor.statementLimit, mariadbFlavor.statementLimit} {
		if s.number(name) > 0 {
			f.Level = dialect.Notice
			f.Text += ", " + name + " = " + s.values[name]
			f.Advice = "dblock lifts it on its own sessions; the statements of your transactions end by it"
		}
	}
	if on(s.values["innodb_rollback_on_timeout"]) {
		f.Level = dialect.Notice
		f.Text += ", and then cost the transaction (innodb_rollback_on_timeout)"
	}
	return f, nil
}

const (
	// patience is how long the locks of a vanished client may stay without a notice.
	patience = 15 * time.Minute
	// hurry is what connections in a pool outlast seldom.
	hurry = time.Minute
)

// deadClients is about the application's transactions: for its own sessions
// dblock sets wait_timeout itself.
func (s settings) deadClients(context.Context) (dialect.Finding, error) {
	name := "wait_timeout"
	for _, shorter := range []string{"idle_transaction_timeout", "idle_write_transaction_timeout"} {
		if n := s.number(shorter); n > 0 && n < s.number(name) {
			name = shorter
		}
	}
	after := s.seconds(name)
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("row locks of a client that vanished from the network stay for %v (%s)", after, name)}
	switch {
	case after > patience:
		f.Level = dialect.Notice
		f.Advice = "lower wait_timeout for the application's connections, to 10 min for instance, and let its pool close idle ones earlier; dblock does so on its own sessions"
	case after < hurry:
		f.Level = dialect.Notice
		f.Advice = "transactions of yours that pause for longer are ended, and their locks freed"
	}
	return f, nil
}

func (s settings) deadlocks(context.Context) (dialect.Finding, error) {
	if off(s.values["innodb_deadlock_detect"]) {
		return dialect.Finding{Level: dialect.Warning, Text: "those of row locks are not looked for: innodb_deadlock_detect is off",
			Advice: "they end by innodb_lock_wait_timeout: turn it on, or keep that short"}, nil
	}
	return dialect.Finding{Level: dialect.OK, Text: "found at once, but not those between an advisory lock and a row lock"}, nil
}

func (s settings) isolation(context.Context) (dialect.Finding, error) {
	level := strings.ReplaceAll(cmp.Or(s.values["transaction_isolation"], s.values["tx_isolation"]), "-", " ")
	f := dialect.Finding{Level: dialect.OK, Text: level + " by default"}
	if level != "READ COMMITTED" {
		f.Level = dialect.Notice
		f.Advice = "a transaction reads as of its first plain SELECT: lock before it, or begin READ COMMITTED, which also locks fewer rows"
	}
	for _, name := range []string{mysqlFlavor.readOnly, mariadbFlavor.readOnly} {
		if on(s.values[name]) {
			return dialect.Finding{Level: dialect.Warning, Text: f.Text + ", and read-only (" + name + ")",
				Advice: "row locks write: begin their transactions READ WRITE, or change the default"}, nil
		}
	}
	return f, nil
}

// durability is that of fencing numbers.
func (s settings) durability(context.Context) (dialect.Finding, error) {
	var lossy []string
	if s.values["innodb_flush_log_at_trx_commit"] != "1" {
		lossy = append(lossy, "innodb_flush_log_at_trx_commit = "+s.values["innodb_flush_log_at_trx_commit"])
	}
	if off(s.values["innodb_doublewrite"]) {
		lossy = append(lossy, "innodb_doublewrite = "+s.values["innodb_doublewrite"])
	}
	if lossy != nil {
		return dialect.Finding{Level: dialect.Warning, Text: strings.Join(lossy, ", ") + ": a crash may take back what was committed, fencing numbers too",
			Advice: "set innodb_flush_log_at_trx_commit = 1 and innodb_doublewrite = ON"}, nil
	}
	if on(s.values["log_bin"]) && s.values["sync_binlog"] != "1" {
		return dialect.Finding{Level: dialect.Notice, Text: "sync_binlog = " + s.values["sync_binlog"] + ": after a crash replicas may differ in what was committed last, fencing numbers too",
			Advice: "set sync_binlog = 1"}, nil
	}
	return dialect.Finding{Level: dialect.OK, Text: "what is committed, fencing numbers too, survives a crash"}, nil
}

// failover looks for replicas, whose number takes a privilege.
// https://dev.mysql.com/doc/refman/en/show-replicas.html,
// https://mariadb.com/docs/server/reference/sql-statements/administrative-sql-statements/show/show-replica-hosts
func (p *probe) failover(ctx context.Context, s settings) (dialect.Finding, error) {
	if !on(s.values["log_bin"]) {
		return dialect.Finding{Level: dialect.OK, Text: "no replica can follow: the server writes no binary log"}, nil
	}
	n, err := p.replicas(ctx)
	switch {
	case isNumber(err, errSpecificAccessDenied):
		return dialect.Finding{Level: dialect.Notice, Text: "replicas may follow; they are not shown to this user", Advice: failoverAdvice}, nil
	case err != nil:
		return dialect.Finding{}, err
	case n == 0:
		return dialect.Finding{Level: dialect.OK, Text: "no replica is connected"}, nil
	}
	return dialect.Finding{Level: dialect.Notice, Text: fmt.Sprintf("replicas: %d", n), Advice: failoverAdvice}, nil
}

const failoverAdvice = "a failover frees all advisory locks: guard writes by fencing numbers, whose latest may be lost too"

// replicas counts them. The statement's newer form came with MySQL 8.0.22.
func (p *probe) replicas(ctx context.Context) (n int, err error) {
	statement := "SHOW REPLICAS"
	if p.flavor == &mariadbFlavor || slices.Compare(numbers(p.version), []int{8, 0, 22}) < 0 {
		statement = "SHOW SLAVE HOSTS"
	}
	rows, err := p.a.QueryContext(ctx, statement)
	if err != nil {
		return 0, err
	}
	defer func(rows *sql.Rows) { err = join(err, rows.Close()) }(rows)
	for rows.Next() {
		n++
	}
	return n, rows.Err()
}
