package deadlock_test

import (
	"errors"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// driverError is an error as a driver returns it.
type driverError struct{ class dialect.Class }

func (e driverError) Error() string { return "server says " + string(e.class) }

// fakeDB knows driverErrors. Retry and the classes use nothing else of a DB.
type fakeDB struct {
	dblock.DB
	remains dialect.Remains
}

func (*fakeDB) Name() string { return "fake" }

func (db *fakeDB) Classify(err error) error {
	var e driverError
	if errors.As(err, &e) {
		return &dialect.Error{Class: e.class, Code: "12345", Remains: db.remains, Err: err}
	}
	return err
}
