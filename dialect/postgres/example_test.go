package postgres_test

import (
	"context"
	"errors"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect/postgres"
	"github.com/dblock-go/dblock/rowlock"
)

func ExampleNew() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://app@localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	db, err := postgres.New(ctx, pool)
	if errors.Is(err, dblock.ErrUnsafe) {
		log.Fatal(err) // says that there is a pooler or a standby, and where to connect instead
	}
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
}

// A transaction of pgx's own goes to package rowlock through Tx.
func ExampleTx() {
	ctx := context.Background()
	var pool *pgxpool.Pool
	var rows *rowlock.Locker

	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := rows.Lock(ctx, postgres.Tx(tx), dblock.NewKey("account", "42")); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance - 1 WHERE id = 42")
		return err
	})
	if err != nil {
		log.Print(err)
	}
}
