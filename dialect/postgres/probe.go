package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// probe is one look at what is behind the pool: is it PostgreSQL and a primary,
// has each client a server session of its own, do locks lock? It sets nothing
// there, and takes two connections.
type probe struct {
	db      *DB
	a, b    *session
	version string
	host    string // as configured, empty where the driver is not pgx
	port    uint16
	// announced is the process that the protocol's BackendKeyData named on the
	// latest connection, 0 where the driver does not tell.
	announced int64
	pooler    bool // which announced itself instead of the server's process
	foreign   bool // not PostgreSQL, or none that can be asked further
	shared    bool // several clients share a server process
}

// probe refuses what locks would not be safe on.
func (d *DB) probe(ctx context.Context) (err error) {
	p := &probe{db: d}
	defer func() { err = join(err, p.close()) }()
	if err := dialect.Probe(ctx, p.checks()); err != nil {
		return err
	}
	d.pooler = p.pooler
	return nil
}

// checks are in the order in which they need each other.
func (p *probe) checks() []dialect.Check {
	return []dialect.Check{
		{Name: "server", Run: p.checkServer},
		{Name: "primary", Run: p.checkPrimary},
		{Name: "pooler", Run: p.checkPooler},
		{Name: "locks", Run: p.checkLocks},
	}
}

func (p *probe) close() (err error) {
	for _, s := range []*session{p.a, p.b} {
		if s != nil {
			err = join(err, s.close())
		}
	}
	return err
}

func (p *probe) checkServer(ctx context.Context) (dialect.Finding, error) {
	p.foreign = true // until it is known better
	var err error
	if p.a, err = p.connect(ctx); err != nil {
		return dialect.Finding{}, err
	}
	if err := p.a.conn.queryRow(ctx, "SELECT version()", nil, &p.version); err != nil {
		return dialect.Finding{}, understood(classify(ctx, err))
	}
	if err := refuseLookAlike(p.version, p.host); err != nil {
		return dialect.Finding{}, err
	}
	if err := p.learn(ctx, p.a); err != nil {
		return dialect.Finding{}, err
	}
	p.foreign = false
	f := dialect.Finding{Level: dialect.OK, Text: product(p.version)}
	if strings.Contains(p.version, "-YB-") {
		f.Level = dialect.Notice
		f.Text += ": YugabyteDB, whose versions before 2025.1 have no advisory locks"
	}
	return f, nil
}

// learn asks which process answers on the latest connection.
func (p *probe) learn(ctx context.Context, s *session) error {
	if err := s.conn.queryRow(ctx, pidQuery, nil, &s.id); err != nil {
		return p.different(ctx, err)
	}
	p.pooler = p.pooler || p.announced != 0 && p.announced != s.id
	return nil
}

// different takes an error of no known meaning for that of a look-alike.
func (p *probe) different(ctx context.Context, err error) error {
	known := classify(ctx, err)
	if dialect.ClassOf(known) != "" || !strings.HasPrefix(p.version, "PostgreSQL") {
		return understood(known)
	}
	return &dialect.Error{Class: dialect.Unsafe, Code: sqlState(err), Hint: noLocksHint,
		Err: fmt.Errorf("the server, %s, does not answer as PostgreSQL does: %w", product(p.version), readable(err))}
}

func (p *probe) checkPrimary(ctx context.Context) (dialect.Finding, error) {
	if p.foreign {
		return dialect.Finding{}, nil
	}
	var standby bool
	if err := p.a.conn.queryRow(ctx, "SELECT pg_is_in_recovery()", nil, &standby); err != nil {
		return dialect.Finding{}, p.different(ctx, err)
	}
	if standby {
		return dialect.Finding{}, standbyError(p.host)
	}
	return dialect.Finding{Level: dialect.OK, Text: "yes, not a standby"}, nil
}

const oneConnection = "not looked for: that takes two connections, and the pool has one"

func (p *probe) checkPooler(ctx context.Context) (dialect.Finding, error) {
	if p.foreign {
		return dialect.Finding{}, nil
	}
	if p.db.config == nil && p.db.sql.Stats().MaxOpenConnections == 1 {
		// No sessions either, since pinned takes none.
		return dialect.Finding{Level: dialect.Notice, Text: oneConnection}, nil
	}
	var err error
	if p.b, err = p.connect(ctx); err != nil {
		return dialect.Finding{}, err
	}
	if err := p.learn(ctx, p.b); err != nil {
		return dialect.Finding{}, err
	}
	if err := p.refuseSharedSessions(ctx); err != nil {
		p.shared = dialect.ClassOf(err) == dialect.Unsafe
		return dialect.Finding{}, err
	}
	f := dialect.Finding{Level: dialect.OK, Text: fmt.Sprintf("none that shares sessions: two connections kept the processes %d and %d", p.a.id, p.b.id)}
	if p.pooler {
		f.Level = dialect.Notice
		f.Text = "one in session mode: the server answers as another process than was announced, but as the same one each time"
		f.Advice = "every session with locks takes one of its server connections: make its pool large enough"
	}
	return f, nil
}

func (p *probe) checkLocks(ctx context.Context) (dialect.Finding, error) {
	switch {
	case p.foreign, p.shared:
		return dialect.Finding{}, nil
	case p.b == nil:
		return dialect.Finding{Level: dialect.Notice, Text: oneConnection}, nil
	}
	if err := p.refuseWithoutLocks(ctx); err != nil {
		return dialect.Finding{}, err
	}
	return dialect.Finding{Level: dialect.OK, Text: "a lock of one session kept the other out, until it was released"}, nil
}

func (d *DB) ping(ctx context.Context) error {
	if _, err := pinned.Within(ctx, func() error { return d.sql.PingContext(ctx) }); err != nil {
		return connectError(ctx, err)
	}
	return nil
}

// probeApplication tells Inspect and people whose locks the probe's are. It is
// part of the connection's startup, so no lock is ever without it.
const probeApplication = "dblock probe"

// connect avoids prepared statements, which do not survive a pooler in
// transaction mode long enough to tell of it.
func (p *probe) connect(ctx context.Context) (*session, error) {
	if p.db.config != nil {
		c, err := p.db.dial(ctx, func(config *pgx.ConnConfig) {
			config.DefaultQueryExecMode = pgx.QueryExecModeExec
			if config.RuntimeParams == nil {
				config.RuntimeParams = map[string]string{}
			}
			config.RuntimeParams["application_name"] = probeApplication
		})
		if err != nil {
			return nil, connectError(ctx, err)
		}
		p.host, p.port = c.Config().Host, c.Config().Port
		p.announced = int64(c.PgConn().PID())
		return newSession(newPgxConn(c)), nil
	}
	c, err := obtain(ctx, p.db.sql.Conn, (*sql.Conn).Close)
	if err != nil {
		return nil, connectError(ctx, err)
	}
	return newSession(&sqlConn{Conn: c, destroy: func() error { return pinned.Destroy(c) }}), nil
}

// understood takes an error of no known meaning in the first queries of a pool
// for the answer of another database.
func understood(err error) error {
	if dialect.ClassOf(err) != "" {
		return err
	}
	return &dialect.Error{Class: dialect.Unsupported, Code: sqlState(err), Err: readable(err),
		Hint: "the pool leads to no PostgreSQL: use the constructor of its database's package"}
}

const noLocksHint = "its advisory locks do not lock; with Options.AllowUnsafe use row locks only, where it has them"

// refuseLookAlike knows servers whose lock functions are missing or do nothing,
// and versions that are too old. Others, such as YugabyteDB, must prove theirs.
func refuseLookAlike(version, host string) error {
	name := ""
	switch {
	case strings.Contains(version, "CockroachDB"):
		name = "CockroachDB" // https://www.cockroachlabs.com/docs/stable/postgresql-compatibility
	case strings.Contains(version, "Redshift"):
		name = "Amazon Redshift" // https://docs.aws.amazon.com/redshift/latest/dg/c_unsupported-postgresql-functions.html
	case strings.Contains(host, ".dsql.") && strings.HasSuffix(host, ".on.aws"):
		name = "Amazon Aurora DSQL" // https://docs.aws.amazon.com/aurora-dsql/latest/userguide/working-with-postgresql-compatibility-unsupported-features.html
	}
	if name != "" {
		return &dialect.Error{Class: dialect.Unsafe, Err: fmt.Errorf("the server is %s", name), Hint: noLocksHint}
	}
	var major int
	if n, _ := fmt.Sscanf(version, "PostgreSQL %d", &major); n == 1 && major < oldest {
		e := *errTooOld
		e.Err = fmt.Errorf("the server is %s", product(version))
		return &e
	}
	return nil
}

// oldest is the first version that dblock supports.
const oldest = 12

// product is the part of version() that people know: PostgreSQL 15.20.
func product(version string) string {
	name, _, _ := strings.Cut(version, " on ")
	name, _, _ = strings.Cut(name, " (")
	return strings.TrimSuffix(name, ",")
}

// refuseSharedSessions finds a pooler in transaction or statement mode: two
// connections that are open at the same time have one server process, or one
// gets another when the other begins a transaction. Where a pooler is possible it
// looks more than once, since other clients of the pooler can hide it.
func (p *probe) refuseSharedSessions(ctx context.Context) error {
	if p.a.id == p.b.id {
		return p.sharedBy("two connections are served by one server process, %d", p.a.id)
	}
	rounds := 1
	if p.pooler || p.announced == 0 {
		rounds = 5
	}
	for range rounds {
		if err := p.refuseMoved(ctx); err != nil {
			return err
		}
	}
	return nil
}

// refuseMoved is one look. It ends as soon as it knows, for in a pool of one
// server connection the transaction would keep all others waiting.
func (p *probe) refuseMoved(ctx context.Context) (err error) {
	stays := func(s *session) error {
		var pid int64
		if err := s.conn.queryRow(ctx, pidQuery, nil, &pid); err != nil {
			return classify(ctx, err)
		}
		if pid != s.id {
			return p.sharedBy("a connection moved from server process %d to %d", s.id, pid)
		}
		return nil
	}
	if err := stays(p.a); err != nil {
		return err
	}
	if err := p.b.conn.exec(ctx, "BEGIN"); err != nil {
		// lib/pq hides the reason with which the server ends a connection. A server
		// that went away would have ended the other one, too.
		if other := stays(p.a); other != nil {
			return join(other, classify(ctx, err))
		}
		return p.sharedBy("one ended when it began a transaction, as in statement mode: %w", readable(err))
	}
	defer func() { err = join(err, classify(ctx, p.b.conn.exec(ctx, "ROLLBACK"))) }()
	if err := stays(p.b); err != nil {
		return err
	}
	return stays(p.a)
}

// sharedBy is errPooler with what was seen, and with the way out for the services
// whose hosts and ports are known.
func (p *probe) sharedBy(format string, args ...any) error {
	e := *errPooler
	e.Err = fmt.Errorf("%w: %w", errPooler.Err, fmt.Errorf(format, args...))
	if way := pastPooler(p.host, p.port); way != "" {
		e.Hint = way + "; " + e.Hint
	}
	return &e
}

// pastPooler is how to get past the transaction pooler of a hosting service.
func pastPooler(host string, port uint16) string {
	host = strings.ToLower(host)
	at := func(domain string, pooler uint16) bool {
		return strings.HasSuffix(host, domain) && (pooler == 0 || port == pooler)
	}
	switch {
	case at(".neon.tech", 0) && strings.Contains(host, "-pooler."):
		// https://neon.com/docs/connect/connection-pooling
		return "on Neon connect to " + strings.Replace(host, "-pooler.", ".", 1)
	case at(".supabase.com", 6543), at(".supabase.co", 6543):
		// https://supabase.com/docs/guides/database/connecting-to-postgres
		return "on Supabase connect to port 5432"
	case at(".postgres.database.azure.com", 6432):
		// https://learn.microsoft.com/azure/postgresql/connectivity/concepts-pgbouncer
		return "on Azure connect to port 5432"
	case at(".ondigitalocean.com", 25061):
		// https://docs.digitalocean.com/products/databases/postgresql/how-to/manage-connection-pools/
		return "on DigitalOcean connect to port 25060"
	case at(".rds.amazonaws.com", 0) && strings.Contains(host, ".proxy-"):
		// https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/rds-proxy.html
		return "past RDS Proxy connect to the endpoint of the instance or cluster"
	}
	return ""
}

// standbyError is errStandby with the way out for an endpoint that is known.
func standbyError(host string) error {
	e := *errStandby
	// https://docs.aws.amazon.com/AmazonRDS/latest/AuroraUserGuide/Aurora.Overview.Endpoints.html
	if strings.Contains(host, ".cluster-ro-") {
		e.Hint += "; on Aurora to " + strings.Replace(host, ".cluster-ro-", ".cluster-", 1)
	}
	return &e
}

// refuseWithoutLocks lets two sessions compete for a key that nobody else uses.
func (p *probe) refuseWithoutLocks(ctx context.Context) error {
	a, b := p.a, p.b
	keys := []dialect.Key{{ID: int64(rand.Uint64()), Label: "of the probe"}}
	try := dialect.Request{Keys: keys, Try: true}
	refuse := func(what string, err error) error {
		var e *dialect.Error
		if errors.As(err, &e) && e.Hint == poolerHint && ctx.Err() == nil {
			return p.sharedBy("%w", e.Err)
		}
		return brokenPromise(ctx, what, err)
	}
	if _, err := a.Acquire(ctx, try); err != nil {
		return refuse("a free key could not be locked", err)
	}
	switch _, err := b.Acquire(ctx, try); {
	case err == nil:
		return refuse("two sessions could lock the same key", nil)
	case dialect.ClassOf(err) != dialect.NotAcquired:
		return refuse("a second session could not ask for a held key", err)
	}
	switch held, err := dialect.HoldsAll(ctx, a, keys); {
	case err != nil:
		return refuse("the server does not show who holds a key", err)
	case !held:
		return refuse("a lock was gone a moment later", nil)
	}
	if err := a.Release(ctx, keys); err != nil {
		return refuse("a lock could not be released", err)
	}
	if _, err := b.Acquire(ctx, try); err != nil {
		return refuse("a released key stayed locked", err)
	}
	return p.refuseLeftLocks(ctx, try)
}

// freedWithin is how long a server may take to end a session whose client said that
// it ends.
const freedWithin = 5 * time.Second

// refuseLeftLocks closes the second connection, which holds a key. A pooler that does
// not clean its server connections keeps it locked: its session is ended then.
func (p *probe) refuseLeftLocks(ctx context.Context, try dialect.Request) error {
	if err := p.b.close(); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, freedWithin)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		_, err := p.a.Acquire(ctx, try)
		if err == nil {
			return p.a.Release(ctx, try.Keys)
		}
		if dialect.ClassOf(err) != dialect.NotAcquired {
			return err
		}
		select {
		case <-time.After(pause):
		case <-bounded.Done():
			if ctx.Err() != nil {
				return classify(ctx, ctx.Err())
			}
			var ended bool
			err := p.a.conn.queryRow(ctx, "SELECT pg_terminate_backend($1)", []any{p.b.id}, &ended)
			return join(&dialect.Error{Class: dialect.Unsafe, Err: errors.New("a pooler keeps the locks of clients that are gone"),
				Hint: "set its server_reset_query to DISCARD ALL, or connect to the server directly"}, classify(ctx, err))
		}
	}
}

// brokenPromise says what locks do not do here, unless a connection ended before
// they could show it.
func brokenPromise(ctx context.Context, what string, err error) error {
	switch {
	case ctx.Err() != nil:
		return err
	case sessionEnded(err):
		return connectError(ctx, err)
	}
	e := &dialect.Error{Class: dialect.Unsafe, Err: errors.New(what), Hint: noLocksHint}
	if err != nil {
		e.Err = fmt.Errorf("%s: %w", what, err)
	}
	return e
}
