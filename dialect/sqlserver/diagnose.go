package sqlserver

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// Diagnose runs the checks of the constructors, and looks at what else decides
// how long locks wait and live here: settings of the database, and the user's
// privileges.
func (d *DB) Diagnose(ctx context.Context) ([]dialect.Finding, error) {
	p := &probe{db: d}
	if err := p.identify(ctx); err != nil {
		return nil, connectError(ctx, err)
	}
	return dialect.Diagnose(ctx, append(p.checks(),
		p.detail("product", p.product),
		p.detail("lock table", p.lockTable(dialect.Table{})),
		p.detail("once table", p.lockTable(dialect.Table{Name: dialect.OnceTable})),
		p.detail("privileges", p.privileges),
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

func (p *probe) query(ctx context.Context, query string, into ...any) error {
	rows, err := p.db.db.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	return readOne(rows, into...)
}

// product knows what has SQL Server's version number but is another software, and
// what is between it and its clients.
// https://babelfishpg.org/docs/usage/limitations-of-babelfish/
func (p *probe) product(ctx context.Context) (dialect.Finding, error) {
	var babelfish sql.NullInt64
	if err := p.query(ctx, "SELECT CONVERT(int, SERVERPROPERTY('Babelfish'));", &babelfish); err != nil {
		return dialect.Finding{}, err
	}
	switch {
	case babelfish.Int64 == 1:
		return dialect.Finding{Level: dialect.Notice, Text: "Babelfish: a PostgreSQL that speaks SQL Server's protocol",
			Advice: "what the probe shows holds; the rest was not tested there"}, nil
	case p.azure():
		return dialect.Finding{Level: dialect.Notice, Text: "Azure's gateway cuts connections that are idle for about 30 minutes",
			Advice: "package advisory keeps its sessions alive; transactions of yours that pause are cut"}, nil
	}
	return dialect.Finding{}, nil
}

// azure reports a service whose gateway and failovers are not its user's.
func (p *probe) azure() bool { return p.engine == 5 || p.engine == 8 || p.engine == 12 }

// lockTable asks for effective privileges, those of roles too:
// https://learn.microsoft.com/sql/t-sql/functions/has-perms-by-name-transact-sql
func (p *probe) lockTable(t dialect.Table) func(ctx context.Context) (dialect.Finding, error) {
	name := strings.ReplaceAll(tableName(t), "'", "''")
	return func(ctx context.Context) (dialect.Finding, error) {
		return dialect.TableFinding(ctx, p.db, t, func(ctx context.Context, privileges ...string) (lacks []string, err error) {
			for _, privilege := range privileges {
				var may sql.NullInt64
				if err := p.query(ctx, fmt.Sprintf("SELECT HAS_PERMS_BY_NAME(N'%s', 'OBJECT', '%s');", name, privilege), &may); err != nil {
					return nil, err
				}
				if may.Int64 != 1 {
					lacks = append(lacks, privilege)
				}
			}
			return lacks, nil
		})
	}
}

// privileges tries what `dblock ls` does.
func (p *probe) privileges(ctx context.Context) (dialect.Finding, error) {
	_, err := p.db.Inspect(ctx)
	var e *dialect.Error
	switch {
	case err == nil:
		return dialect.Finding{Level: dialect.OK, Text: "who holds a lock is shown"}, nil
	case errors.As(err, &e) && e.Class == dialect.Denied:
		return dialect.Finding{Level: dialect.Notice, Text: "who holds a lock is not shown to this user", Advice: e.Hint}, nil
	}
	return dialect.Finding{}, err
}

func (p *probe) isolation(ctx context.Context) (dialect.Finding, error) {
	var versioned bool
	if err := p.query(ctx, "SELECT is_read_committed_snapshot_on FROM sys.databases WHERE database_id = DB_ID();", &versioned); err != nil {
		return dialect.Finding{}, err
	}
	if versioned {
		return dialect.Finding{Level: dialect.OK, Text: "READ COMMITTED with row versions: readers do not wait for row locks, and each statement reads afresh"}, nil
	}
	return dialect.Finding{Level: dialect.OK, Text: "READ COMMITTED without row versions: readers wait for row locks that were written"}, nil
}

// durability is that of fencing numbers; SQL Server 2012 has no other.
// https://learn.microsoft.com/sql/relational-databases/logs/control-transaction-durability
func (p *probe) durability(ctx context.Context) (dialect.Finding, error) {
	delayed := "DISABLED"
	if p.major > oldest {
		if err := p.query(ctx, "SELECT delayed_durability_desc FROM sys.databases WHERE database_id = DB_ID();", &delayed); err != nil {
			return dialect.Finding{}, err
		}
	}
	f := dialect.Finding{Level: dialect.OK, Text: "what is committed, fencing numbers too, survives a crash"}
	if delayed != "DISABLED" {
		f = dialect.Finding{Level: dialect.Notice, Text: fmt.Sprintf("DELAYED_DURABILITY is %s: a crash may take back what was committed so, fencing numbers too", delayed),
			Advice: "do not commit transactions with fencing numbers WITH (DELAYED_DURABILITY = ON)"}
	}
	if delayed == "FORCED" {
		f.Level, f.Advice = dialect.Warning, "ALTER DATABASE … SET DELAYED_DURABILITY = DISABLED"
	}
	return f, nil
}

func (p *probe) failover(ctx context.Context) (dialect.Finding, error) {
	var replicas int64
	err := p.query(ctx, "SELECT COUNT_BIG(*) FROM sys.databases WHERE database_id = DB_ID() AND replica_id IS NOT NULL;", &replicas)
	if err != nil {
		return dialect.Finding{}, err
	}
	if replicas == 0 && !p.azure() {
		return dialect.Finding{Level: dialect.OK, Text: "the database is in no availability group"}, nil
	}
	return dialect.Finding{Level: dialect.Notice, Text: "the database has replicas to fail over to",
		Advice: "a failover frees all application locks: guard writes by fencing numbers"}, nil
}
