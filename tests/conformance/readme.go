package conformance

import (
	"os"
	"slices"
	"strings"
	"testing"
)

var readmeClauses = []clause{
	{"the README's table says what this database does", readmeTable},
}

// readmeTable holds the rows of the README that the features decide against the
// features.
func readmeTable(t *testing.T, h *Harness) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string][]string{}
	for line := range strings.Lines(string(readme)) {
		if cells := strings.Split(strings.TrimSpace(line), "|"); len(cells) == 7 {
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			rows[cells[1]] = cells[2:6]
		}
	}
	db := h.Database(t).DB
	column := slices.Index(rows[""], map[string]string{
		"postgres": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB", "sqlserver": "SQL Server",
	}[db.Name()])
	if column < 0 {
		t.Fatalf("the README's table has no column for %s: %q", db.Name(), rows[""])
	}
	features := db.Features()
	yes := map[bool]string{true: "yes", false: "no"}
	says := map[string]string{
		"`advisory`: shared keys":             yes[features.Shared],
		"`advisory`: LockTx, TryLockTx, DoTx": yes[features.Transaction],

		"`deadlock`: Settings.Timeout (deadlock_timeout)":   yes[features.DeadlockTimeout],
		"`deadlock`: Settings.Priority (DEADLOCK_PRIORITY)": yes[features.DeadlockPriority],
	}
	noticed := "a session that the server ended is noticed"
	switch {
	case features.HearsLoss:
		says[noticed] = "at once"
	case db.Name() != "postgres": // where lib/pq is the exception that the text below the table names
		says[noticed] = "by heartbeat"
	}
	for row, want := range says {
		if rows[row] == nil || rows[row][column] != want {
			t.Errorf("the README's row %q says %q, the code %q", row, rows[row], want)
		}
	}
}
