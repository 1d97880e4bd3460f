// Package demo is the play of dblock demo: real processes that use locks of a
// database in the three ways that dblock is for, one of them killed while it
// leads, and what must hold nevertheless.
//
// Run is the director: it starts the other processes (process.go, child.go),
// makes one timeline of what they tell (timeline.go), and in the end checks it
// and the database (invariants.go). Each act has a file of its own.
package demo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// Config is what the processes of a demo are given.
type Config struct {
	// DSN is the database; empty: a throwaway PostgreSQL.
	DSN string
	// Open opens a database by its DSN.
	Open func(ctx context.Context, dsn string) (dblock.DB, error)
	// JSON prints one document in the end instead of a timeline as it happens.
	JSON   bool
	Stdin  io.Reader
	Stdout io.Writer
	// Env is the environment of the processes.
	Env []string
}

// ErrBroken is returned when something did not hold that must.
var ErrBroken = errors.New("something did not hold that must: it is marked by ✗, or in JSON by \"ok\": false")

const (
	// alone is how long a demo waits for another one on the same database.
	alone = 5 * time.Second
	// removeWithin bounds the removal of the demo's tables.
	removeWithin = 15 * time.Second
)

var demoKey = dblock.NewKey("dblock demo")

// report is what --json prints.
type report struct {
	OK         bool        `json:"ok"`
	Database   string      `json:"database"`
	Server     string      `json:"server,omitempty"` // of the throwaway server
	TakeoverMS float64     `json:"takeover_ms"`
	Invariants []Invariant `json:"invariants"`
	Timeline   []Event     `json:"timeline"`
}

// Run plays the demo. It returns ErrBroken if an invariant broke.
func Run(ctx context.Context, c Config) (err error) {
	t := newTimeline(c)
	t.say("dblock demo: three uses of locks, by real processes on one database.\n")
	var server string
	if c.DSN == "" {
		s, err := startServer(ctx, c, t)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.close()) }()
		c.DSN, server = s.dsn, s.description
	}
	db, err := c.Open(ctx, c.DSN)
	if err != nil {
		return orCause(ctx, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	t.say("The database: %s\n", cmp.Or(server, "the "+title(db.Name())+" of --dsn"))

	locks, err := advisory.New(db, &advisory.Options{Application: "dblock demo", WaitLimit: alone})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, locks.Close()) }()

	p := &play{Config: c, db: db, timeline: t}
	var begun, broken bool
	err = locks.Do(ctx, func(ctx context.Context) error {
		begun = true
		facts, err := p.run(ctx)
		if err != nil {
			return err
		}
		invariants := check(facts)
		broken = !allOK(invariants)
		return t.finish(report{OK: !broken, Database: db.Name(), Server: server, TakeoverMS: takeover(facts.events), Invariants: invariants})
	}, demoKey)
	switch {
	case !begun && errors.Is(err, dblock.ErrTimeout) && ctx.Err() == nil:
		return fmt.Errorf("another demo runs on this database: %w", err)
	case err == nil && broken:
		return ErrBroken
	}
	return err
}

// play is one run on one database.
type play struct {
	Config
	db       dblock.DB
	timeline *timeline
}

// run plays all acts, between making and removing the demo's tables.
func (p *play) run(ctx context.Context) (f facts, err error) {
	if err := prepare(ctx, p.db); err != nil {
		return f, orCause(ctx, err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
		defer cancel()
		if removeErr := removeTables(ctx, p.db); removeErr != nil {
			err = errors.Join(err, fmt.Errorf("remove the demo's tables, whose names begin with dblock_demo_: %w", removeErr))
		}
	}()
	p.timeline.begin()
	for _, act := range []func(context.Context, *cast, *facts) error{p.deploy, p.transfer, p.lead} {
		if err := p.stage(ctx, act, &f); err != nil {
			return f, orCause(ctx, err)
		}
	}
	f.events = p.timeline.events
	return f, orCause(ctx, p.look(ctx, &f))
}

// orCause is the error, or why ctx ended: what that did to a statement tells
// people nothing.
func orCause(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// stage plays an act; its processes are gone afterwards.
func (p *play) stage(ctx context.Context, act func(context.Context, *cast, *facts) error, f *facts) (err error) {
	cast, err := p.newCast()
	if err != nil {
		return err
	}
	defer cast.close()
	return act(ctx, cast, f)
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func title(database string) string {
	return map[string]string{"postgres": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB", "sqlserver": "SQL Server"}[database]
}
