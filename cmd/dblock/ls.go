package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/dblock-go/dblock"
)

type lsCmd struct{ format }

// holding is one line of ls.
type holding struct {
	// Key is what the server calls the key: its id in decimal, or its name.
	Key string `json:"key"`
	// ID is null where the server knows names.
	ID          *int64     `json:"id"`
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
	found, err := db.Inspect(ctx)
	if err := closing(db, dblock.NewError("list the locks", db, nil, err)); err != nil {
		return err
	}
	slices.SortStableFunc(found, func(x, y dblock.Blocker) int {
		return cmp.Or(cmp.Compare(x.Name, y.Name), cmp.Compare(x.ID, y.ID),
			compareBool(x.Waiting, y.Waiting), x.Since.Compare(y.Since), cmp.Compare(x.Session, y.Session))
	})
	all := make([]holding, len(found))
	for i, f := range found {
		all[i] = describe(f)
	}
	if c.JSON {
		return writeJSON(a.stdout, all)
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(a.stdout, "nobody holds or waits for an advisory lock")
		return err
	}
	rows := [][]string{{"KEY", "MODE", "STATE", "SESSION", "APPLICATION", "USER", "SINCE"}}
	for _, h := range all {
		since := ""
		if h.Since != nil {
			since = h.Since.Format(time.RFC3339)
		}
		rows = append(rows, []string{h.Key, h.Mode, h.State, strconv.FormatInt(h.Session, 10), h.Application, h.user, since})
	}
	return writeTable(a.stdout, rows...)
}

func describe(f dblock.Blocker) holding {
	h := holding{
		Key:         f.Name,
		Mode:        f.Mode.String(),
		State:       "held",
		Session:     f.Session,
		Application: f.Application,
		user:        f.User,
	}
	if f.Name == "" {
		h.Key, h.ID = strconv.FormatInt(f.ID, 10), &f.ID
	}
	if f.Waiting {
		h.State = "waiting"
	}
	if !f.Since.IsZero() {
		since := f.Since.UTC()
		h.Since = &since
	}
	return h
}

func compareBool(x, y bool) int {
	switch {
	case x == y:
		return 0
	case y:
		return -1
	default:
		return 1
	}
}
