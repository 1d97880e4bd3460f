//go:build linux

package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dblock-go/dblock/tests/servers"
)

// target is a bound that a figure is to reach; the zero target is none.
type target struct {
	least bool // at least, not at most
	bound float64
}

func atMost(bound float64) target  { return target{bound: bound} }
func atLeast(bound float64) target { return target{least: true, bound: bound} }

// targets of one row may differ between the databases.
type targets map[servers.Kind]target

// everywhere is one target for all databases, mostly for all but PostgreSQL.
func everywhere(t target) targets { return targets{"": t} }

func mostly(postgres, others target) targets {
	return targets{servers.KindPostgres: postgres, "": others}
}

func (ts targets) of(kind servers.Kind) target {
	if t, ok := ts[kind]; ok {
		return t
	}
	return ts[""]
}

// ratio of the times, or, where more is better, of the rates.
func (g target) ratio(ours, theirs time.Duration) float64 {
	if g.least {
		return float64(theirs) / float64(ours)
	}
	return float64(ours) / float64(theirs)
}

func (g target) String() string {
	switch {
	case g.bound == 0:
		return "–"
	case g.least:
		return "≥ " + figure(g.bound)
	}
	return "≤ " + figure(g.bound)
}

func (g target) reached(value float64) string {
	switch {
	case g.bound == 0:
		return "–"
	case g.least && value >= g.bound, !g.least && value <= g.bound:
		return "yes"
	}
	return "**no**"
}

// row is one figure of a database.
type row struct {
	what   string
	target target
	values []float64 // one of each repetition, none if it could not be measured
	detail string    // the absolute figures, or why there is none
}

// String is a line of a table.
func (r row) String() string {
	if len(r.values) == 0 {
		return fmt.Sprintf("| %s | %s | not measured | | – | %s |\n", r.what, r.target, r.detail)
	}
	middle := median(r.values)
	return fmt.Sprintf("| %s | %s | **%s** | %s – %s | %s | %s |\n", r.what, r.target, figure(middle),
		figure(slices.Min(r.values)), figure(slices.Max(r.values)), r.target.reached(middle), r.detail)
}

// report collects the rows of a run. It is safe for concurrent use.
type report struct {
	progress  io.Writer // is told each row as soon as it is there
	mu        sync.Mutex
	databases []servers.Kind
	rows      map[servers.Kind][]row
	versions  map[servers.Kind]string
}

func newReport(progress io.Writer) *report {
	return &report{progress: progress, rows: map[servers.Kind][]row{}, versions: map[servers.Kind]string{}}
}

func (r *report) add(kind servers.Kind, figure row) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows[kind] = append(r.rows[kind], figure)
	fmt.Fprint(r.progress, figure)
}

func (r *report) has(kind servers.Kind, version string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.databases = append(r.databases, kind)
	r.versions[kind] = version
	fmt.Fprintf(r.progress, "%s %s\n", names[kind], version)
}

// tables are the rows in Markdown, a table for each database.
func (r *report) tables() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, kind := range r.databases {
		if len(r.rows[kind]) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n", names[kind], r.versions[kind])
		b.WriteString("| | target | median | min – max | reached | dblock / peer |\n|---|---|---|---|---|---|\n")
		for _, row := range r.rows[kind] {
			b.WriteString(row.String())
		}
	}
	return b.String()
}

var names = map[servers.Kind]string{servers.KindPostgres: "PostgreSQL", servers.KindMySQL: "MySQL", servers.KindMariaDB: "MariaDB"}

// figure has as many digits as mean something.
func figure(v float64) string {
	switch {
	case v == math.Trunc(v):
		return fmt.Sprintf("%.0f", v)
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func rounded(d time.Duration) string {
	switch {
	case d >= 10*time.Millisecond:
		return d.Round(time.Millisecond).String()
	case d >= time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	}
	return d.Round(100 * time.Nanosecond).String()
}

func perSecond(each time.Duration) string {
	return fmt.Sprintf("%.0f/s", float64(time.Second)/float64(each))
}

// document is RESULTS.md.
func (r *report) document(repetitions int) string {
	return fmt.Sprintf(`# dblock beside its peers

Written by %smake bench%s; [doc.go](doc.go) says how it measures. Each figure is a ratio between dblock and its peer, which were measured in turns: the median of %d repetitions, with the smallest and the largest. Where the target is an upper bound it is a ratio of times, where it is a lower bound one of rates. The last column has the absolute medians, which are this machine's.

%s
The servers are private ones on the same machine, over TCP: PostgreSQL with fsync off, MySQL and MariaDB with innodb_flush_log_at_trx_commit=2, Redis without persistence, etcd embedded in a process of its own, with fsync. No lock that is measured here writes to a disk, but etcd's.
%s`, "`", "`", repetitions, machine(), r.tables())
}
