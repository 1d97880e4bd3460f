package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

type benchCmd struct {
	format
	Duration   time.Duration `default:"10s" help:"How long to measure, about: everything is measured three times at least. Default: ${default}."`
	Goroutines []int         `default:"16,64" placeholder:"N" help:"How many goroutines lock keys of their own at the same time. Default: ${default}."`
	Keys       []int         `default:"10,100" placeholder:"N" help:"How many keys one call locks. Default: ${default}."`
	Schema     string        `placeholder:"NAME" help:"The schema of the lock table, for row locks. Default: the connection's own."`
	Table      string        `default:"locks" help:"The name of the lock table. Default: ${default}."`
}

// Help is shown by dblock bench --help.
func (benchCmd) Help() string {
	return `What an operation takes is told in round trips: its time divided by that of SELECT 1, the two measured in turns, on connections of the same kind. "acquire + release a free key: 2.02 round trips" says that it takes as long as two statements that do nothing. That is done in rounds, each on new connections. Printed are the median of the rounds, the lowest and the highest; how much SELECT 1 itself varied tells how quiet the machine, the network and the server were.

"One every 0.25 round trips" is the pace of several goroutines of one process together: four operations in the time of one round trip. A hand-off goes from one holder of a key to the next, who has waited for it: between two lockers, which share nothing, like those of two processes, and among several goroutines of each. "begin + commit, without a lock" is there to be compared with the two lines that follow it.

It is safe on a database in production. The keys are its own, with a random part, so that nobody else waits for them; it creates no table; and the one row that row locks need in the lock table (see setup) is deleted in the end. (SIGKILL would leave it behind: its name has dblock_bench in it.) The load is that of a busy client, at times of --goroutines busy ones. Ctrl-C ends it, and it prints what was measured until then.

"Not supported" is what the database does not have, "not measured" what its setup or the user's privileges lack: for row locks that is a lock table, and DELETE on it. The exit code is 1 if something failed otherwise.`
}

const mostGoroutines = 1000

// Validate is called when the command line has been read.
func (c *benchCmd) Validate() error {
	if c.Duration <= 0 {
		return fmt.Errorf("--duration %v: must be positive", c.Duration)
	}
	for _, n := range c.Goroutines {
		if n < 1 || n > mostGoroutines {
			return fmt.Errorf("--goroutines %d: must be from 1 to %d", n, mostGoroutines)
		}
	}
	for _, n := range c.Keys {
		if n < 1 || n > dblock.MaxKeys {
			return fmt.Errorf("--keys %d: must be from 1 to %d", n, dblock.MaxKeys)
		}
	}
	return nil
}

func (c *benchCmd) Run(ctx context.Context, a *app) error {
	db, err := a.database(ctx, 0)
	if err != nil {
		return err
	}
	b := newBenchmark(db, dialect.Table{Schema: c.Schema, Name: c.Table}, c.Goroutines, c.Keys)
	err = closing(db, b.run(ctx, c.Duration))
	if len(b.trips) == 0 {
		return err
	}
	return errors.Join(c.print(a, b.results(err == nil)), err, b.failed())
}

// benchResult is what bench found.
type benchResult struct {
	Database string `json:"database"`
	Rounds   int    `json:"rounds"`
	// Complete is false if it was stopped before its time.
	Complete     bool          `json:"complete"`
	Measurements []measurement `json:"measurements"`
}

// measurement is one line of bench.
type measurement struct {
	Name string `json:"name"`
	Text string `json:"text"`
	// Status is measured, unsupported, skipped or failed. The latter three have a
	// reason instead of figures.
	Status       string  `json:"status"`
	Reason       string  `json:"reason,omitempty"`
	RoundTrips   *spread `json:"round_trips,omitempty"`
	Microseconds *spread `json:"microseconds,omitempty"`

	pace bool
}

const (
	statusMeasured    = "measured"
	statusUnsupported = "unsupported"
	statusSkipped     = "skipped"
	statusFailed      = "failed"
)

// statusWords say the same to people.
var statusWords = map[string]string{
	statusUnsupported: "not supported",
	statusSkipped:     "not measured",
	statusFailed:      "failed",
}

func (c *benchCmd) print(a *app, r benchResult) error {
	if c.JSON {
		return writeJSON(a.stdout, r)
	}
	rows := [][]string{{"WHAT", "TAKES", "LOWEST", "HIGHEST", "TIME"}}
	for _, m := range r.Measurements {
		rows = append(rows, m.row())
	}
	if err := writeTable(a.stdout, rows...); err != nil {
		return err
	}
	stopped := ""
	if !r.Complete {
		stopped = ", stopped in the next one"
	}
	notes := fmt.Sprintf("\n%s: medians of %d rounds%s. A round trip is SELECT 1 on a connection of the same kind.\n", r.Database, r.Rounds, stopped)
	for _, m := range r.Measurements {
		if m.Reason != "" {
			notes += fmt.Sprintf("%s: %s: %s\n", m.Text, statusWords[m.Status], printable(m.Reason))
		}
	}
	_, err := io.WriteString(a.stdout, notes)
	return err
}

func (m measurement) row() []string {
	if m.Status != statusMeasured {
		return []string{m.Text, statusWords[m.Status], "", "", ""}
	}
	takes := figure(m.RoundTrips.Median) + " round trips"
	if m.pace {
		takes = "one every " + takes
	}
	microseconds := time.Duration(m.Microseconds.Median * float64(time.Microsecond))
	return []string{m.Text, takes, figure(m.RoundTrips.Min), figure(m.RoundTrips.Max), roundedTime(microseconds)}
}

// figure has three digits that count, and never an exponent.
func figure(x float64) string {
	decimals := 3
	for limit := 0.9995; decimals > 0 && x >= limit; limit *= 10 { // what is rounded up to 1, 10, 100
		decimals--
	}
	return strconv.FormatFloat(x, 'f', decimals, 64)
}

// roundedTime has three digits that count.
func roundedTime(d time.Duration) string {
	unit := time.Nanosecond
	for d >= 1000*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}
