package migrations_test

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/migrations"
)

//go:embed testdata/*.sql
var embedded embed.FS

// A program migrates when it starts. However many replicas start at once, one
// applies the migrations and the others wait for it.
func ExampleUp() {
	ctx := context.Background()
	db, err := postgres.Open(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	files, err := fs.Sub(embedded, "testdata") // filled by //go:embed testdata/*.sql
	if err != nil {
		log.Fatal(err)
	}
	results, err := migrations.Up(ctx, db, files, &migrations.Options{
		WaitLimit: 10 * time.Minute,
		Observer:  dblock.SlogObserver(slog.Default()), // says who is waited for
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range results {
		fmt.Println("applied", r)
	}
}

// A migration in Go runs in a transaction on the connection that holds the
// guard.
func ExampleUp_goMigration() {
	ctx := context.Background()
	db, err := postgres.Open(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	backfill := goose.NewGoMigration(2, &goose.GoFunc{
		RunTx: func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "UPDATE accounts SET currency = 'EUR' WHERE currency IS NULL")
			return err
		},
	}, nil)
	_, err = migrations.Up(ctx, db, os.DirFS("migrations"), &migrations.Options{
		Provider: []goose.ProviderOption{goose.WithGoMigrations(backfill)},
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A program that uses goose by itself takes the guard alone.
func ExampleSessionLocker() {
	ctx := context.Background()
	db, err := postgres.Open(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	guard, err := migrations.SessionLocker(db)
	if err != nil {
		log.Fatal(err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db.SQL(), os.DirFS("migrations"),
		goose.WithSessionLocker(guard))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := provider.Up(ctx); err != nil {
		log.Fatal(err)
	}
}

// Fencing numbers and package rowlock need dblock's own tables. Creating them is
// safe on every start.
func ExampleSetup() {
	ctx := context.Background()
	db, err := postgres.Open(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if err := migrations.Setup(ctx, db); err != nil {
		log.Fatal(err)
	}
}
