package deadlock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

func TestClasses(t *testing.T) {
	db := &fakeDB{}
	wrappings := map[string]func(dialect.Class) error{
		"of the driver":          func(c dialect.Class) error { return driverError{c} },
		"of the driver, wrapped": func(c dialect.Class) error { return fmt.Errorf("step 2: %w", driverError{c}) },
		"of a dialect":           func(c dialect.Class) error { return &dialect.Error{Class: c} },
		"of dblock": func(c dialect.Class) error {
			return dblock.NewError("lock", db, nil, &dialect.Error{Class: c})
		},
		"joined": func(c dialect.Class) error { return errors.Join(errors.New("another"), &dialect.Error{Class: c}) },
	}
	classes := map[dialect.Class]func(dblock.DB, error) bool{
		dblock.ErrDeadlock:      deadlock.IsDeadlock,
		dblock.ErrSerialization: deadlock.IsSerialization,
		dblock.ErrTimeout:       deadlock.IsTimeout,
		dblock.ErrLost:          deadlock.IsLost,
	}
	for name, wrap := range wrappings {
		t.Run(name, func(t *testing.T) {
			for class := range classes {
				err := wrap(class)
				for other, is := range classes {
					if got, want := is(db, err), other == class; got != want {
						t.Errorf("%v: is %v = %t, want %t", err, other, got, want)
					}
				}
				retryable := class == dblock.ErrDeadlock || class == dblock.ErrSerialization
				if got := deadlock.IsRetryable(db, err); got != retryable {
					t.Errorf("IsRetryable(%v) = %t, want %t", err, got, retryable)
				}
			}
		})
	}
}

func TestNoClass(t *testing.T) {
	for _, db := range []dblock.DB{&fakeDB{}, nil} {
		for _, err := range []error{nil, errors.New("not enough money"), context.Canceled} {
			if deadlock.IsRetryable(db, err) || deadlock.IsTimeout(db, err) || deadlock.IsLost(db, err) {
				t.Errorf("%v has a class", err)
			}
		}
	}
}

func TestRemains(t *testing.T) {
	db := &fakeDB{remains: dialect.RemainsAborted}
	for _, test := range []struct {
		name string
		err  error
		want dialect.Remains
	}{
		{"no error", nil, dialect.RemainsUsable},
		{"unknown error", errors.New("not enough money"), dialect.RemainsUnknown},
		{"of the driver", driverError{dialect.Deadlock}, dialect.RemainsAborted},
		// The driver's error would say otherwise, but the dialect knew better.
		{"of a dialect", &dialect.Error{Class: dialect.Deadlock, Remains: dialect.RemainsUsable, Err: driverError{dialect.Deadlock}}, dialect.RemainsUsable},
	} {
		if got := deadlock.Remains(db, test.err); got != test.want {
			t.Errorf("%s: %d, want %d", test.name, got, test.want)
		}
	}
}
