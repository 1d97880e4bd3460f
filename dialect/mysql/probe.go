package mysql

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// probe is one look at what is behind the pool: which of the two servers it is,
// and whether locks would be safe there. It sets nothing, and takes two
// connections.
type probe struct {
	db        *DB
	a, b      *sql.Conn
	doubtful  bool // what the connections hold is unknown
	version   string
	database  string
	flavor    *flavor
	variables map[string]string // one that the server does not have is empty
	foreign   bool              // neither MySQL nor MariaDB
}

// probe learns what the server is, and refuses one on which locks would not be
// safe.
func (db *DB) probe(ctx context.Context, allowUnsafe bool) (err error) {
	p := &probe{db: db}
	defer func() { err = join(err, p.close()) }()
	if err := p.identify(ctx); err != nil {
		return err
	}
	db.database, db.flavor = p.database, p.flavor
	db.rollbackOnTimeout = on(p.variables["innodb_rollback_on_timeout"])
	if allowUnsafe {
		return nil
	}
	return dialect.Probe(ctx, p.checks())
}

func (p *probe) identify(ctx context.Context) (err error) {
	if p.a, err = p.db.pool.Conn(ctx); err != nil {
		return err
	}
	var database sql.NullString
	if _, err := queryRow(ctx, p.a, "SELECT VERSION(), DATABASE()", &p.version, &database); err != nil {
		return p.db.otherServer(err)
	}
	if !database.Valid {
		return &dialect.Error{Class: dialect.Setup, Hint: "no database is selected, which the names of locks need: add its name to the DSN"}
	}
	p.database = database.String
	p.variables, err = variables(ctx, p.a, "GLOBAL", "version_comment", "innodb_rollback_on_timeout",
		"read_only", "super_read_only", "innodb_read_only", "wsrep_on", "pxc_strict_mode",
		"group_replication_group_name", "group_replication_single_primary_mode")
	p.flavor = flavorOf(p.version, p.variables["version_comment"])
	return err
}

// close gives the connections back, or destroys them if they may hold a lock.
func (p *probe) close() (err error) {
	for _, c := range []*sql.Conn{p.a, p.b} {
		switch {
		case c == nil:
		case p.doubtful:
			err = join(err, pinned.Destroy(c))
		default:
			err = join(err, c.Close())
		}
	}
	return err
}

// checks follow identify.
func (p *probe) checks() []dialect.Check {
	return []dialect.Check{
		{Name: "server", Run: p.checkServer},
		{Name: "cluster", Run: p.checkCluster},
		{Name: "primary", Run: p.checkPrimary},
		{Name: "locks", Run: p.checkLocks},
	}
}

func (p *probe) checkServer(context.Context) (dialect.Finding, error) {
	if err := refuseLookAlike(p.version, p.variables["version_comment"]); err != nil {
		p.foreign = true
		return dialect.Finding{}, err
	}
	if err := p.flavor.refuseOld(p.version); err != nil {
		return dialect.Finding{}, err
	}
	product := map[string]string{mysqlFlavor.name: "MySQL", mariadbFlavor.name: "MariaDB"}[p.flavor.name]
	return dialect.Finding{Level: dialect.OK, Text: product + " " + p.version}, nil
}

func (p *probe) checkCluster(ctx context.Context) (dialect.Finding, error) {
	if p.foreign {
		return dialect.Finding{}, nil
	}
	if err := refuseGalera(p.variables); err != nil {
		return dialect.Finding{}, err
	}
	if p.variables["group_replication_group_name"] == "" {
		return dialect.Finding{Level: dialect.OK, Text: "none: neither Galera nor Group Replication"}, nil
	}
	if err := p.refuseGroup(ctx); err != nil {
		return dialect.Finding{}, p.db.failure(ctx, err)
	}
	return dialect.Finding{Level: dialect.OK, Text: "the primary of a single-primary group"}, nil
}

// refuseGalera: https://mariadb.com/docs/galera-cluster/reference/mariadb-galera-cluster-known-limitations,
// https://docs.percona.com/percona-xtradb-cluster/latest/strict-mode.html.
func refuseGalera(variables map[string]string) error {
	if !on(variables["wsrep_on"]) && variables["pxc_strict_mode"] == "" {
		return nil
	}
	return unsafe("the server is a node of a Galera cluster, where GET_LOCK excludes on one node only", "use row locks, or make sure that all use one node")
}

// refuseGroup asks for this member's part in the group. Where the table is hidden
// from the user, or has no roles yet, the variables must do: a secondary of a
// single-primary group is read-only.
// https://dev.mysql.com/doc/refman/en/performance-schema-replication-group-members-table.html
func (p *probe) refuseGroup(ctx context.Context) error {
	var state, role string
	var primaries int
	const what, way = "the server is a member of a multi-primary group, where GET_LOCK excludes on one member only", "switch the group to single-primary mode"
	member, err := queryRow(ctx, p.a, "SELECT member_state, member_role,"+
		" (SELECT COUNT(*) FROM performance_schema.replication_group_members WHERE member_role = 'PRIMARY')"+
		" FROM performance_schema.replication_group_members WHERE member_id = @@server_uuid", &state, &role, &primaries)
	switch {
	case isNumber(err, errTableAccessDenied), isNumber(err, errUnknownColumn), isNumber(err, errNoSuchTable):
		if off(p.variables["group_replication_single_primary_mode"]) {
			return unsafe(what, way)
		}
		return nil
	case err != nil:
		return err
	case !member || state != "ONLINE":
		return unsafe(fmt.Sprintf("the server is configured for a replication group of which it is no member now (%s)", cmp.Or(state, "OFFLINE")),
			"START GROUP_REPLICATION, or connect to the group's primary")
	case primaries > 1, off(p.variables["group_replication_single_primary_mode"]):
		return unsafe(what, way)
	case role != "PRIMARY":
		return unsafe("the server is a secondary of a replication group, whose locks exclude nobody on the primary", "connect to the primary")
	}
	return nil
}

func (p *probe) checkPrimary(context.Context) (dialect.Finding, error) {
	if p.foreign {
		return dialect.Finding{}, nil
	}
	if err := refuseReadOnly(p.variables); err != nil {
		return dialect.Finding{}, err
	}
	return dialect.Finding{Level: dialect.OK, Text: "yes, it takes writes"}, nil
}

// refuseReadOnly takes a read-only server for a replica. Whether this user may
// write all the same does not matter.
func refuseReadOnly(variables map[string]string) error {
	for _, name := range []string{"read_only", "super_read_only", "innodb_read_only"} {
		if value := variables[name]; value != "" && !off(value) {
			return unsafe(fmt.Sprintf("the server has %s = %s, as replicas have, whose locks exclude nobody elsewhere", name, value), "connect to the primary")
		}
	}
	return nil
}

// otherServer recognises the error of a pool that speaks to no MySQL: it is one
// of another driver.
func (db *DB) otherServer(err error) error {
	var refused *driver.MySQLError
	if errors.As(err, &refused) || dialect.ClassOf(db.Classify(err)) != "" {
		return err
	}
	return &dialect.Error{Class: dialect.Unsupported, Err: err,
		Hint: "this is no MySQL or MariaDB: open other databases with their own package, such as dialect/postgres or dialect/sqlserver"}
}

// variables are system variables of the scope GLOBAL or SESSION, by their names.
func variables(ctx context.Context, conn *sql.Conn, scope string, names ...string) (map[string]string, error) {
	rows, err := conn.QueryContext(ctx, "SHOW "+scope+" VARIABLES WHERE Variable_name IN ('"+strings.Join(names, "', '")+"')")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	values := map[string]string{}
	for rows.Next() {
		var name, value string
		if err := rows.Scan(&name, &value); err != nil {
			return nil, err
		}
		values[strings.ToLower(name)] = value
	}
	return values, rows.Err()
}

// probePrefix begins the names that nothing but the probe locks.
const probePrefix = "dblock/probe#"

// checkLocks shows on two connections that GET_LOCK excludes. It finds functions
// that do nothing, and whatever hands one session to several clients or one
// client to several servers. A pool of a single connection has no second one to
// compare with, nor one for a session; migrations need no more.
func (p *probe) checkLocks(ctx context.Context) (dialect.Finding, error) {
	if p.foreign {
		return dialect.Finding{}, nil
	}
	if p.db.pool.Stats().MaxOpenConnections == 1 {
		return dialect.Finding{Level: dialect.Notice, Text: "not tried: that takes two connections, and the pool has one"}, nil
	}
	var err error
	if p.b, err = p.db.pool.Conn(ctx); err != nil {
		return dialect.Finding{}, err
	}
	if err := p.refuseWithoutLocks(ctx); err != nil {
		p.doubtful = true
		return dialect.Finding{}, p.db.failure(ctx, err)
	}
	return dialect.Finding{Level: dialect.OK, Text: "a lock of one session kept the other out, until it was released"}, nil
}

func (p *probe) refuseWithoutLocks(ctx context.Context) error {
	name := probePrefix + strings.ToLower(rand.Text())
	threads := map[*sql.Conn]thread{}
	for _, c := range []*sql.Conn{p.a, p.b} {
		t, err := threadOf(ctx, c)
		if err != nil {
			return err
		}
		threads[c] = t
	}
	switch a, b := threads[p.a], threads[p.b]; {
	case a == b:
		return unsafe(fmt.Sprintf("two connections share session %d", a.id), directly)
	case a.server != b.server:
		return unsafe(fmt.Sprintf("two connections lead to two servers, %s and %s, whose locks exclude nobody on the other", a.server, b.server), directly)
	}
	for _, step := range []struct {
		conn *sql.Conn
		call string
		want int64
	}{
		{p.a, "GET_LOCK('%s', 0)", 1},
		{p.b, "GET_LOCK('%s', 0)", 0},
		{p.a, "IS_USED_LOCK('%s') <=> CONNECTION_ID()", 1},
		{p.a, "RELEASE_LOCK('%s')", 1},
		{p.b, "GET_LOCK('%s', 0)", 1},
		{p.b, "RELEASE_LOCK('%s')", 1},
	} {
		if err := p.step(ctx, step.conn, threads[step.conn], fmt.Sprintf(step.call, name), step.want); err != nil {
			return err
		}
	}
	return nil
}

const directly = "connect to the server itself, past any pooler or proxy"

// step makes one call, and has the server that ran it tell who it is: a proxy may
// send what looks like a query to a replica.
func (p *probe) step(ctx context.Context, conn *sql.Conn, expected thread, call string, want int64) error {
	var got sql.NullInt64
	var ran thread
	var readOnly string
	_, err := queryRow(ctx, conn, "SELECT "+call+", CONNECTION_ID(), "+serverIdentity+", @@GLOBAL.read_only", &got, &ran.id, &ran.server, &readOnly)
	var refused *driver.MySQLError
	switch {
	case errors.As(err, &refused) && dialect.ClassOf(p.db.Classify(err)) == "":
		return &dialect.Error{Class: dialect.Unsafe, Code: strconv.Itoa(int(refused.Number)), Err: fmt.Errorf("%s: %w", call, err),
			Hint: "the server's advisory locks do not work: use row locks only, where it has them; " + allowed}
	case err != nil:
		return err
	case ran != expected:
		return unsafe(fmt.Sprintf("session %d of %s answered instead of session %d of %s", ran.id, ran.server, expected.id, expected.server), directly)
	case !off(readOnly) && refuseReadOnly(p.variables) == nil:
		return unsafe(fmt.Sprintf("%s ran on %s, which has read_only = %s", call, ran.server, readOnly), directly)
	case !got.Valid:
		return unsafe(fmt.Sprintf("%s returned NULL instead of %d: GET_LOCK does not work here", call, want), directly)
	case got.Int64 != want:
		return unsafe(fmt.Sprintf("%s returned %d instead of %d: GET_LOCK does not exclude here, or a pooler is in between", call, got.Int64, want), directly)
	}
	return nil
}

const allowed = "Options.AllowUnsafe opens it nevertheless"

// unsafe says what makes locks unsafe, and the way out.
func unsafe(what, way string) error {
	return &dialect.Error{Class: dialect.Unsafe, Err: errors.New(what), Hint: way + "; " + allowed}
}

func on(value string) bool  { return strings.EqualFold(value, "on") || value == "1" }
func off(value string) bool { return strings.EqualFold(value, "off") || value == "0" }
