package mysql

import (
	"reflect"
	"testing"

	"github.com/dblock-go/dblock/dialect"
)

// The views are not of one moment: a lock that changes hands meanwhile is seen both as it
// was and as it is.
func TestNobodyWaitsForWhoWaitsForHim(t *testing.T) {
	table := dialect.Target{Kind: dialect.KindTable, Table: "app.hot"}
	lock := func(session int64, mode string, pending bool) metadataLock {
		return metadataLock{object: "TABLE", target: table, mode: mode, pending: pending, session: session}
	}
	for what, test := range map[string]struct {
		locks []metadataLock
		want  []dialect.SnapshotWait
	}{
		"holders go before those who came first": {
			[]metadataLock{lock(1, "SHARED_READ", false), lock(2, "EXCLUSIVE", true), lock(1, "SHARED_READ", true)},
			[]dialect.SnapshotWait{{Waiter: 2, Blocker: 1, Target: table}},
		},
		"two that hold what the other wants have done so one after the other": {
			[]metadataLock{lock(1, "EXCLUSIVE", false), lock(2, "EXCLUSIVE", true), lock(2, "EXCLUSIVE", false), lock(1, "EXCLUSIVE", true)}, nil,
		},
		"a reader waits behind a change": {
			[]metadataLock{lock(1, "EXCLUSIVE", true), lock(2, "SHARED_READ", true)},
			[]dialect.SnapshotWait{{Waiter: 2, Blocker: 1, Target: table}},
		},
	} {
		l := &survey{s: &dialect.Snapshot{}, metadata: test.locks}
		l.waitForMetadata()
		if !reflect.DeepEqual(l.s.Waits, test.want) {
			t.Errorf("%s: waits %+v, want %+v", what, l.s.Waits, test.want)
		}
		if len(l.s.Locks) != len(test.locks) {
			t.Errorf("%s: locks %+v", what, l.s.Locks)
		}
	}
}

func TestStatementTellsWhatItWaitsFor(t *testing.T) {
	holdsBeta := func(name string) bool { return name == "beta" }
	for statement, want := range map[string]string{
		`SELECT GET_LOCK('alpha', 10)`:                        "alpha",
		`DO get_lock ( "alpha" , 10)`:                         "alpha",
		`SELECT GET_LOCK('beta', 1), GET_LOCK('alpha', 10)`:   "alpha",
		`SELECT GET_LOCK('gamma', 0), GET_LOCK('alpha', 1.5)`: "alpha",
		`SELECT GET_LOCK('beta', 10)`:                         "beta",
		`SELECT GET_LOCK(?, 10)`:                              "",
		`SELECT GET_LOCK('it''s', 10)`:                        "",
		`SELECT GET_LOCK('it\'s', 10)`:                        "",
		`SELECT GET_LOCK("al""pha", 10)`:                      "",
		`SELECT GET_LOCK('al\\pha', 10)`:                      "",
		`SELECT GET_LOCK('alp' 'ha', 10)`:                     "",
		`SELECT GET_LOCK("a') OR SLEEP(9) -- ", 10)`:          "a') OR SLEEP(9) -- ",
		`SELECT GET_LOCK(CONCAT('al', 'pha'), 10)`:            "",
	} {
		if name, waits := (process{state: "User lock", text: statement}).waitsForOneOf(holdsBeta); name != want || !waits {
			t.Errorf("%s: %q, %v, want %q", statement, name, waits, want)
		}
	}
	for statement, state := range map[string]string{`SELECT GET_LOCK('alpha', 0)`: "User lock", `SELECT GET_LOCK('alpha', 10)`: "", `SELECT 1`: "executing"} {
		if name, waits := (process{state: state, text: statement}).waitsForOneOf(holdsBeta); waits {
			t.Errorf("%s in state %q waits for %q", statement, state, name)
		}
	}
}
