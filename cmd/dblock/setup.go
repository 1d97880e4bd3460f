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
	Schema string `placeholder:"NAME" help:"The schema of the lock table, which must exist. Default: the connection's own."`
	Table  string `default:"locks" help:"The name of the lock table. Default: ${default}."`
}

// setUp is what setup did.
type setUp struct {
	Schema string `json:"schema,omitempty"`
	Table  string `json:"table"`
	Result string `json:"result"` // created, updated or unchanged
}

func (c *setupCmd) Run(ctx context.Context, a *app) error {
	db, err := a.database(ctx, 0)
	if err != nil {
		return err
	}
	result, err := c.setUp(ctx, a, db)
	if err := closing(db, err); err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(a.stdout, setUp{Schema: c.Schema, Table: c.Table, Result: result})
	}
	name := c.Table
	if c.Schema != "" {
		name = c.Schema + "." + name
	}
	_, err = fmt.Fprintf(a.stdout, "lock table %s: %s\n", name, result)
	return err
}

func (c *setupCmd) setUp(ctx context.Context, a *app, db dblock.DB) (result string, err error) {
	existed, before := db.CheckTable(ctx, dialect.Table{Schema: c.Schema, Name: c.Table})
	if before != nil && !errors.Is(before, dblock.ErrSetup) {
		return "", dblock.NewError("setup", db, nil, before)
	}
	err = migrations.Setup(ctx, db, &migrations.SetupOptions{Schema: c.Schema, Table: c.Table, Observer: a.announce()})
	switch {
	case !existed:
		result = "created"
	case before != nil:
		result = "updated"
	default:
		result = "unchanged"
	}
	return result, err
}
