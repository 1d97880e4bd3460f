package deadlock

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
)

// Text is the snapshot for people to read: the deadlocks, then a tree below each
// session that blocks others, those who wait for somebody that was not seen, what is
// held and not waited for, and the gaps. It has no character in it that could steer a
// terminal.
func (s *Snapshot) Text() string {
	t := &text{Snapshot: s, waiters: map[int64][]Wait{}, cyclic: s.cyclic(), shown: map[int64]bool{}}
	for _, w := range s.Waits {
		t.waiters[w.Blocker] = append(t.waiters[w.Blocker], w)
	}
	fmt.Fprintf(&t.b, "%s at %s: %d holding or waiting, %d waiting, %d in a deadlock\n", s.Dialect, s.Taken.UTC().Format(time.RFC3339),
		len(s.Sessions), len(s.waiting()), len(s.inCycles()))
	for _, cycle := range s.Cycles {
		t.cycle(cycle)
	}
	for _, root := range s.Roots {
		t.b.WriteByte('\n')
		t.tree(root, "")
	}
	for _, l := range s.alone() {
		fmt.Fprintf(&t.b, "\nwaits%s for %s, and for whom is not seen: ", spaced(t.age(l.Since)), label(l.Target))
		t.tree(l.Session, "")
	}
	t.idleHolders()
	if len(s.Gaps) > 0 {
		t.b.WriteByte('\n')
	}
	for _, g := range s.Gaps {
		fmt.Fprintf(&t.b, "not seen: %s → %s\n", printable(g.What), printable(g.Remedy))
	}
	return t.b.String()
}

type text struct {
	*Snapshot
	b       strings.Builder
	waiters map[int64][]Wait // by blocker
	cyclic  map[waitEdge]bool
	shown   map[int64]bool // whose waiters are in the text already
}

func (t *text) cycle(cycle []int64) {
	names := make([]string, 0, len(cycle)+1)
	for _, id := range append(slices.Clone(cycle), cycle[0]) {
		names = append(names, fmt.Sprint(id))
	}
	fmt.Fprintf(&t.b, "\nDEADLOCK: %s\n", strings.Join(names, " waits for "))
	t.tree(cycle[0], "")
}

// tree shows a session and below it those who wait for it.
func (t *text) tree(id int64, indent string) {
	fmt.Fprintf(&t.b, "%s\n", t.describe(id))
	t.branches(id, indent)
}

func (t *text) branches(id int64, indent string) {
	if t.shown[id] {
		return
	}
	t.shown[id] = true
	for i, w := range t.waiters[id] {
		branch, below := "├─ ", "│  "
		if i == len(t.waiters[id])-1 {
			branch, below = "└─ ", "   "
		}
		mark := ""
		if t.cyclic[waitEdge{w.Waiter, w.Blocker}] {
			mark = " (deadlock)"
		}
		if t.shown[w.Waiter] {
			fmt.Fprintf(&t.b, "%s%ssession %d, as above, waits for %s%s\n", indent, branch, w.Waiter, label(w.Target), mark)
			continue
		}
		fmt.Fprintf(&t.b, "%s%swaits%s for %s%s: %s\n", indent, branch, t.waited(w), label(w.Target), mark, t.describe(w.Waiter))
		t.branches(w.Waiter, indent+below)
	}
}

// waited is how long, with a space in front.
func (t *text) waited(w Wait) string {
	for _, l := range t.Locks {
		if l.Waiting && l.Session == w.Waiter && l.Target == w.Target {
			return spaced(t.age(l.Since))
		}
	}
	return ""
}

func spaced(text string) string {
	if text == "" {
		return ""
	}
	return " " + text
}

// describe is a session in one line.
func (t *text) describe(id int64) string {
	x := t.session(id)
	line := fmt.Sprintf("session %d", id)
	if x.Application != "" {
		line += fmt.Sprintf(" %q", printable(x.Application))
	}
	if details := t.details(x); details != "" {
		line += " (" + details + ")"
	}
	if x.Statement != "" {
		line += ": " + oneLine(x.Statement)
	}
	return line
}

// details are who the session is and what it does.
func (s *Snapshot) details(x Session) string {
	var details []string
	for _, d := range []string{x.User, x.Host, x.State} {
		if d != "" {
			details = append(details, printable(d))
		}
	}
	if age := s.age(x.Began); age != "" {
		details = append(details, "transaction "+age)
	}
	return strings.Join(details, ", ")
}

// age is how long ago, empty where that is not known.
func (s *Snapshot) age(since time.Time) string {
	if since.IsZero() {
		return ""
	}
	age := max(s.Taken.Sub(since), 0)
	if age < time.Second {
		return age.Round(time.Millisecond).String()
	}
	return age.Round(time.Second).String()
}

// mostKeys are named of a session that holds more.
const mostKeys = 10

// idleHolders lists what nobody waits for.
func (t *text) idleHolders() {
	contended := map[Target]bool{}
	for _, w := range t.Waits {
		contended[w.Target] = true
	}
	bySession := map[int64][]string{}
	for _, l := range t.Locks {
		if !l.Waiting && !contended[l.Target] {
			bySession[l.Session] = append(bySession[l.Session], label(l.Target))
		}
	}
	for i, id := range slices.Sorted(maps.Keys(bySession)) {
		if i == 0 {
			t.b.WriteString("\nheld, and nobody waits:\n")
		}
		fmt.Fprintf(&t.b, "%s\n", t.describe(id))
		for _, key := range few(bySession[id], mostKeys) {
			fmt.Fprintf(&t.b, "   %s\n", key)
		}
	}
}

// few is a list with no more than most lines.
func few(list []string, most int) []string {
	if len(list) <= most {
		return list
	}
	return append(slices.Clone(list[:most-1]), fmt.Sprintf("and %d more", len(list)-most+1))
}

// waiting are the sessions that wait.
func (s *Snapshot) waiting() map[int64]bool {
	ids := map[int64]bool{}
	for _, l := range s.Locks {
		if l.Waiting {
			ids[l.Session] = true
		}
	}
	return ids
}

func (s *Snapshot) inCycles() map[int64]bool {
	ids := map[int64]bool{}
	for _, c := range s.Cycles {
		for _, id := range c {
			ids[id] = true
		}
	}
	return ids
}

// printable keeps what other clients call themselves and their keys from steering a
// terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// label is a target in a few words.
func label(t Target) string { return printable(t.Describe()) }

func oneLine(s string) string { return printable(strings.Join(strings.Fields(s), " ")) }
