package dialect

import (
	"cmp"
	"context"
	"errors"
	"strings"
)

// Finding is one thing that [DB.Diagnose] looked at.
type Finding struct {
	Check  string // what was looked at, in a word or two: "pooler"
	Level  Level
	Text   string // what was found, in one line
	Advice string // what to change or to mind; empty: nothing
}

// Level says how much a [Finding] matters.
type Level string

const (
	// OK: nothing to do.
	OK Level = "ok"
	// Notice: good to know, and right for many.
	Notice Level = "notice"
	// Warning: locks are safe, but something near them is not.
	Warning Level = "warning"
	// Danger: locks would not be safe here. It is what the constructors refuse.
	Danger Level = "unsafe"
)

// Rank is 0 for the worst level, and more for those that matter less.
func (l Level) Rank() int {
	return map[Level]int{Danger: 0, Warning: 1, Notice: 2, OK: 3}[l]
}

// Check is one step of a dialect's probe. Its error of class Unsafe or
// Unsupported says why locks would not be safe, in the words with which a
// constructor refuses; without an error, an empty Text means that there was
// nothing to be looked at.
type Check struct {
	Name string
	Run  func(ctx context.Context) (Finding, error)
}

// Probe runs the checks until one fails.
func Probe(ctx context.Context, checks []Check) error {
	for _, c := range checks {
		if _, err := c.Run(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Diagnose runs all checks and makes findings of their refusals. Any other error
// ends it: the server went away, or ctx ended.
func Diagnose(ctx context.Context, checks []Check) ([]Finding, error) {
	var findings []Finding
	for _, c := range checks {
		f, err := c.Run(ctx)
		if err != nil {
			if f = Refusal(err); f.Text == "" || ctx.Err() != nil {
				return nil, err
			}
		}
		if f.Text != "" {
			f.Check = c.Name
			findings = append(findings, f)
		}
	}
	return findings, nil
}

// Detail is a check that refuses nothing: what it cannot look at is a warning.
func Detail(name string, classify func(ctx context.Context, err error) error, look func(ctx context.Context) (Finding, error)) Check {
	return Check{Name: name, Run: func(ctx context.Context) (Finding, error) {
		f, err := look(ctx)
		if err == nil {
			return f, nil
		}
		err = classify(ctx, err)
		if ctx.Err() != nil || ClassOf(err) == Lost {
			return Finding{}, err
		}
		return Finding{Level: Warning, Text: "could not be looked at: " + err.Error()}, nil
	}}
}

// TableFinding makes a finding of what [DB.CheckTable] returned for a lock table and,
// if it is there, of which privileges this user lacks for it. A catalog may show a user
// only the tables that it has a privilege for.
func TableFinding(ctx context.Context, db DB, t Table, lacks func(ctx context.Context, privileges ...string) ([]string, error)) (Finding, error) {
	name := cmp.Or(t.Name, "locks")
	exists, err := db.CheckTable(ctx, t)
	switch {
	case ClassOf(err) == Setup && !exists:
		use := "row locks and fencing numbers"
		if t.Name == OnceTable {
			use = "rowlock.Once"
		}
		return Finding{Level: Notice, Text: "there is none that this user may see", Advice: "for " + use + " run `dblock setup`"}, nil
	case ClassOf(err) == Setup:
		return Finding{Level: Warning, Text: err.Error()}, nil
	case err != nil:
		return Finding{}, err
	}
	needed, err := lacks(ctx, "SELECT", "INSERT", "UPDATE")
	if err != nil {
		return Finding{}, err
	}
	if len(needed) > 0 {
		list := strings.Join(needed, ", ")
		return Finding{Level: Warning, Text: "this user may not use it: no " + list,
			Advice: "GRANT " + list + " ON " + name + " TO this user, and DELETE for who calls Clean"}, nil
	}
	cleaning, err := lacks(ctx, "DELETE")
	switch {
	case err != nil:
		return Finding{}, err
	case len(cleaning) > 0:
		return Finding{Level: Notice, Text: "there, with the privileges that it needs, but this user may not clean it: no DELETE",
			Advice: "GRANT DELETE ON " + name + " TO who calls Clean"}, nil
	}
	return Finding{Level: OK, Text: "there, with the privileges that it needs"}, nil
}

// Refusal is the finding that an error of class Unsafe or Unsupported is, else
// the zero Finding.
func Refusal(err error) Finding {
	var e *Error
	if !errors.As(err, &e) || e.Class != Unsafe && e.Class != Unsupported {
		return Finding{}
	}
	f := Finding{Level: Danger, Text: e.Hint}
	if e.Err != nil {
		f.Text, f.Advice = e.Err.Error(), e.Hint
	}
	f.Text = cmp.Or(f.Text, e.Class.Error())
	return f
}
