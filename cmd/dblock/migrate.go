package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/migrations"
)

type migrateCmd struct {
	Up      migrateUpCmd      `cmd:"" help:"Apply what is pending."`
	UpTo    migrateUpToCmd    `cmd:"" help:"Apply what is pending up to a version."`
	Down    migrateDownCmd    `cmd:"" help:"Undo the newest migration."`
	Status  migrateStatusCmd  `cmd:"" help:"List the migrations and when they were applied."`
	Version migrateVersionCmd `cmd:"" help:"Print the version that the database has, 0 for none."`
}

// Help is shown by dblock migrate --help.
func (migrateCmd) Help() string {
	return "Any number of processes may migrate one database at once: one does it, the others wait, " +
		"then look again and find it done. Files are named 00001_name.sql; see https://pressly.github.io/goose."
}

// source is where migrations come from and where their state is kept.
type source struct {
	format
	Dir   string `required:"" placeholder:"DIR" help:"The folder with the migrations. Where there is no such folder, the exit code is 2."`
	Table string `placeholder:"NAME" help:"The table in which goose keeps the state. Default: goose_db_version."`
}

// changing is what the commands that change the database have in common.
type changing struct {
	source
	Wait *time.Duration `placeholder:"30s" help:"How long to wait at most for another process that migrates. Default: until it is done. Connecting may take as long again, but 2s at least and 30s at most."`
}

type (
	migrateUpCmd   struct{ changing }
	migrateUpToCmd struct {
		changing
		Version int64 `arg:"" help:"The version to stop after."`
	}
	migrateDownCmd    struct{ changing }
	migrateStatusCmd  struct{ source }
	migrateVersionCmd struct{ source }
)

func (c *migrateUpCmd) Run(ctx context.Context, a *app) error {
	return c.change(ctx, a, func(db dblock.DB, fsys fs.FS, o *migrations.Options) ([]*goose.MigrationResult, error) {
		return migrations.Up(ctx, db, fsys, o)
	})
}

func (c *migrateUpToCmd) Run(ctx context.Context, a *app) error {
	return c.change(ctx, a, func(db dblock.DB, fsys fs.FS, o *migrations.Options) ([]*goose.MigrationResult, error) {
		return migrations.UpTo(ctx, db, fsys, c.Version, o)
	})
}

func (c *migrateDownCmd) Run(ctx context.Context, a *app) error {
	return c.change(ctx, a, func(db dblock.DB, fsys fs.FS, o *migrations.Options) ([]*goose.MigrationResult, error) {
		result, err := migrations.Down(ctx, db, fsys, o)
		if result == nil {
			return nil, err
		}
		return []*goose.MigrationResult{result}, err
	})
}

func (c *migrateStatusCmd) Run(ctx context.Context, a *app) error {
	var all []*goose.MigrationStatus
	err := c.with(ctx, a, 0, func(db dblock.DB, fsys fs.FS, o *migrations.Options) (err error) {
		all, err = migrations.Status(ctx, db, fsys, o)
		return err
	})
	if err != nil {
		return err
	}
	return c.writeStatus(a, all)
}

func (c *migrateVersionCmd) Run(ctx context.Context, a *app) error {
	var version int64
	err := c.with(ctx, a, 0, func(db dblock.DB, fsys fs.FS, o *migrations.Options) (err error) {
		version, err = migrations.Version(ctx, db, fsys, o)
		return err
	})
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(a.stdout, map[string]int64{"version": version})
	}
	_, err = fmt.Fprintln(a.stdout, version)
	return err
}

// with opens the folder and the database.
func (s *source) with(ctx context.Context, a *app, wait time.Duration, use func(dblock.DB, fs.FS, *migrations.Options) error) error {
	switch info, err := os.Stat(s.Dir); {
	case errors.Is(err, fs.ErrNotExist):
		return &exitError{exitUsage, fmt.Errorf("--dir: %w", err)}
	case err != nil:
		return fmt.Errorf("--dir: %w", err)
	case !info.IsDir():
		return &exitError{exitUsage, fmt.Errorf("--dir: %s is not a folder", s.Dir)}
	}
	db, err := a.database(ctx, wait)
	if err != nil {
		return err
	}
	return closing(db, use(db, os.DirFS(s.Dir), &migrations.Options{VersionTable: s.Table, Observer: a.announce()}))
}

// change prints what was applied even if a later migration failed; as JSON even
// if nothing was.
func (c *changing) change(ctx context.Context, a *app, apply func(dblock.DB, fs.FS, *migrations.Options) ([]*goose.MigrationResult, error)) error {
	var results []*goose.MigrationResult
	var wait time.Duration
	if c.Wait != nil {
		wait = *c.Wait
	}
	err := c.with(ctx, a, wait, func(db dblock.DB, fsys fs.FS, o *migrations.Options) (err error) {
		o.WaitLimit = wait
		results, err = apply(db, fsys, o)
		if errors.Is(err, dblock.ErrTimeout) && len(results) == 0 {
			err = &exitError{exitNotAcquired, err}
		}
		return err
	})
	if err != nil && len(results) == 0 && !c.JSON {
		return err
	}
	return errors.Join(err, c.writeResults(a, results))
}

// Validate is called when the command line has been read.
func (c *changing) Validate() error {
	if c.Wait != nil && *c.Wait <= 0 {
		return fmt.Errorf("--wait %v: must be positive", *c.Wait)
	}
	return nil
}

// migration is one line of what up, up-to, down and status print.
type migration struct {
	Version   int64      `json:"version"`
	File      string     `json:"file"`
	Direction string     `json:"direction,omitempty"`
	Seconds   *float64   `json:"seconds,omitempty"`
	State     string     `json:"state,omitempty"`
	AppliedAt *time.Time `json:"applied_at,omitempty"`
}

func (s *source) writeResults(a *app, results []*goose.MigrationResult) error {
	all := make([]migration, len(results))
	rows := [][]string{{"VERSION", "FILE", "DIRECTION", "TOOK"}}
	for i, r := range results {
		seconds := r.Duration.Seconds()
		all[i] = migration{Version: r.Source.Version, File: filepath.Base(r.Source.Path), Direction: r.Direction, Seconds: &seconds}
		rows = append(rows, []string{strconv.FormatInt(all[i].Version, 10), all[i].File, r.Direction, r.Duration.Round(time.Millisecond).String()})
	}
	switch {
	case s.JSON:
		return writeJSON(a.stdout, all)
	case len(all) == 0:
		_, err := fmt.Fprintln(a.stdout, "nothing to do")
		return err
	}
	return writeTable(a.stdout, rows...)
}

func (s *source) writeStatus(a *app, statuses []*goose.MigrationStatus) error {
	all := make([]migration, len(statuses))
	rows := [][]string{{"VERSION", "FILE", "STATE", "APPLIED AT"}}
	for i, m := range statuses {
		all[i] = migration{Version: m.Source.Version, File: filepath.Base(m.Source.Path), State: string(m.State)}
		at := ""
		if !m.AppliedAt.IsZero() {
			all[i].AppliedAt, at = &m.AppliedAt, m.AppliedAt.Format(time.RFC3339)
		}
		rows = append(rows, []string{strconv.FormatInt(all[i].Version, 10), all[i].File, all[i].State, at})
	}
	if s.JSON {
		return writeJSON(a.stdout, all)
	}
	return writeTable(a.stdout, rows...)
}
