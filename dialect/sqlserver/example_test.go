package sqlserver_test

import (
	"context"
	"database/sql"
	"log"

	"github.com/dblock-go/dblock/dialect/sqlserver"
)

func ExampleNew() {
	pool, err := sql.Open("sqlserver", "sqlserver://app@localhost?database=shop")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	db, err := sqlserver.New(context.Background(), pool)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
}
