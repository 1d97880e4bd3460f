package migrations

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// Options shape a run of migrations. A nil *Options means all defaults.
type Options struct {
	// VersionTable is goose's record of what has been applied: letters, digits and
	// underscores, with a schema and a dot in front if need be. Default:
	// goose.DefaultTablename, "goose_db_version".
	VersionTable string
	// Key is the guard; all replicas must agree on it. Default: derived from the
	// version table's name without its schema, whatever its case, so that runs
	// which may mean one table exclude each other. dblock.RawKey(lock.DefaultLockID)
	// meets the session locker that goose itself has for PostgreSQL.
	Key dblock.Key
	// WaitLimit bounds the wait for the guard, in addition to the context.
	// Default: no limit.
	WaitLimit time.Duration
	// Observer hears of the guard: soon after a wait began and then every 5 s for
	// whom and how long, and when it was acquired, released or lost. Default: none.
	Observer dblock.Observer
	// Provider is passed on to goose.NewProvider: Go migrations, out of order,
	// verbose. The locker, the store and the table's name are this package's.
	Provider []goose.ProviderOption
}

var (
	identifier = regexp.MustCompile(`^[A-Za-z0-9_]+$`)
	tableName  = regexp.MustCompile(`^([A-Za-z0-9_]+\.)?[A-Za-z0-9_]+$`)
)

// resolve checks the options and fills in the defaults.
func resolve(given []*Options) (Options, error) {
	o, err := atMostOne(given)
	if err != nil {
		return o, err
	}
	if o.VersionTable == "" {
		o.VersionTable = goose.DefaultTablename
	}
	if !tableName.MatchString(o.VersionTable) {
		return o, dialect.Invalidf("VersionTable %q: letters, digits and underscores, with a schema and a dot in front if need be", o.VersionTable)
	}
	if o.WaitLimit < 0 {
		return o, dialect.Invalidf("WaitLimit %v: must not be negative; 0 means no limit", o.WaitLimit)
	}
	if !o.Key.Valid() {
		o.Key = guardKey(o.VersionTable)
	}
	if o.Key.Mode() != dblock.Exclusive {
		return o, dialect.Invalidf("Key %s is shared: a guard that several hold guards nothing", o.Key)
	}
	return o, nil
}

// guardKey is the default guard of a version table.
func guardKey(versionTable string) dblock.Key {
	name := versionTable[strings.LastIndexByte(versionTable, '.')+1:]
	return dblock.NewKey("migrations", strings.ToLower(name))
}

func atMostOne[T any](given []*T) (o T, err error) {
	switch {
	case len(given) > 1:
		return o, dialect.Invalidf("give at most one options value, not %d", len(given))
	case len(given) == 1 && given[0] != nil:
		o = *given[0]
	}
	return o, nil
}

var errNilDB = fmt.Errorf("dblock: migrations: %w", dialect.Invalidf("the database is nil"))
