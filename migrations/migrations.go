package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"reflect"
	"slices"
	"strconv"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// Up applies all migrations that have not been applied yet, oldest first. The
// migrations are the files of fsys's root whose names begin with a version, such
// as 00001_accounts.sql. Where none is pending Up returns at once, without the
// guard. It returns what it applied itself: nothing if another replica was
// first. With an error the results are those that were applied before it.
//
// Errors: [dblock.ErrSetup] if there are no migrations, [dblock.ErrTimeout] and
// [dblock.ErrCanceled] if the guard was not to be had in time,
// [dblock.ErrInvalidOption], [dblock.ErrLost] if the session died, and what the
// database says about a migration, with the file's name; errors.As finds goose's
// *goose.PartialError.
func Up(ctx context.Context, db dblock.DB, fsys fs.FS, opts ...*Options) ([]*goose.MigrationResult, error) {
	r, err := newRun(db, "migrate up", fsys, opts, guarded)
	if err != nil {
		return nil, err
	}
	results, err := r.Up(ctx)
	return r.outcome(results, err)
}

// UpTo is [Up] for the migrations up to and including a version, which must be
// at least 1.
func UpTo(ctx context.Context, db dblock.DB, fsys fs.FS, version int64, opts ...*Options) ([]*goose.MigrationResult, error) {
	r, err := newRun(db, "migrate up-to", fsys, opts, guarded)
	if err != nil {
		return nil, err
	}
	if version < 1 {
		return nil, r.error(dialect.Invalidf("version %d: must be at least 1", version))
	}
	results, err := r.UpTo(ctx, version)
	return r.outcome(results, err)
}

// Down rolls back the migration that was applied last; each replica that calls
// it rolls back one. Errors: those of [Up], and goose.ErrNoNextVersion if none is
// left.
func Down(ctx context.Context, db dblock.DB, fsys fs.FS, opts ...*Options) (*goose.MigrationResult, error) {
	r, err := newRun(db, "migrate down", fsys, opts, guarded)
	if err != nil {
		return nil, err
	}
	result, err := r.Down(ctx)
	if err != nil {
		return nil, r.failure(err)
	}
	return result, nil
}

// Status lists the migrations of fsys and which of them are applied. It does not
// wait for the guard: a migration that is under way counts as pending. A pool of
// go-sql-driver/mysql needs parseTime=true for the times, as with goose itself;
// without it the error is [dblock.ErrInvalidOption].
func Status(ctx context.Context, db dblock.DB, fsys fs.FS, opts ...*Options) ([]*goose.MigrationStatus, error) {
	r, err := newRun(db, "migrate status", fsys, opts, unguarded)
	if err != nil {
		return nil, err
	}
	status, err := r.Status(ctx)
	if err != nil {
		return nil, r.failure(err)
	}
	return status, nil
}

// Version is the highest version that has been applied, 0 if none has. It does
// not wait for the guard.
func Version(ctx context.Context, db dblock.DB, fsys fs.FS, opts ...*Options) (int64, error) {
	r, err := newRun(db, "migrate version", fsys, opts, unguarded)
	if err != nil {
		return 0, err
	}
	version, err := r.GetDBVersion(ctx)
	if err != nil {
		return 0, r.failure(err)
	}
	return version, nil
}

// run is one call of this package.
type run struct {
	*goose.Provider
	db dblock.DB
	op string
}

const (
	guarded   = true
	unguarded = false
)

func newRun(db dblock.DB, op string, fsys fs.FS, opts []*Options, guard bool) (*run, error) {
	if dialect.IsNil(db) {
		return nil, errNilDB
	}
	r := &run{db: db, op: op}
	o, err := resolve(opts)
	if err != nil {
		return nil, r.error(err)
	}
	if err := r.open(fsys, o, guard); err != nil {
		return nil, r.error(err)
	}
	return r, nil
}

// open makes goose's provider.
func (r *run) open(fsys fs.FS, o Options, guard bool) error {
	versions, err := newVersions(r.db, o.VersionTable)
	if err != nil {
		return err
	}
	options := append(slices.Clone(o.Provider), goose.WithStore(versions))
	if guard {
		guard, err := newGuard(r.db, o)
		if err != nil {
			return err
		}
		options = append(options, goose.WithSessionLocker(creator{guard, versions}))
	}
	r.Provider, err = goose.NewProvider(goose.DialectCustom, r.db.SQL(), fsys, options...)
	switch {
	case errors.Is(err, goose.ErrNoMigrations):
		return noMigrations(fsys)
	case err != nil:
		return &dialect.Error{Class: dblock.ErrInvalidOption, Err: err}
	}
	return nil
}

// noMigrations names what was looked for, and where such files are instead.
func noMigrations(fsys fs.FS) error {
	e := &dialect.Error{Class: dblock.ErrSetup, Err: goose.ErrNoMigrations}
	if fsys == nil {
		e.Hint = "neither files nor Go migrations were given"
		return e
	}
	where, folder := "the file system", reflect.ValueOf(fsys)
	if folder.Kind() == reflect.String { // os.DirFS
		where = strconv.Quote(folder.String())
	}
	if _, err := fs.Stat(fsys, "."); err != nil {
		e.Err = fmt.Errorf("%w: %w", e.Err, err)
		e.Hint = fmt.Sprintf("%s cannot be read", where)
		return e
	}
	e.Hint = fmt.Sprintf("in the root of %s: files are named 00001_name.sql", where)
	below, err := fs.Glob(fsys, "*/*.sql")
	switch {
	case err != nil || len(below) == 0:
	case folder.Kind() == reflect.String:
		e.Hint += fmt.Sprintf("; there are some in %q: use that folder", path.Join(folder.String(), path.Dir(below[0])))
	default:
		e.Hint += fmt.Sprintf("; there are some in %[1]q: pass fs.Sub(fsys, %[1]q)", path.Dir(below[0]))
	}
	return e
}

// outcome is what Up and UpTo return.
func (r *run) outcome(results []*goose.MigrationResult, err error) ([]*goose.MigrationResult, error) {
	var partial *goose.PartialError
	if errors.As(err, &partial) {
		results = partial.Applied
	}
	if err != nil {
		return results, r.failure(err)
	}
	return results, nil
}

// failure takes goose's joined errors apart and says of each what it means. It
// leaves out that goose could not give back a connection that the guard had
// destroyed.
func (r *run) failure(err error) error {
	parts := []error{err}
	if joined, ok := err.(interface{ Errors() []error }); ok { // go.uber.org/multierr
		parts = slices.Clone(joined.Errors())
	}
	parts = slices.DeleteFunc(parts, func(e error) bool { return e == sql.ErrConnDone })
	var all error
	for _, part := range parts {
		all = join(all, r.explain(part))
	}
	if ofGuard, ok := all.(*dblock.Error); ok {
		return ofGuard
	}
	return r.error(all)
}

func (r *run) explain(err error) error {
	var partial *goose.PartialError
	if errors.As(err, &partial) {
		source := partial.Failed.Source
		name := source.Path
		if name == "" {
			name = fmt.Sprintf("version %d", source.Version)
		}
		return fmt.Errorf("%s: %w", name, r.db.Classify(partial))
	}
	var ofGuard *dblock.Error
	if errors.As(err, &ofGuard) {
		return ofGuard
	}
	return r.db.Classify(err)
}

func (r *run) error(err error) error { return dblock.NewError(r.op, r.db, nil, err) }
