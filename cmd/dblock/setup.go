package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/migrations"
)

type setupCmd struct {
	format
	Schema string `placeholder:"NAME" help:"The schema of the tables, which must exist. Default: the connection's own."`
	Table  string `placeholder:"NAME" help:"Create only a lock table of this name. Default: locks and once."`
}

// setUp is what setup did.
type setUp struct {
	Schema string `json:"schema,omitempty"`
	Table  string `json:"table"`
	Result string `json:"result"`         // created, updated or unchanged
	Once   string `json:"once,omitempty"` // the same of the table once
}

func (c *setupCmd) Run(ctx context.Context, a *app) error {
	db, err := a.database(ctx, 0)
	if err != nil {
		return err
	}
	tables := []string{"locks", dialect.OnceTable}
	if c.Table != "" {
		tables = []string{c.Table}
	}
	results, err := c.setUp(ctx, a, db, tables)
	if err := closing(db, err); err != nil {
		return err
	}
	if c.JSON {
		done := setUp{Schema: c.Schema, Table: tables[0], Result: results[0]}
		if len(results) > 1 {
			done.Once = results[1]
		}
		return writeJSON(a.stdout, done)
	}
	for i, name := range tables {
		if c.Schema != "" {
			name = c.Schema + "." + name
		}
		if _, err := fmt.Fprintf(a.stdout, "lock table %s: %s\n", name, results[i]); err != nil {
			return err
		}
	}
	return nil
}

func (c *setupCmd) setUp(ctx context.Context, a *app, db dblock.DB, tables []string) (results []string, err error) {
	for _, name := range tables {
		existed, before := db.CheckTable(ctx, dialect.Table{Schema: c.Schema, Name: name})
		switch {
		case before != nil && !errors.Is(before, dblock.ErrSetup):
			return nil, dblock.NewError("setup", db, nil, before)
		case !existed:
			results = append(results, "created")
		case before != nil:
			results = append(results, "updated")
		default:
			results = append(results, "unchanged")
		}
	}
	return results, migrations.Setup(ctx, db, &migrations.SetupOptions{Schema: c.Schema, Table: c.Table, Observer: a.announce()})
}
