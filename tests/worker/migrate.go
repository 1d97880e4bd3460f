package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"os"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/migrations"
)

// migrate applies three migrations. Its arguments are a DSN and, if it shall
// hang there until it is killed, a step: acquired, first, second or released.
// It prints each step that it comes to.
func migrate(args []string) error {
	if len(args) == 0 || len(args) > 2 {
		return fmt.Errorf("usage: worker migrate DSN [STEP]")
	}
	ctx := context.Background()
	db, err := open(ctx, args[0])
	if err != nil {
		return err
	}
	defer db.Close()
	step := func(name string) {
		fmt.Println(name)
		if len(args) == 2 && args[1] == name {
			hang()
		}
	}
	observer := dblock.ObserverFunc(func(_ context.Context, e dblock.Event) { step(string(e.Kind)) })
	results, err := migrations.Up(ctx, db, nil, &migrations.Options{
		Observer: observer,
		Provider: []goose.ProviderOption{goose.WithGoMigrations(
			migration(1, func() {}, "CREATE TABLE entries (id INT NOT NULL PRIMARY KEY)"),
			migration(2, func() { step("first") }, "INSERT INTO entries VALUES (1)", "INSERT INTO entries VALUES (2)"),
			migration(3, func() { step("second") }, "INSERT INTO entries VALUES (3)", "INSERT INTO entries VALUES (4)"),
		)},
	})
	for _, r := range results {
		fmt.Println("applied", r.Source.Version)
	}
	return err
}

// hang waits to be killed; it ends with the process that started this one.
func hang() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(1)
}

// migration comes to its step after the first of its statements.
func migration(version int64, step func(), statements ...string) *goose.Migration {
	return goose.NewGoMigration(version, &goose.GoFunc{RunTx: func(ctx context.Context, tx *sql.Tx) error {
		for i, statement := range statements {
			if _, err := tx.ExecContext(ctx, statement); err != nil {
				return err
			}
			if i == 0 {
				step()
			}
		}
		return nil
	}}, nil)
}
