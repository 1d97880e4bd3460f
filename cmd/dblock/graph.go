package main

import (
	"context"
	"errors"
	"io"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
)

type graphCmd struct {
	format
	watched
	Format         string `enum:"text,dot,mermaid" default:"text" help:"How to print the graph: text, dot (Graphviz) or mermaid."`
	FullStatements bool   `help:"Print statements as they were sent, with the values in them, which may be secrets."`
	Schema         string `help:"The schema of the lock table, which knows the names of keys. Default: the connection's own."`
	Table          string `help:"The name of the lock table. Default: locks."`
}

func (c *graphCmd) Run(ctx context.Context, a *app) error {
	if c.JSON && c.Format != "text" {
		return &exitError{exitUsage, errors.New("--json and --format exclude each other")}
	}
	// To look at the locks of a database nothing need be safe there.
	db, err := a.unsafeDatabase(ctx)
	if err != nil {
		return err
	}
	err = c.show(ctx, a, func(ctx context.Context, out io.Writer) error { return c.print(ctx, db, out) })
	return closing(db, err)
}

func (c *graphCmd) print(ctx context.Context, db dblock.DB, out io.Writer) error {
	s, err := deadlock.Inspect(ctx, db, &deadlock.InspectOptions{FullStatements: c.FullStatements, Schema: c.Schema, Table: c.Table})
	if err != nil {
		return err
	}
	switch {
	case c.JSON:
		return writeJSON(out, s)
	case c.Format == "dot":
		_, err = io.WriteString(out, s.DOT())
	case c.Format == "mermaid":
		_, err = io.WriteString(out, s.Mermaid())
	default:
		_, err = io.WriteString(out, s.Text())
	}
	return err
}
