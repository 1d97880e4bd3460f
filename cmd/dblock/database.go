package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/dialect/sqlserver"
)

const dsnVariable = "DBLOCK_DSN"

// Connecting takes longestConnect at most, or as long as --wait if that is
// shorter. Who wants a short wait for a lock still has a server to reach, so it
// is never less than shortestConnect.
const (
	longestConnect  = 30 * time.Second
	shortestConnect = 2 * time.Second
)

// database opens what --dsn or the environment names. A wait is that of --wait.
func (a *app) database(ctx context.Context, wait time.Duration) (dblock.DB, error) {
	limit := longestConnect
	if wait > 0 {
		limit = min(max(wait, shortestConnect), longestConnect)
	}
	return a.named(ctx, limit, false)
}

// unsafeDatabase opens one on which locks may not be safe, to look at it.
func (a *app) unsafeDatabase(ctx context.Context) (dblock.DB, error) {
	return a.named(ctx, longestConnect, true)
}

func (a *app) named(ctx context.Context, limit time.Duration, allowUnsafe bool) (dblock.DB, error) {
	dsn := a.databaseURL()
	if dsn == "" {
		return nil, &exitError{exitUsage, errors.New("no database: give --dsn URL or set " + dsnVariable + ", for instance to postgres://user:password@host:5432/name")}
	}
	return a.connect(ctx, dsn, limit, allowUnsafe)
}

func (a *app) databaseURL() string {
	if a.dsn != "" {
		return a.dsn
	}
	return getenv(a.env, dsnVariable)
}

// connect opens a database and stops waiting for it after a limit, or when ctx
// ends. Not every driver stops too, go-mssqldb does not where a server accepts
// the connection and stays silent: its attempt then ends with the process.
func (a *app) connect(ctx context.Context, dsn string, limit time.Duration, allowUnsafe bool) (dblock.DB, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	type opening struct {
		db  dblock.DB
		err error
	}
	done := make(chan opening, 1)
	go func() {
		db, err := a.open(bounded, dsn, allowUnsafe)
		done <- opening{db, err}
	}()
	select {
	case o := <-done:
		if o.err == nil || bounded.Err() == nil {
			return o.db, o.err
		}
	case <-bounded.Done():
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("connecting to %s: %w", address(dsn), context.Cause(ctx))
	}
	return nil, &dialect.Error{
		Class: dblock.ErrUnavailable,
		Err:   fmt.Errorf("connecting to %s took longer than %v", address(dsn), limit),
		Hint:  "check the host and the port, that this kind of server answers there, and the firewalls in between",
	}
}

// address is the host and the port of a DSN, for people to read. Where the DSN
// may have been split within a password, it tells nothing.
func address(dsn string) string {
	u, err := url.Parse(dsn)
	if err != nil || u.Hostname() == "" || u.Fragment != "" || strings.Contains(u.Path+u.RawQuery, "@") {
		return "the server"
	}
	port := defaultPorts[strings.ToLower(u.Scheme)]
	if u.Port() != "" || port == "" {
		return u.Host
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// defaultPorts lacks SQL Server's, where an instance may be named instead.
var defaultPorts = map[string]string{"postgres": "5432", "postgresql": "5432", "mysql": "3306", "mariadb": "3306"}

// openDatabase picks the database by the scheme of the DSN, which it never
// prints: there is a password in it.
func openDatabase(ctx context.Context, dsn string, allowUnsafe bool) (dblock.DB, error) {
	scheme, _, ok := strings.Cut(dsn, "://")
	if !ok || !isScheme.MatchString(scheme) {
		return nil, &exitError{exitUsage, errors.New("the DSN is not a URL: write it as postgres://, mysql://, mariadb:// or sqlserver://, then user:password@host:port/name")}
	}
	switch strings.ToLower(scheme) {
	case "postgres", "postgresql":
		return opened(postgres.Open(ctx, dsn, &postgres.Options{AllowUnsafe: allowUnsafe}))
	case "mysql", "mariadb":
		return opened(mysql.Open(ctx, dsn, &mysql.Options{AllowUnsafe: allowUnsafe}))
	case "sqlserver":
		return opened(sqlserver.Open(ctx, dsn, &sqlserver.Options{AllowUnsafe: allowUnsafe}))
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
