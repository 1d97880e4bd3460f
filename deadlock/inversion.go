package deadlock

import (
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/dblock-go/dblock"
)

// Inversion is a cycle in the orders in which locks are taken. Each step holds what the
// one before it waits for, and the first what the last waits for: transactions that do
// the steps at the same time deadlock.
type Inversion struct {
	Steps []Step
}

// Step is one place in the program where a lock is waited for while another is held, as
// it was seen first.
type Step struct {
	Held, Wanted Taken
	// OneCall: both are keys of one call, which takes them in this order.
	OneCall bool
}

// Taken is a lock and where it is taken.
type Taken struct {
	Kind  string // "advisory", "row"; see [Call]
	Class string
	Key   string
	Mode  dblock.Mode
	Place Place
}

// Place is a line of source outside of dblock.
type Place struct {
	Function string
	File     string
	Line     int
}

func (p Place) String() string {
	return fmt.Sprintf("%s:%d (%s)", p.File, p.Line, path.Base(p.Function))
}

func inversionOf(cycle []*edge) Inversion {
	var i Inversion
	for _, e := range cycle {
		i.Steps = append(i.Steps, e.step)
	}
	return i
}

// identity is the same for the same places, whatever their keys and wherever the cycle
// begins.
func (i Inversion) identity() string {
	steps := make([]string, len(i.Steps))
	for n, s := range i.Steps {
		steps[n] = fmt.Sprintf("%s %q %s, %s %q %s", s.Held.Kind, s.Held.Class, s.Held.Place, s.Wanted.Kind, s.Wanted.Class, s.Wanted.Place)
	}
	slices.Sort(steps)
	return strings.Join(slices.Compact(steps), "\n")
}

// String names the classes, each step with its keys and places, the way out, and how to
// silence it.
func (i Inversion) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:", i.title())
	for _, s := range i.Steps {
		if s.OneCall {
			fmt.Fprintf(&b, "\n\t%s before %s in one call at %s", s.Held, s.Wanted, s.Held.Place)
		} else {
			fmt.Fprintf(&b, "\n\t%s taken at %s,\n\t\tthen %s at %s", s.Held, s.Held.Place, s.Wanted, s.Wanted.Place)
		}
	}
	if len(i.Steps) > 1 {
		b.WriteString("\nDone at the same time, each can wait for what another holds.")
	}
	fmt.Fprintf(&b, "\n%s\n%s", i.wayOut(), i.silence())
	return b.String()
}

func (t Taken) String() string {
	text := fmt.Sprintf("%s lock %s", t.Kind, t.Key)
	if t.Mode == dblock.Shared {
		text = "shared " + text
	}
	return text
}

// itself: the one step waits for the very key that it holds.
func (i Inversion) itself() bool {
	only := i.Steps[0]
	return len(i.Steps) == 1 && only.Held.Kind == only.Wanted.Kind && only.Held.Key == only.Wanted.Key
}

func (i Inversion) title() string {
	if i.itself() {
		return fmt.Sprintf("possible deadlock: lock of class %s waits for itself", i.Steps[0].Held.Class)
	}
	var classes []string
	for _, s := range i.Steps {
		class := s.Held.Kind + " " + s.Held.Class
		if !slices.Contains(classes, class) {
			classes = append(classes, class)
		}
	}
	if len(classes) == 1 {
		return "possible deadlock: lock order inversion within class " + classes[0]
	}
	return "possible deadlock: lock order inversion of classes " + strings.Join(classes, ", ")
}

func (i Inversion) wayOut() string {
	first := i.Steps[0].Held
	switch {
	case i.itself() && first.Mode == dblock.Shared:
		return "Two that hold the key in shared mode wait for each other: take it exclusively from the start."
	case i.itself() && first.Kind == "advisory":
		return "Locks are not re-entrant: pass on the one that is held (advisory.FromContext) instead of taking it again."
	case i.itself():
		return "What holds it is another transaction: lock in that one, or end it before."
	case i.oneCallCan():
		return "Take them in one call, which locks its keys in one global order, or one after the other in the same order everywhere."
	case slices.ContainsFunc(i.Steps, func(s Step) bool { return s.Held.Kind == "advisory" }):
		return "Take them in the same order everywhere, advisory locks before those of transactions."
	}
	return "Take them in the same order everywhere."
}

// oneCallCan: there is a call that takes all of them.
func (i Inversion) oneCallCan() bool {
	first := i.Steps[0].Held
	for _, s := range i.Steps {
		if s.Held.Kind != first.Kind || s.Held.Class != first.Class && (first.Kind == "table row" || first.Kind == "mark") {
			return false
		}
	}
	return !strings.HasSuffix(first.Kind, "guard")
}

func (i Inversion) silence() string {
	s := i.Steps[max(0, slices.IndexFunc(i.Steps, func(s Step) bool { return !s.OneCall }))]
	return fmt.Sprintf("If that cannot happen, silence the pair: deadlock.CheckerOptions{Ignore: [][2]string{{%q, %q}}}.", s.Held.Class, s.Wanted.Class)
}

// caller is the innermost place in the stack that is not dblock's.
func caller() Place {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for {
		f, more := frames.Next()
		if !more || !ofDblock(f.Function) {
			return Place{Function: f.Function, File: f.File, Line: f.Line}
		}
	}
}

func ofDblock(function string) bool {
	path, ok := strings.CutPrefix(function, "github.com/dblock-go/dblock/")
	if !ok {
		return false
	}
	pkg, _, _ := strings.Cut(path, ".")
	switch pkg {
	case "advisory", "rowlock", "deadlock", "internal/transaction":
		return true
	}
	return false
}
