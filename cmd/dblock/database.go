package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/dialect/sqlserver"
)

const dsnVariable = "DBLOCK_DSN"

// database opens what --dsn or the environment names.
func (a *app) database(ctx context.Context) (dblock.DB, error) {
	dsn := a.dsn
	if dsn == "" {
		dsn = getenv(a.env, dsnVariable)
	}
	if dsn == "" {
		return nil, &exitError{exitUsage, errors.New("no database: give --dsn URL or set " + dsnVariable + ", for instance to postgres://user:password@host:5432/name")}
	}
	return a.open(ctx, dsn)
}

// openDatabase picks the database by the scheme of the DSN, which it never
// prints: there is a password in it.
func openDatabase(ctx context.Context, dsn string) (dblock.DB, error) {
	scheme, _, ok := strings.Cut(dsn, "://")
	if !ok || !isScheme.MatchString(scheme) {
		return nil, &exitError{exitUsage, errors.New("the DSN is not a URL: write it as postgres://, mysql://, mariadb:// or sqlserver://, then user:password@host:port/name")}
	}
	switch strings.ToLower(scheme) {
	case "postgres", "postgresql":
		return opened(postgres.Open(ctx, dsn))
	case "mysql", "mariadb":
		return opened(mysql.Open(ctx, dsn))
	case "sqlserver":
		return opened(sqlserver.Open(ctx, dsn))
	}
	return nil, &exitError{exitUsage, fmt.Errorf("no database has the scheme %s://: use postgres://, mysql://, mariadb:// or sqlserver://", scheme)}
}

var isScheme = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*$`)

// opened keeps a nil of a dialect's type from becoming a DB that is not nil.
func opened[T dblock.DB](db T, err error) (dblock.DB, error) {
	if err != nil {
		return nil, err
	}
	return db, nil
}

// closing ends the use of a database or a locker.
func closing(c io.Closer, err error) error {
	return errors.Join(err, c.Close())
}

func getenv(env []string, name string) string {
	for _, variable := range env {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}
