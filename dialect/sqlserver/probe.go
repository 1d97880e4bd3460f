package sqlserver

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// Engine editions without application locks:
// https://learn.microsoft.com/sql/t-sql/functions/serverproperty-transact-sql
const (
	engineSynapse           = 6
	engineSynapseServerless = 11
)

// oldest is SQL Server 2012.
const oldest = 11

// probe looks at the server before anything is changed there.
func (d *DB) probe(ctx context.Context, allowUnsafe bool) error {
	if err := d.probeServer(ctx, allowUnsafe); err != nil {
		return connectError(ctx, err)
	}
	if allowUnsafe {
		return nil
	}
	return d.probeLocks(ctx)
}

func (d *DB) probeServer(ctx context.Context, allowUnsafe bool) error {
	rows, err := d.db.QueryContext(ctx, `SELECT CONVERT(nvarchar(128), SERVERPROPERTY('ProductVersion')),
	CONVERT(int, SERVERPROPERTY('EngineEdition')), DB_NAME(), CONVERT(nvarchar(128), DATABASEPROPERTYEX(DB_NAME(), 'Updateability'));`)
	if err != nil {
		return err
	}
	var version, database, updateability sql.NullString
	var engine sql.NullInt64
	if err := readOne(rows, &version, &engine, &database, &updateability); err != nil {
		return err
	}
	major, _, _ := strings.Cut(version.String, ".")
	number, err := strconv.Atoi(major)
	switch {
	case err != nil:
		return &dialect.Error{Class: dialect.Unsupported, Hint: fmt.Sprintf("this server calls itself version %q: dblock needs SQL Server 2012 or newer", version.String)}
	case number < oldest:
		return &dialect.Error{Class: dialect.Unsupported, Hint: "this is version " + version.String + ": dblock needs SQL Server 2012 (11.0) or newer"}
	case engine.Int64 == engineSynapse || engine.Int64 == engineSynapseServerless:
		return &dialect.Error{Class: dialect.Unsupported, Hint: "Azure Synapse has no application locks: lock with an SQL Server or Azure SQL database"}
	case updateability.String == "READ_ONLY" && !allowUnsafe:
		return &dialect.Error{Class: dialect.Unsafe, Hint: fmt.Sprintf(
			"the database %s is read-only here, and locks on a secondary replica exclude nobody on the primary: connect to the primary, without ApplicationIntent=ReadOnly", database.String)}
	}
	return nil
}

// probeLocks shows with two connections that a lock of one keeps the other out,
// and that it stays with the connection that took it: not so where the procedure
// does nothing, or where a proxy shares connections among clients. A pool of a
// single connection has no second one to compare with, nor one for a session.
func (d *DB) probeLocks(ctx context.Context) error {
	if d.db.Stats().MaxOpenConnections == 1 {
		return nil
	}
	a, err := d.probeSession(ctx)
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := d.probeSession(ctx)
	if err != nil {
		return err
	}
	defer b.Close()
	return probeExclusion(ctx, a, b)
}

func (d *DB) probeSession(ctx context.Context) (dialect.Session, error) {
	conn, err := d.db.Conn(ctx)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	s, err := d.OnConn(ctx, conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return s, nil
}

func probeExclusion(ctx context.Context, a, b dialect.Session) error {
	keys := []dialect.Key{{Name: "dblock-probe#" + strings.ToLower(rand.Text()), Label: "dblock's probe"}}
	try := dialect.Request{Keys: keys, Try: true}
	if a.ID() == b.ID() {
		return unsafe("two connections at once share session %d", a.ID())
	}
	if _, err := a.Acquire(ctx, try); err != nil {
		return err
	}
	switch _, err := b.Acquire(ctx, try); {
	case err == nil:
		return unsafe("two sessions got the same lock at once")
	case dialect.ClassOf(err) != dialect.NotAcquired:
		return err
	}
	switch held, err := a.Held(ctx, keys); {
	case err != nil:
		return err
	case !held:
		return unsafe("a lock was gone right after it was granted")
	}
	if err := a.Release(ctx, keys); err != nil {
		return err
	}
	if _, err := b.Acquire(ctx, try); err != nil {
		return err
	}
	return b.Release(ctx, keys)
}

func unsafe(format string, args ...any) error {
	return &dialect.Error{Class: dialect.Unsafe, Err: fmt.Errorf(format, args...),
		Hint: "connect to SQL Server directly, past any proxy or pooler"}
}
