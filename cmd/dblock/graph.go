package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/alecthomas/kong"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
)

type graphCmd struct {
	format
	Format         string `enum:"text,dot,mermaid" default:"text" help:"How to print the graph: text, dot (Graphviz) or mermaid."`
	Watch          watch  `placeholder:"PERIOD" help:"Look again and again, until a signal comes: with --watch every 2s, with --watch=500ms as often as that."`
	FullStatements bool   `help:"Print statements as they were sent, with the values in them, which may be secrets."`
	Schema         string `help:"The schema of the lock table, which knows the names of keys. Default: the connection's own."`
	Table          string `help:"The name of the lock table. Default: locks."`
}

// watch is a period that need not be given.
type watch time.Duration

const defaultWatch = watch(2 * time.Second)

// IsBool makes --watch good without a value.
func (*watch) IsBool() bool { return true }

// Decode reads a value that is joined to the flag.
func (w *watch) Decode(ctx *kong.DecodeContext) error {
	if ctx.Scan.Peek().Type != kong.FlagValueToken {
		*w = defaultWatch
		return nil
	}
	text := fmt.Sprint(ctx.Scan.Pop().Value)
	period, err := time.ParseDuration(text)
	if err != nil || period <= 0 {
		return fmt.Errorf("takes a time such as 500ms or 2s, not %q", text)
	}
	*w = watch(period)
	return nil
}

func (c *graphCmd) Run(ctx context.Context, a *app) error {
	if c.JSON && c.Format != "text" {
		return &exitError{exitUsage, errors.New("--json and --format exclude each other")}
	}
	// To look at the locks of a database nothing need be safe there.
	db, err := a.unsafeDatabase(ctx)
	if err != nil {
		return err
	}
	err = c.show(ctx, a, db)
	if c.Watch > 0 {
		err = c.repeat(ctx, a, db, err)
	}
	return closing(db, err)
}

func (c *graphCmd) show(ctx context.Context, a *app, db dblock.DB) error {
	bounded, cancel := context.WithTimeout(ctx, longestConnect)
	defer cancel()
	s, err := deadlock.Inspect(bounded, db, &deadlock.InspectOptions{FullStatements: c.FullStatements, Schema: c.Schema, Table: c.Table})
	if err != nil {
		return err
	}
	if c.Watch > 0 && isTerminal(a.stdout) {
		fmt.Fprint(a.stdout, "\x1b[H\x1b[2J") // clears it
	}
	switch {
	case c.JSON:
		return writeJSON(a.stdout, s)
	case c.Format == "dot":
		_, err = io.WriteString(a.stdout, s.DOT())
	case c.Format == "mermaid":
		_, err = io.WriteString(a.stdout, s.Mermaid())
	default:
		_, err = io.WriteString(a.stdout, s.Text())
	}
	return err
}

// repeat goes on where the server does not answer: it is when something is wrong
// that somebody watches. A signal is the usual end and needs no words.
func (c *graphCmd) repeat(ctx context.Context, a *app, db dblock.DB, err error) error {
	tick := time.NewTicker(time.Duration(c.Watch))
	defer tick.Stop()
	for {
		if ctx.Err() == nil && err != nil {
			if !errors.As(err, new(*dblock.Error)) {
				return err // of the output
			}
			a.say("%s", errorText(err))
		}
		select {
		case <-ctx.Done():
			var got signalError
			if errors.As(context.Cause(ctx), &got) {
				return &exitError{code: exitSignal + int(got.signal)}
			}
			return context.Cause(ctx)
		case <-tick.C:
			err = c.show(ctx, a, db)
		}
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
