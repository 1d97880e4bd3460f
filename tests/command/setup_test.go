//go:build unix

package command_test

import (
	"strings"
	"testing"
)

func TestSetup(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		for _, test := range []struct {
			args, want string
		}{
			{"setup --table locks", "lock table locks: created"}, // as an older version did
			{"setup", "lock table locks: unchanged\nlock table once: created"},
			{"setup", "lock table locks: unchanged\nlock table once: unchanged"},
			{"setup --table other_locks", "lock table other_locks: created"},
			{"setup --json", `{"table":"locks","result":"unchanged","once":"unchanged"}`},
		} {
			stdout, stderr := run(t, d.dsn, 0, strings.Fields(test.args)...)
			if got := stdout; got != test.want && strings.Join(strings.Fields(got), "") != test.want {
				t.Errorf("%s: %q, want %q", test.args, got, test.want)
			}
			if stderr != "" {
				t.Errorf("%s: stderr %q", test.args, stderr)
			}
		}
		d.exec(t, "CREATE TABLE foreign_locks (name INT)")
		if _, stderr := run(t, d.dsn, 1, "setup", "--table", "foreign_locks"); !strings.Contains(stderr, "foreign_locks") {
			t.Errorf("a table of another shape: %s", stderr)
		}
		if _, stderr := run(t, d.dsn, 2, "setup", "--table", "no; table"); !strings.Contains(stderr, "no; table") {
			t.Errorf("a bad name: %s", stderr)
		}
	})
}
