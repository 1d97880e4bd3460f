// Command worker is what tests across processes start, and kill. Each of its
// commands tells on standard output, a line at a time, how far it got.
package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"

	"github.com/lib/pq"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/mysql"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/dialect/sqlserver"
)

var commands = map[string]func(args []string) error{
	"hold":    hold,
	"migrate": migrate,
	"torture": torture,
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("name a command")
	}
	command, ok := commands[args[0]]
	if !ok {
		return fmt.Errorf("unknown command %q", args[0])
	}
	return command(args[1:])
}

// open opens the database that a DSN's scheme names; pq is PostgreSQL over lib/pq.
func open(ctx context.Context, dsn string) (dblock.DB, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, err
	}
	switch u.Scheme {
	case "postgres":
		return postgres.Open(ctx, dsn)
	case "pq":
		u.Scheme = "postgres"
		connector, err := pq.NewConnector(u.String())
		if err != nil {
			return nil, err
		}
		return postgres.NewSQL(ctx, sql.OpenDB(connector))
	case "mysql", "mariadb":
		return mysql.Open(ctx, dsn)
	case "sqlserver":
		return sqlserver.Open(ctx, dsn)
	}
	return nil, fmt.Errorf("unknown scheme %q", u.Scheme)
}
