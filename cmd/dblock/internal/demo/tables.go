package demo

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"github.com/dblock-go/dblock"
)

// The demo's tables. The SQL of the demo is what all databases understand.
const (
	// ownerTable says that the others are the demo's: it is made first and dropped
	// last, so that the next demo can remove what a killed one has left.
	ownerTable         = "dblock_demo_owner"
	versionsTable      = "dblock_demo_versions" // goose's
	accountsTable      = "dblock_demo_accounts"
	projectionTable    = "dblock_demo_projection"
	stepsTable         = "dblock_demo_steps"
	locksTable         = "dblock_demo_locks"
	locksVersionsTable = "dblock_dblock_demo_locks_version" // of migrations.Setup

	ownerNote = "made by dblock demo; may be dropped"
)

var otherTables = []string{versionsTable, accountsTable, projectionTable, stepsTable, locksTable, locksVersionsTable}

// prepare makes sure that the demo's tables are its own.
func prepare(ctx context.Context, db dblock.DB) error {
	owned, err := isOwner(ctx, db)
	if err != nil {
		return err
	}
	if owned {
		if err := removeTables(ctx, db); err != nil {
			return fmt.Errorf("remove the tables that a demo left which was killed: %w", err)
		}
	}
	for _, table := range append(slices.Clone(otherTables), ownerTable) {
		there, err := exists(ctx, db, table)
		if err != nil {
			return err
		}
		if there {
			return fmt.Errorf("the database has a table %s that is not the demo's: rename it, or use another database", table)
		}
	}
	return execAll(ctx, db,
		fmt.Sprintf("CREATE TABLE %s (note VARCHAR(100) NOT NULL)", ownerTable),
		fmt.Sprintf("INSERT INTO %s (note) VALUES ('%s')", ownerTable, ownerNote))
}

// isOwner: a demo has made the tables that are there.
func isOwner(ctx context.Context, db dblock.DB) (bool, error) {
	var note string
	err := db.SQL().QueryRowContext(ctx, "SELECT note FROM "+ownerTable).Scan(&note)
	switch {
	case err == nil:
		return note == ownerNote, nil
	case errors.Is(err, sql.ErrNoRows), errors.Is(db.Classify(err), dblock.ErrSetup):
		return false, nil
	}
	return false, fmt.Errorf("look for tables of an earlier demo: %w", db.Classify(err))
}

func exists(ctx context.Context, db dblock.DB, table string) (bool, error) {
	rows, err := db.SQL().QueryContext(ctx, fmt.Sprintf("SELECT 1 FROM %s WHERE 1 = 0", table))
	switch {
	case err == nil:
		return true, errors.Join(rows.Err(), rows.Close())
	case errors.Is(db.Classify(err), dblock.ErrSetup):
		return false, nil
	}
	return false, fmt.Errorf("look for table %s: %w", table, db.Classify(err))
}

func removeTables(ctx context.Context, db dblock.DB) error {
	for _, table := range append(slices.Clone(otherTables), ownerTable) {
		there, err := exists(ctx, db, table)
		if err != nil {
			return err
		}
		if there {
			if err := execAll(ctx, db, "DROP TABLE "+table); err != nil {
				return err
			}
		}
	}
	return nil
}

func execAll(ctx context.Context, db dblock.DB, statements ...string) error {
	for _, statement := range statements {
		if _, err := db.SQL().ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, db.Classify(err))
		}
	}
	return nil
}
