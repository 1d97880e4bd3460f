package sqlserver

import (
	"cmp"
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

// probe is one look at what is behind the pool, before anything is changed there.
// It takes two connections.
type probe struct {
	db            *DB
	version       string // as in 16.0.4165.4
	major         int
	engine        int64 // EngineEdition
	database      string
	updateability string
	foreign       bool // no SQL Server, or none with application locks
}

// probe refuses a server on which locks would not be safe. Where that is allowed
// it still needs one that has them.
func (d *DB) probe(ctx context.Context, allowUnsafe bool) error {
	p := &probe{db: d}
	if err := p.identify(ctx); err != nil {
		return connectError(ctx, err)
	}
	checks := p.checks()
	if allowUnsafe {
		checks = checks[:1]
	}
	return dialect.Probe(ctx, checks)
}

// checks follow identify.
func (p *probe) checks() []dialect.Check {
	return []dialect.Check{
		{Name: "server", Run: p.checkServer},
		{Name: "primary", Run: p.checkPrimary},
		{Name: "locks", Run: p.checkLocks},
	}
}

func (p *probe) identify(ctx context.Context) error {
	rows, err := p.db.db.QueryContext(ctx, `SELECT CONVERT(nvarchar(128), SERVERPROPERTY('ProductVersion')),
	CONVERT(int, SERVERPROPERTY('EngineEdition')), DB_NAME(), CONVERT(nvarchar(128), DATABASEPROPERTYEX(DB_NAME(), 'Updateability'));`)
	if err != nil {
		return err
	}
	var version, database, updateability sql.NullString
	var engine sql.NullInt64
	if err := readOne(rows, &version, &engine, &database, &updateability); err != nil {
		return err
	}
	p.version, p.engine, p.database, p.updateability = version.String, engine.Int64, database.String, updateability.String
	return nil
}

// products are the engine editions that are not SQL Server itself.
var products = map[int64]string{5: "Azure SQL Database", 8: "Azure SQL Managed Instance", 9: "Azure SQL Edge", 12: "SQL database in Microsoft Fabric"}

func (p *probe) checkServer(context.Context) (dialect.Finding, error) {
	p.foreign = true
	major, _, _ := strings.Cut(p.version, ".")
	var err error
	p.major, err = strconv.Atoi(major)
	switch {
	case err != nil:
		return dialect.Finding{}, &dialect.Error{Class: dialect.Unsupported, Hint: fmt.Sprintf("this server calls itself version %q: dblock needs SQL Server 2012 or newer", p.version)}
	case p.major < oldest:
		return dialect.Finding{}, &dialect.Error{Class: dialect.Unsupported, Hint: "this is version " + p.version + ": dblock needs SQL Server 2012 (11.0) or newer"}
	case p.engine == engineSynapse || p.engine == engineSynapseServerless:
		return dialect.Finding{}, &dialect.Error{Class: dialect.Unsupported, Hint: "Azure Synapse has no application locks: lock with an SQL Server or Azure SQL database"}
	}
	p.foreign = false
	return dialect.Finding{Level: dialect.OK, Text: cmp.Or(products[p.engine], "SQL Server") + " " + p.version}, nil
}

// checkPrimary: a readable secondary of an availability group, a geo-replica and
// a database that was set READ_ONLY all call themselves so.
// https://learn.microsoft.com/sql/t-sql/functions/databasepropertyex-transact-sql
func (p *probe) checkPrimary(context.Context) (dialect.Finding, error) {
	switch {
	case p.foreign:
		return dialect.Finding{}, nil
	case p.updateability == "READ_ONLY":
		return dialect.Finding{}, &dialect.Error{Class: dialect.Unsafe, Hint: fmt.Sprintf(
			"the database %s is read-only here, and locks on a secondary replica exclude nobody on the primary: connect to the primary, without ApplicationIntent=ReadOnly", p.database)}
	}
	return dialect.Finding{Level: dialect.OK, Text: "yes, the database takes writes"}, nil
}

// checkLocks shows with two connections that a lock of one keeps the other out,
// and that it stays with the connection that took it: not so where the procedure
// does nothing, or where a proxy shares connections among clients. A pool of a
// single connection has no second one to compare with, nor one for a session.
func (p *probe) checkLocks(ctx context.Context) (f dialect.Finding, err error) {
	if p.foreign {
		return f, nil
	}
	if p.db.db.Stats().MaxOpenConnections == 1 {
		return dialect.Finding{Level: dialect.Notice, Text: "not tried: that takes two connections, and the pool has one"}, nil
	}
	var sessions [2]dialect.Session
	for i := range sessions {
		if sessions[i], err = p.db.probeSession(ctx); err != nil {
			return f, err
		}
		defer func() { err = errors.Join(err, sessions[i].Close()) }()
	}
	if err := probeExclusion(ctx, sessions[0], sessions[1]); err != nil {
		return f, err
	}
	return dialect.Finding{Level: dialect.OK, Text: "a lock of one session kept the other out, until it was released"}, nil
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
	case !held[0]:
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
