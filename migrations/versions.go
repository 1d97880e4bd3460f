package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
	"github.com/pressly/goose/v3/lock"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// gooseDialect is goose's name for the database, and the character that quotes
// identifiers there.
func gooseDialect(db dblock.DB) (name goose.Dialect, quote string, err error) {
	switch db.Name() {
	case "postgres":
		return goose.DialectPostgres, `"`, nil
	case "mysql", "mariadb":
		return goose.DialectMySQL, "`", nil
	case "sqlserver":
		return goose.DialectMSSQL, `"`, nil
	}
	return "", "", &dialect.Error{Class: dblock.ErrUnsupported,
		Hint: fmt.Sprintf("goose's dialect for %s is not known here", db.Name())}
}

// versions is goose's version table.
//
// Left to itself, goose creates the table before it asks for the guard, so that
// replicas collide, and on MySQL and MariaDB a crash between the two steps of
// the creation leaves a table that goose refuses. Here a missing table reads as
// an empty one, and the guard's holder creates it.
type versions struct {
	database.Store
	db dblock.DB
}

func newVersions(db dblock.DB, table string) (*versions, error) {
	name, _, err := gooseDialect(db)
	if err != nil {
		return nil, err
	}
	store, err := database.NewStore(name, table)
	if err != nil {
		return nil, err
	}
	return &versions{Store: store, db: db}, nil
}

var _ database.StoreExtender = (*versions)(nil)

// TableExists keeps goose from creating the table.
func (v *versions) TableExists(context.Context, database.DBTxConn) (bool, error) {
	return true, nil
}

func (v *versions) ListMigrations(ctx context.Context, tx database.DBTxConn) ([]*database.ListMigrationsResult, error) {
	list, err := v.Store.ListMigrations(ctx, tx)
	if v.missing(err) {
		return nil, nil
	}
	return list, err
}

func (v *versions) GetMigration(ctx context.Context, tx database.DBTxConn, version int64) (*database.GetMigrationResult, error) {
	result, err := v.Store.GetMigration(ctx, tx, version)
	switch {
	case v.missing(err):
		return nil, fmt.Errorf("%w: %d", database.ErrVersionNotFound, version)
	case err != nil && strings.Contains(err.Error(), "*time.Time"):
		return nil, &dialect.Error{Class: dblock.ErrInvalidOption, Err: err,
			Hint: "goose needs a pool that returns times; of go-sql-driver/mysql one with parseTime=true"}
	}
	return result, err
}

func (v *versions) GetLatestVersion(ctx context.Context, tx database.DBTxConn) (int64, error) {
	version, err := v.Store.GetLatestVersion(ctx, tx)
	if v.missing(err) || errors.Is(err, database.ErrVersionNotFound) {
		return 0, nil
	}
	return version, err
}

func (v *versions) missing(err error) bool {
	return errors.Is(v.db.Classify(err), dblock.ErrSetup)
}

// ensure creates the table with the version 0 that goose expects in it, or
// completes what a crash has left. The connection holds the guard.
func (v *versions) ensure(ctx context.Context, conn *sql.Conn) (err error) {
	_, err = v.Store.GetLatestVersion(ctx, conn)
	missing := v.missing(err)
	if !missing && !errors.Is(err, database.ErrVersionNotFound) {
		return err
	}
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() {
		if rollbackErr := tx.Rollback(); !errors.Is(rollbackErr, sql.ErrTxDone) {
			err = join(err, rollbackErr)
		}
	}()
	if missing {
		if err := v.CreateVersionTable(ctx, tx); err != nil {
			return err
		}
	}
	if err := v.Insert(ctx, tx, database.InsertRequest{Version: 0}); err != nil {
		return err
	}
	return tx.Commit()
}

// creator is a guard whose holder finds the version table in place.
type creator struct {
	*guard
	versions *versions
}

var _ lock.SessionLocker = creator{}

func (c creator) SessionLock(ctx context.Context, conn *sql.Conn) error {
	if err := c.guard.SessionLock(ctx, conn); err != nil {
		return err
	}
	if err := c.versions.ensure(ctx, conn); err != nil {
		err = join(c.db.Classify(err), c.guard.SessionUnlock(ctx, conn))
		return dblock.NewError("create version table", c.db, nil, err)
	}
	return nil
}
