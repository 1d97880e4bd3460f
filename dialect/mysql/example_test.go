package mysql_test

import (
	"context"
	"database/sql"
	"log"

	"github.com/dblock-go/dblock/dialect/mysql"
)

// Locks take their connections out of the application's pool.
func ExampleNew() {
	pool, err := sql.Open("mysql", "app@tcp(localhost:3306)/shop?parseTime=true")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	db, err := mysql.New(context.Background(), pool)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
}

// Locks have connections of their own.
func ExampleOpen() {
	db, err := mysql.Open(context.Background(), "mariadb://app@localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
}
