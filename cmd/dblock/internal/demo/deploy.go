package demo

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/migrations"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

var (
	guardKey = dblock.NewKey("dblock demo", "migrations")
	// versions of the migrations: those of the files, and longMigration.
	versions = []int64{1, 2, 3}
)

const (
	replicas = 4
	// longMigration takes as long as one of a large table, so that the other
	// replicas are seen waiting.
	longMigration     = 3
	longMigrationTime = 1200 * time.Millisecond
)

// deploy is the first act.
func (p *play) deploy(ctx context.Context, c *cast, _ *facts) error {
	p.timeline.act("Deploy: four replicas of a service start, and each wants to run the migrations.")
	for i := range replicas {
		if _, err := c.start("replica", fmt.Sprintf("replica-%d", i+1)); err != nil {
			return err
		}
	}
	return c.playOut(ctx)
}

// replica migrates, as every replica of a service does when it starts.
func (c *child) replica(ctx context.Context) error {
	return c.withDB(ctx, func(db dblock.DB) error {
		files, err := fs.Sub(migrationFiles, "migrations")
		if err != nil {
			return err
		}
		results, err := migrations.Up(ctx, db, files, &migrations.Options{
			VersionTable: versionsTable,
			Key:          guardKey,
			Observer: dblock.ObserverFunc(func(ctx context.Context, e dblock.Event) {
				if e.Kind == dblock.EventAcquired {
					c.tell(Event{Kind: kindAcquired, Session: holder(ctx, db, guardKey)})
				}
				c.tellWaiting(ctx, e)
			}),
			Provider: []goose.ProviderOption{goose.WithGoMigrations(
				goose.NewGoMigration(longMigration, &goose.GoFunc{RunTx: takeLong}, nil))},
		})
		if err != nil {
			return err
		}
		migrated := Event{Kind: kindMigrated}
		for _, r := range results {
			migrated.Versions = append(migrated.Versions, r.Source.Version)
		}
		c.tell(migrated)
		return nil
	})
}

func takeLong(ctx context.Context, tx *sql.Tx) error {
	if err := work(ctx, longMigrationTime); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET owner = owner", accountsTable))
	return err
}
