package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

type lsCmd struct {
	format
	watched
	All bool `help:"List rows and tables that somebody waits for, too."`
}

// holding is one line of ls.
type holding struct {
	// Key is what the server calls the key: its id in decimal, or its name.
	Key string `json:"key"`
	// ID is null where the server knows names.
	ID *int64 `json:"id"`
	// Name is that of an id, if the lock table has it.
	Name        string     `json:"name,omitempty"`
	Kind        string     `json:"kind,omitempty"` // with --all
	Mode        string     `json:"mode"`
	State       string     `json:"state"`
	Session     int64      `json:"session"`
	Application string     `json:"application"`
	Since       *time.Time `json:"since,omitempty"`

	user string
}

func (c *lsCmd) Run(ctx context.Context, a *app) error {
	db, err := a.database(ctx, 0)
	if err != nil {
		return err
	}
	err = c.show(ctx, a, func(ctx context.Context, out io.Writer) error { return c.print(ctx, db, out) })
	return closing(db, err)
}

func (c *lsCmd) print(ctx context.Context, db dblock.DB, out io.Writer) error {
	s, err := deadlock.Inspect(ctx, db)
	if err != nil {
		return err
	}
	if err := c.incomplete(s.Gaps); err != nil {
		return dblock.NewError("list the locks", db, nil, err)
	}
	sessions := map[int64]deadlock.Session{}
	for _, x := range s.Sessions {
		sessions[x.ID] = x
	}
	all := []holding{}
	for _, l := range s.Locks {
		if c.All || l.Kind == dialect.KindAdvisory {
			all = append(all, c.describe(l, sessions[l.Session], db.Features().ByName))
		}
	}
	if c.JSON {
		return writeJSON(out, all)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(out, "nobody holds or waits for an advisory lock")
		return err
	}
	return c.table(out, all)
}

func (c *lsCmd) table(out io.Writer, all []holding) error {
	titles := []string{"KEY", "NAME", "MODE", "STATE", "SESSION", "APPLICATION", "USER", "SINCE"}
	const name = 1
	unnamed := !slices.ContainsFunc(all, func(h holding) bool { return h.Name != "" })
	rows := [][]string{titles}
	for _, h := range all {
		since := ""
		if h.Since != nil {
			since = h.Since.Format(time.RFC3339)
		}
		rows = append(rows, []string{h.Key, h.Name, h.Mode, h.State, strconv.FormatInt(h.Session, 10), h.Application, h.user, since})
	}
	if unnamed {
		for i := range rows {
			rows[i] = slices.Delete(rows[i], name, name+1)
		}
	}
	return writeTable(out, rows...)
}

// incomplete refuses a list that lacks locks without a word.
func (c *lsCmd) incomplete(gaps []deadlock.Gap) error {
	for _, g := range gaps {
		if g.Kind == dialect.KindAdvisory || c.All && g.Kind != "" {
			return &dialect.Error{Class: dblock.ErrDenied, Err: errors.New("not seen: " + g.What), Hint: g.Remedy}
		}
	}
	return nil
}

func (c *lsCmd) describe(l deadlock.Lock, x deadlock.Session, byName bool) holding {
	h := holding{
		Key:         l.Key,
		Name:        l.Name,
		Mode:        l.Mode,
		State:       "held",
		Session:     l.Session,
		Application: x.Application,
		user:        x.User,
	}
	switch id, err := strconv.ParseInt(l.Key, 10, 64); {
	case l.Kind != dialect.KindAdvisory:
		h.Key = l.Target.Describe()
	case !byName && err == nil: // another is a pair of other software's
		h.ID = &id
	}
	if c.All {
		h.Kind = string(l.Kind)
	}
	if l.Waiting {
		h.State = "waiting"
	}
	if !l.Since.IsZero() {
		since := l.Since.UTC()
		h.Since = &since
	}
	return h
}
