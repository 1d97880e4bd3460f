package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

type doctorCmd struct{ format }

// finding is one line of doctor.
type finding struct {
	Check  string `json:"check"`
	Level  string `json:"level"` // unsafe, warning, notice or ok
	Text   string `json:"text"`
	Advice string `json:"advice,omitempty"`
}

func (c *doctorCmd) Run(ctx context.Context, a *app) error {
	found, err := c.diagnose(ctx, a)
	if err != nil {
		return err
	}
	slices.SortStableFunc(found, func(x, y dialect.Finding) int { return cmp.Compare(x.Level.Rank(), y.Level.Rank()) })
	if err := c.print(a, found); err != nil {
		return err
	}
	if slices.ContainsFunc(found, func(f dialect.Finding) bool { return f.Level == dialect.Danger }) {
		return &exitError{exitFailed, errors.New("locks would not be safe here")}
	}
	return nil
}

// diagnose opens what every other command would refuse, too. Where even that is
// refused, the refusal is all that there is to be found.
func (c *doctorCmd) diagnose(ctx context.Context, a *app) ([]dialect.Finding, error) {
	db, err := a.unsafeDatabase(ctx)
	if err != nil {
		if f := dialect.Refusal(err); f.Text != "" {
			f.Check = "server"
			return []dialect.Finding{f}, nil
		}
		return nil, err
	}
	bounded, cancel := context.WithTimeout(ctx, longestConnect)
	defer cancel()
	found, err := db.Diagnose(bounded)
	return found, closing(db, dblock.NewError("diagnose", db, nil, err))
}

func (c *doctorCmd) print(a *app, found []dialect.Finding) error {
	if c.JSON {
		all := make([]finding, len(found))
		for i, f := range found {
			all[i] = finding{f.Check, string(f.Level), oneLine(f.Text), oneLine(f.Advice)}
		}
		return writeJSON(a.stdout, all)
	}
	rows := [][]string{{"LEVEL", "CHECK", "FOUND"}}
	for _, f := range found {
		text := oneLine(f.Text)
		if f.Advice != "" {
			text = fmt.Sprintf("%s → %s", text, oneLine(f.Advice))
		}
		rows = append(rows, []string{string(f.Level), f.Check, text})
	}
	return writeTable(a.stdout, rows...)
}
