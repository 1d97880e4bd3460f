package migrations

import (
	"context"
	"database/sql"
	"fmt"
	"slices"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// SetupOptions shape [Setup]. A nil *SetupOptions means all defaults.
type SetupOptions struct {
	// Schema is where the tables are, in letters, digits and underscores; it must
	// exist. Default: the connection's default schema.
	Schema string
	// Table is the one table to create, where that of rowlock.Options, advisory.Options
	// or rowlock.OnceOptions has another name: at most 48 letters, digits and
	// underscores. Default: "locks" and "once".
	Table string
	// Observer hears of the guard, as in [Options]. Default: none.
	Observer dblock.Observer
}

const (
	versionPrefix, versionSuffix = "dblock_", "_version"
	// maxIdentifier is PostgreSQL's limit, the narrowest; what is longer is cut
	// off, so that the version tables of two lock tables could become one:
	// https://www.postgresql.org/docs/current/limits.html
	maxIdentifier = 63
	maxTable      = maxIdentifier - len(versionPrefix) - len(versionSuffix)
)

// Setup creates dblock's own tables, which fencing numbers and package rowlock
// need, or brings those of an older version up to date. Any number of replicas
// may call it on every start; it is guarded like [Up]. What it did is recorded in
// a version table of its own beside each table, "dblock_locks_version" for
// the table "locks". A table that is there already and has the right shape is
// only recorded.
//
// Errors: [dblock.ErrSetup] if there is a table of that name that is not dblock's
// (nothing is changed then), or if the table is gone although the version table
// says it was created; [dblock.ErrInvalidOption], [dblock.ErrDenied] and the
// errors of [Up].
func Setup(ctx context.Context, db dblock.DB, opts ...*SetupOptions) error {
	if dialect.IsNil(db) {
		return errNilDB
	}
	o, err := atMostOne(opts)
	if err != nil {
		return dblock.NewError("setup", db, nil, err)
	}
	names := []string{"locks", dialect.OnceTable}
	if o.Table != "" {
		names = []string{o.Table}
	}
	setups := make([]*setup, len(names))
	for i, name := range names {
		setups[i] = &setup{run: run{db: db, op: "setup"}, table: dialect.Table{Schema: o.Schema, Name: name}}
		if err := setups[i].prepare(ctx, o.Observer); err != nil {
			return setups[i].error(err)
		}
	}
	for _, s := range setups {
		if err := s.up(ctx); err != nil {
			return err
		}
	}
	return nil
}

// setup is the [Setup] of one table.
type setup struct {
	run
	table        dialect.Table
	versionTable string // quoted
}

// prepare changes nothing.
func (s *setup) prepare(ctx context.Context, observer dblock.Observer) (err error) {
	if s.versionTable, err = setupVersionTable(s.db, s.table); err != nil {
		return err
	}
	steps := s.db.Migrations(s.table)
	unrecorded, err := checkUnrecorded(ctx, s.db, s.table, s.versionTable)
	if err != nil {
		return err
	}
	if unrecorded {
		steps = slices.Clone(steps)
		for i := range steps {
			steps[i].Up = nil
		}
	}
	return s.open(nil, Options{
		VersionTable: s.versionTable,
		Key:          guardKey(versionPrefix + s.table.Name + versionSuffix),
		Observer:     observer,
		Provider: []goose.ProviderOption{
			goose.WithGoMigrations(goMigrations(steps)...),
			goose.WithDisableGlobalRegistry(true),
		},
	}, guarded)
}

func (s *setup) up(ctx context.Context) error {
	if _, err := s.Up(ctx); err != nil {
		return s.failure(err)
	}
	exists, err := s.db.CheckTable(ctx, s.table)
	if !exists && dialect.ClassOf(err) == dblock.ErrSetup {
		err = &dialect.Error{Class: dblock.ErrSetup,
			Err:  fmt.Errorf("table %q is gone, but %s records its creation", s.table.Name, s.versionTable),
			Hint: "restore it, since fencing numbers must not start again nor marks be forgotten; or drop its record, too, and run setup again"}
	}
	return s.error(err)
}

// checkUnrecorded reports whether the table is there, and as it should be,
// without a record of its creation: after a crash where DDL commits implicitly,
// or because somebody else made it. A table that Setup did not make and that is
// not as it should be is an error.
func checkUnrecorded(ctx context.Context, db dblock.DB, table dialect.Table, versionTable string) (bool, error) {
	exists, shapeErr := db.CheckTable(ctx, table)
	if shapeErr != nil && dialect.ClassOf(shapeErr) != dblock.ErrSetup {
		return false, shapeErr
	}
	if !exists {
		return false, nil
	}
	versions, err := newVersions(db, versionTable)
	if err != nil {
		return false, err
	}
	recorded, err := versions.GetLatestVersion(ctx, db.SQL())
	if err != nil {
		return false, db.Classify(err)
	}
	if recorded > 0 {
		return false, nil
	}
	return true, shapeErr
}

// setupVersionTable is the quoted name of the table that records what Setup did.
func setupVersionTable(db dblock.DB, table dialect.Table) (string, error) {
	if table.Schema != "" && !identifier.MatchString(table.Schema) {
		return "", dialect.Invalidf("Schema %q: letters, digits and underscores only", table.Schema)
	}
	if !identifier.MatchString(table.Name) || len(table.Name) > maxTable {
		return "", dialect.Invalidf("Table %q: letters, digits and underscores only, at most %d", table.Name, maxTable)
	}
	_, quote, err := gooseDialect(db)
	if err != nil {
		return "", err
	}
	name := quote + versionPrefix + table.Name + versionSuffix + quote
	if table.Schema != "" {
		name = quote + table.Schema + quote + "." + name
	}
	return name, nil
}

// goMigrations makes goose migrations of a dialect's statements. They run in a
// transaction everywhere, since that is how goose runs them on the connection
// that holds the guard; MySQL and MariaDB commit it with the first DDL.
func goMigrations(steps []dialect.Migration) []*goose.Migration {
	list := make([]*goose.Migration, len(steps))
	for i, step := range steps {
		list[i] = goose.NewGoMigration(step.Version, inTx(step.Up), inTx(step.Down))
	}
	return list
}

func inTx(statements []string) *goose.GoFunc {
	return &goose.GoFunc{RunTx: func(ctx context.Context, tx *sql.Tx) error {
		for _, statement := range statements {
			if _, err := tx.ExecContext(ctx, statement); err != nil {
				return err
			}
		}
		return nil
	}}
}
