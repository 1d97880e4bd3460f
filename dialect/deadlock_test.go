package dialect_test

import (
	"errors"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

type featuresDB struct {
	dialect.DB
	features dialect.Features
}

func (featuresDB) Name() string                 { return "fake" }
func (d featuresDB) Features() dialect.Features { return d.features }

func TestDeadlockSettingsAreChecked(t *testing.T) {
	for _, test := range []struct {
		settings dialect.DeadlockSettings
		features dialect.Features
		want     error
	}{
		{dialect.DeadlockSettings{}, dialect.Features{}, nil},
		{dialect.DeadlockSettings{Priority: -10}, dialect.Features{DeadlockPriority: true}, nil},
		{dialect.DeadlockSettings{Priority: 11}, dialect.Features{DeadlockPriority: true}, dialect.InvalidOption},
		{dialect.DeadlockSettings{Priority: -11}, dialect.Features{DeadlockPriority: true}, dialect.InvalidOption},
		{dialect.DeadlockSettings{Priority: 1}, dialect.Features{DeadlockTimeout: true}, dialect.Unsupported},
		{dialect.DeadlockSettings{Timeout: time.Millisecond}, dialect.Features{DeadlockTimeout: true}, nil},
		{dialect.DeadlockSettings{Timeout: time.Microsecond}, dialect.Features{DeadlockTimeout: true}, dialect.InvalidOption},
		{dialect.DeadlockSettings{Timeout: -time.Second}, dialect.Features{DeadlockTimeout: true}, dialect.InvalidOption},
		{dialect.DeadlockSettings{Timeout: time.Second}, dialect.Features{DeadlockPriority: true}, dialect.Unsupported},
		{dialect.DeadlockSettings{Timeout: time.Second}, dialect.Features{}, dialect.Unsupported},
	} {
		if err := test.settings.Check(featuresDB{features: test.features}); !errors.Is(err, test.want) {
			t.Errorf("%+v on %+v: %v, want %v", test.settings, test.features, err, test.want)
		}
	}
}
