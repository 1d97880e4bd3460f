package mysql

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// probe looks at what is behind the pool: which of the two servers it is, and
// whether locks would be safe there.
func (db *DB) probe(ctx context.Context, allowUnsafe bool) error {
	conn, err := db.pool.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	var version string
	var database sql.NullString
	if _, err := queryRow(ctx, conn, "SELECT VERSION(), DATABASE()", &version, &database); err != nil {
		return db.otherServer(err)
	}
	if !database.Valid {
		return &dialect.Error{Class: dialect.Setup, Hint: "no database is selected, which the names of locks need: add its name to the DSN"}
	}
	db.database = database.String
	variables, err := serverVariables(ctx, conn)
	if err != nil {
		return err
	}
	db.flavor = flavorOf(version, variables["version_comment"])
	db.rollbackOnTimeout = on(variables["innodb_rollback_on_timeout"])
	if allowUnsafe {
		return nil
	}
	if reason := db.flavor.unsafe(version, variables); reason != "" {
		return unsafe(reason)
	}
	return db.probeLocks(ctx, conn)
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

func serverVariables(ctx context.Context, conn *sql.Conn) (map[string]string, error) {
	rows, err := conn.QueryContext(ctx, "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version_comment', 'innodb_rollback_on_timeout',"+
		" 'read_only', 'super_read_only', 'innodb_read_only', 'wsrep_on', 'pxc_strict_mode', 'group_replication_single_primary_mode')")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	variables := map[string]string{}
	for rows.Next() {
		var name, value string
		if err := rows.Scan(&name, &value); err != nil {
			return nil, err
		}
		variables[strings.ToLower(name)] = value
	}
	return variables, rows.Err()
}

// unsafe says why locks would not be safe on the server, or nothing. A variable
// that the server does not have is empty.
func (f *flavor) unsafe(version string, variables map[string]string) string {
	if reason := lookAlike(version); reason != "" {
		return reason
	}
	if reason := f.tooOld(version); reason != "" {
		return reason
	}
	switch {
	case on(variables["wsrep_on"]), variables["pxc_strict_mode"] != "":
		// https://mariadb.com/docs/galera-cluster/reference/mariadb-galera-cluster-known-limitations
		return "GET_LOCK of a Galera cluster excludes on one node only: use row locks, or make sure that all use one node"
	case off(variables["group_replication_single_primary_mode"]):
		return "GET_LOCK of a multi-primary group excludes on one member only: switch the group to single-primary mode"
	}
	// Whether this user may write all the same does not matter: it is a replica.
	for _, name := range []string{"read_only", "super_read_only", "innodb_read_only"} {
		if value := variables[name]; value != "" && !off(value) {
			return fmt.Sprintf("the server has %s = %s, as replicas have; their locks exclude nobody elsewhere: connect to the primary", name, value)
		}
	}
	return ""
}

// probePrefix begins the names that nothing but the probe locks.
const probePrefix = "dblock/probe#"

// probeLocks shows on two connections that GET_LOCK excludes. It finds functions
// that do nothing, and whatever hands one session to several clients or one
// client to several servers. A pool of a single connection has no second one to
// compare with, nor one for a session; migrations need no more.
func (db *DB) probeLocks(ctx context.Context, a *sql.Conn) (err error) {
	if db.pool.Stats().MaxOpenConnections == 1 {
		return nil
	}
	b, err := db.pool.Conn(ctx)
	if err != nil {
		return err
	}
	defer b.Close()
	defer func() {
		if err != nil { // what they hold is unknown
			err = join(join(err, pinned.Destroy(a)), pinned.Destroy(b))
		}
	}()
	name := probePrefix + strings.ToLower(rand.Text())
	steps := []struct {
		conn *sql.Conn
		call string
		want int64
	}{
		{a, "GET_LOCK('%s', 0)", 1},
		{b, "GET_LOCK('%s', 0)", 0},
		{a, "IS_USED_LOCK('%s') <=> CONNECTION_ID()", 1},
		{a, "RELEASE_LOCK('%s')", 1},
		{b, "GET_LOCK('%s', 0)", 1},
		{b, "RELEASE_LOCK('%s')", 1},
	}
	for i, step := range steps {
		var got sql.NullInt64
		call := fmt.Sprintf(step.call, name)
		if _, err := queryRow(ctx, step.conn, "SELECT "+call, &got); err != nil {
			return err
		}
		if got != (sql.NullInt64{Int64: step.want, Valid: true}) {
			return unsafe(fmt.Sprintf("step %d of the probe, %s, returned %d instead of %d:"+
				" GET_LOCK does not exclude here, or a pooler is in between; connect to the server itself", i+1, call, got.Int64, step.want))
		}
	}
	return nil
}

func unsafe(reason string) error {
	return &dialect.Error{Class: dialect.Unsafe, Hint: reason + "; Options.AllowUnsafe opens it nevertheless"}
}

func on(value string) bool  { return strings.EqualFold(value, "on") || value == "1" }
func off(value string) bool { return strings.EqualFold(value, "off") || value == "0" }
