package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/pinned"
)

// probe looks at what is behind the connection, setting nothing there: is it
// PostgreSQL and a primary, has each client a server session of its own, do
// locks lock? That takes two connections for a moment.
func (d *DB) probe(ctx context.Context) (err error) {
	ca, announced, err := d.connectToProbe(ctx)
	if err != nil {
		return err
	}
	defer func() { err = join(err, ca.close()) }()

	var version string
	if err := ca.queryRow(ctx, "SELECT version()", nil, &version); err != nil {
		return understood(classify(ctx, err))
	}
	if err := refuseLookAlike(version); err != nil {
		return err
	}
	a, behind, err := start(ctx, ca, announced)
	if err != nil {
		return understood(err)
	}
	if behind.standby {
		return errStandby
	}
	if d.config == nil && d.sql.Stats().MaxOpenConnections == 1 {
		return nil // no sessions here, since pinned takes none, and no second connection
	}

	cb, announced, err := d.connectToProbe(ctx)
	if err != nil {
		return err
	}
	defer func() { err = join(err, cb.close()) }()
	b, _, err := start(ctx, cb, announced)
	if err != nil {
		return err
	}
	if behind.pooler || announced == 0 {
		if err := refuseSharedSessions(ctx, a, b); err != nil {
			return err
		}
		d.pooler = behind.pooler
	}
	return refuseWithoutLocks(ctx, a, b)
}

func (d *DB) ping(ctx context.Context) error {
	if _, err := within(ctx, func() error { return d.sql.PingContext(ctx) }); err != nil {
		return connectError(ctx, err)
	}
	return nil
}

// probeApplication tells Inspect and people whose locks the probe's are. It is
// part of the connection's startup, so no lock is ever without it.
const probeApplication = "dblock probe"

// connectToProbe avoids prepared statements, which do not survive a pooler in
// transaction mode long enough to tell of it.
func (d *DB) connectToProbe(ctx context.Context) (conn, int64, error) {
	if d.config != nil {
		c, err := d.dial(ctx, func(config *pgx.ConnConfig) {
			config.DefaultQueryExecMode = pgx.QueryExecModeExec
			if config.RuntimeParams == nil {
				config.RuntimeParams = map[string]string{}
			}
			config.RuntimeParams["application_name"] = probeApplication
		})
		if err != nil {
			return nil, 0, connectError(ctx, err)
		}
		return pgxConn{c}, int64(c.PgConn().PID()), nil
	}
	c, err := obtain(ctx, d.sql.Conn, (*sql.Conn).Close)
	if err != nil {
		return nil, 0, connectError(ctx, err)
	}
	return &sqlConn{Conn: c, destroy: func() error { return pinned.Destroy(c) }}, 0, nil
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

// refuseLookAlike knows servers whose lock functions are missing or do nothing.
// Those that may have working ones, such as YugabyteDB, must prove it.
func refuseLookAlike(version string) error {
	for _, name := range []string{
		"CockroachDB", // https://www.cockroachlabs.com/docs/stable/postgresql-compatibility
		"Redshift",    // https://docs.aws.amazon.com/redshift/latest/dg/c_unsupported-postgresql-functions.html
	} {
		if strings.Contains(version, name) {
			return &dialect.Error{Class: dialect.Unsafe, Err: fmt.Errorf("the server is %s", name),
				Hint: "it has no advisory locks that lock; with Options.AllowUnsafe use row locks only, where it has them"}
		}
	}
	return nil
}

// refuseSharedSessions finds a pooler in transaction or statement mode: two
// connections that are open at the same time have one server process, or one
// gets another when the other begins a transaction. It looks more than once,
// since other clients of the pooler can hide it.
func refuseSharedSessions(ctx context.Context, a, b *session) error {
	for range 3 {
		var before, during, after int64
		if err := a.conn.queryRow(ctx, pidQuery, nil, &before); err != nil {
			return classify(ctx, err)
		}
		if err := b.conn.exec(ctx, "BEGIN"); err != nil && ctx.Err() == nil {
			// As in statement mode.
			return &dialect.Error{Class: dialect.Unsafe, Code: sqlState(err), Err: err, Hint: poolerHint}
		}
		err := join(
			b.conn.queryRow(ctx, pidQuery, nil, &during),
			a.conn.queryRow(ctx, pidQuery, nil, &after),
			b.conn.exec(ctx, "ROLLBACK"),
		)
		if err != nil {
			return classify(ctx, err)
		}
		if before != a.id || after != a.id || during == a.id {
			return errPooler
		}
	}
	return nil
}

// refuseWithoutLocks lets two sessions compete for a key that nobody else uses.
func refuseWithoutLocks(ctx context.Context, a, b *session) error {
	keys := []dialect.Key{{ID: int64(rand.Uint64()), Label: "of the probe"}}
	try := dialect.Request{Keys: keys, Try: true}
	refuse := func(what string, err error) error {
		if ctx.Err() != nil {
			return err
		}
		e := &dialect.Error{Class: dialect.Unsafe, Err: errors.New(what),
			Hint: "the server's advisory locks do not work; with Options.AllowUnsafe use row locks only"}
		if err != nil {
			e.Err = fmt.Errorf("%s: %w", what, err)
		}
		return e
	}
	if _, err := a.Acquire(ctx, try); err != nil {
		return refuse("a free key could not be locked", err)
	}
	if _, err := b.Acquire(ctx, try); dialect.ClassOf(err) != dialect.NotAcquired {
		return refuse("two sessions could lock the same key", err)
	}
	if held, err := a.Held(ctx, keys); !held {
		return refuse("a lock was gone a moment later", err)
	}
	if err := a.Release(ctx, keys); err != nil {
		return refuse("a lock could not be released", err)
	}
	if _, err := b.Acquire(ctx, try); err != nil {
		return refuse("a released key stayed locked", err)
	}
	return nil
}
