package mysql

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// flavor is what differs between the two servers.
type flavor struct {
	name string
	// oldest is the first version with the setting statementLimit. Somewhat older
	// ones let a second GET_LOCK silently release the first.
	oldest []int
	// statementLimit is the setting that would end a wait for an advisory lock.
	statementLimit string
	// readOnly is the setting that transactions are read-only.
	readOnly string
	// inTransaction is an expression that is 0 where there is no transaction, as far as
	// the server tells: https://mariadb.com/docs/server/ha-and-performance/optimization-and-tuning/system-variables/server-system-variables#in_transaction
	inTransaction string
	// forShare locks a row in shared mode.
	forShare string
	// limited is a SELECT that the server ends after some time.
	limited func(query string, limit time.Duration) string
	// sortingAll is a SELECT that sorts by more than the beginnings of values.
	sortingAll func(query string) string
	// row is what stands before a row of VALUES.
	row string
	// room is how many advisory locks a session may hold.
	room int
	// inspect lists the advisory locks of the given keys, or all.
	inspect func(ctx context.Context, conn dialect.Querier, keys []dialect.Key) ([]dialect.Holding, error)
	// snapshot reads the server's own views.
	snapshot func(ctx context.Context, l *survey) error
	// errors are the numbers that the other server uses for something else.
	errors map[uint16]meaning
}

var mysqlFlavor = flavor{
	name:           "mysql",
	oldest:         []int{5, 7, 8},
	statementLimit: "max_execution_time", // https://dev.mysql.com/doc/refman/en/server-system-variables.html#sysvar_max_execution_time
	readOnly:       "transaction_read_only",
	inTransaction:  "1",
	forShare:       "FOR SHARE",
	limited:        limitedByHint,
	sortingAll:     sortingByHint,
	row:            "ROW", // https://dev.mysql.com/doc/refman/en/values.html
	// A session finds a lock in a hash table: at 100,000 held it is as fast as
	// without any. But ending a session takes 0.1 s at 10,000 and 4 s at 100,000.
	room:     10_000,
	inspect:  inspectMySQL,
	snapshot: snapshotMySQL,
	errors:   mysqlErrors,
}

var mariadbFlavor = flavor{
	name:           "mariadb",
	oldest:         []int{10, 1, 1},
	statementLimit: "max_statement_time", // https://mariadb.com/docs/server/ha-and-performance/optimization-and-tuning/query-optimizations/aborting-statements
	readOnly:       "tx_read_only",
	inTransaction:  "@@in_transaction",
	forShare:       "LOCK IN SHARE MODE", // https://mariadb.com/docs/server/reference/sql-statements/data-manipulation/selecting-data/lock-in-share-mode
	limited:        limitedBySet,
	sortingAll:     sortingBySet,
	row:            "", // https://mariadb.com/docs/server/reference/sql-structure/sql-language-structure/table-value-constructors
	// A session finds a lock in a list: a lock and its release take 1.2 times as long
	// at 2,000 held as without any, 1.5 times at 5,000, twice at 10,000.
	room:     2_000,
	inspect:  inspectMariaDB,
	snapshot: snapshotMariaDB,
	errors:   mariadbErrors,
}

// flavorOf tells the servers apart by version() and version_comment: either may
// have been changed by who built the server.
func flavorOf(version, comment string) *flavor {
	if strings.Contains(strings.ToLower(version+comment), "mariadb") {
		return &mariadbFlavor
	}
	return &mysqlFlavor
}

// refuseLookAlike knows servers that speak MySQL's protocol but are others. Either
// text may have been changed by who runs the server.
func refuseLookAlike(version, comment string) error {
	switch v := strings.ToLower(version + " " + comment); {
	case strings.Contains(v, "tidb"):
		// https://docs.pingcap.com/tidb/stable/locking-functions
		return unsafe("the server is TiDB, which does not detect deadlocks of GET_LOCK and ends its waits after an hour", "use row locks only")
	case strings.Contains(v, "vitess"), strings.Contains(v, "planetscale"):
		// https://vitess.io/docs/reference/compatibility/mysql-compatibility/
		return unsafe("the server is Vitess, which keeps GET_LOCK on one shard, on a reserved connection that it may end", "use row locks only")
	}
	return nil
}

// refuseOld is nil if the version is recent enough.
func (f *flavor) refuseOld(version string) error {
	if slices.Compare(numbers(version), f.oldest) >= 0 {
		return nil
	}
	oldest := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(f.oldest)), "."), "[]")
	return unsafe(fmt.Sprintf("the server's version %s does not hold several locks in one session", version), "upgrade to "+oldest+" or newer")
}

// numbers are the first three of a version such as 10.11.19-MariaDB-0+deb12u1.
func numbers(version string) []int {
	release, _, _ := strings.Cut(version, "-")
	var list []int
	for part := range strings.SplitSeq(release, ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			break
		}
		list = append(list, n)
	}
	return list[:min(len(list), 3)]
}

// settings is the statement that makes a connection of the application's pool
// fit for a session: nothing but its owner may end its waits, its writes commit
// by themselves, and the server's views show whose it is.
func (f *flavor) settings(o dialect.SessionOptions) string {
	application := cmp.Or(o.Application, defaultApplication)
	text := fmt.Sprintf("SET SESSION autocommit = 1, %s = 0, @%s = _utf8mb4 X'%X', @%s = UNIX_TIMESTAMP()",
		f.statementLimit, applicationVariable, application, sinceVariable)
	if silence := o.Silence(); silence > 0 {
		text += fmt.Sprintf(", wait_timeout = %d", seconds(min(silence, longestWait)))
	}
	return text
}
