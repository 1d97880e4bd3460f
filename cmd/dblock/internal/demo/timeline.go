package demo

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Kind says what an Event is.
type Kind string

const (
	// Not on the timeline: for the director only.
	kindReady     Kind = "ready"     // waits for its cue
	kindPreparing Kind = "preparing" // Text says what takes a while
	kindWorking   Kind = "working"   // a projector is in the middle of a step
	kindWrote     Kind = "wrote"     // a projector has committed a step

	kindAct      Kind = "act"      // Text is what comes
	kindWaiting  Kind = "waiting"  // for Session
	kindAcquired Kind = "acquired" // the guard of the migrations, by Session
	kindMigrated Kind = "migrated" // Versions are what it applied itself
	kindMoved    Kind = "moved"    // Count transfers of Amount; Deadlocks of them were started again
	kindLeading  Kind = "leading"  // with Fence, by Session
	kindReleased Kind = "released" // the leader's lock, after Count steps with Fence
	kindKilled   Kind = "killed"   // by the director: Victim, which led with Fence, in its step Count
	kindLate     Kind = "late"     // a write with the Fence of the killed one changed Rows
)

// Event is one line of the timeline.
type Event struct {
	MS      float64 `json:"ms"` // since the play began
	Process string  `json:"process"`
	PID     int     `json:"pid"`
	Kind    Kind    `json:"kind"`
	Text    string  `json:"text"`

	Session   int64   `json:"session,omitempty"`
	Versions  []int64 `json:"versions,omitempty"`
	Fence     int64   `json:"fence,omitempty"`
	Count     int     `json:"count,omitempty"`
	From      int     `json:"from,omitempty"` // accounts
	To        int     `json:"to,omitempty"`
	Amount    int     `json:"amount,omitempty"`
	Deadlocks int     `json:"deadlocks,omitempty"`
	Victim    string  `json:"victim,omitempty"`
	Rows      int64   `json:"rows,omitempty"`
}

// director is how our own process appears on the timeline.
const director = "demo"

// timeline collects what happens, and prints it for people as it happens.
type timeline struct {
	began    time.Time
	events   []Event
	sessions map[int64]string // which process it is of

	out     io.Writer
	json    bool
	colours map[string]string // nil: plain
	acts    int
}

func newTimeline(c Config) *timeline {
	t := &timeline{sessions: map[int64]string{}, out: c.Stdout, json: c.JSON}
	if wantsColour(c) {
		t.colours = map[string]string{}
	}
	return t
}

// wantsColour: see https://no-color.org. On Windows the console may not know
// what to do with colours.
func wantsColour(c Config) bool {
	file, ok := c.Stdout.(*os.File)
	if !ok || c.JSON || runtime.GOOS == "windows" {
		return false
	}
	for _, variable := range c.Env {
		if name, value, _ := strings.Cut(variable, "="); name == "NO_COLOR" && value != "" || variable == "TERM=dumb" {
			return false
		}
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// begin is when the clock starts.
func (t *timeline) begin() { t.began = time.Now() }

// say prints what has no place in time.
func (t *timeline) say(format string, args ...any) {
	if !t.json {
		fmt.Fprintf(t.out, format, args...)
	}
}

// act begins one.
func (t *timeline) act(text string) {
	t.acts++
	t.say("\n%d. %s\n", t.acts, text)
	t.record(Event{Process: director, PID: os.Getpid(), Kind: kindAct, Text: text})
}

// direct adds what the director itself does.
func (t *timeline) direct(e Event) Event {
	e.Process, e.PID = director, os.Getpid()
	return t.add(e)
}

// add puts an event on the timeline, if it is one for people.
func (t *timeline) add(e Event) Event {
	if e.Kind == kindPreparing {
		t.say("%s\n", e.Text)
		return e
	}
	if (e.Kind == kindAcquired || e.Kind == kindLeading) && e.Session != 0 {
		t.sessions[e.Session] = e.Process
	}
	text := t.sentence(e)
	if text == "" {
		return e
	}
	e.Text = text
	e = t.record(e)
	t.say("%8.2f s  %s  %s\n", e.MS/1000, t.coloured(e.Process, 11), e.Text)
	return e
}

func (t *timeline) record(e Event) Event {
	e.MS = float64(time.Since(t.began).Microseconds()) / 1000
	t.events = append(t.events, e)
	return e
}

// sentence is empty for what is not on the timeline.
func (t *timeline) sentence(e Event) string {
	switch e.Kind {
	case kindWaiting:
		return "waits for " + t.owner(e.Session)
	case kindAcquired:
		return "holds the lock" + session(e.Session) + ", looks what is missing"
	case kindMigrated:
		if len(e.Versions) == 0 {
			return "applied nothing: it was done already"
		}
		return "applied " + plural(len(e.Versions), "migration") + ": " + numbers(e.Versions)
	case kindMoved:
		return fmt.Sprintf("made %s of %d from %s to %s", plural(e.Count, "transfer"), e.Amount, owners[e.From], owners[e.To])
	case kindLeading:
		return fmt.Sprintf("leads, with fencing number %d%s", e.Fence, session(e.Session))
	case kindReleased:
		return fmt.Sprintf("was asked to end: gives the lock back after %s", plural(e.Count, "step"))
	case kindKilled:
		return fmt.Sprintf("kills %s (SIGKILL) in the middle of its step %d", e.Victim, e.Count)
	case kindLate:
		outcome := "refused, nothing changed"
		if e.Rows > 0 {
			outcome = "it was NOT refused"
		}
		return fmt.Sprintf("writes late, with the killed one's number %d: %s", e.Fence, outcome)
	}
	return ""
}

// owner is the process whose session it is.
func (t *timeline) owner(session int64) string {
	if session == 0 {
		return "another process (the server does not tell which)"
	}
	if name, ok := t.sessions[session]; ok {
		return name
	}
	return "session " + strconv.FormatInt(session, 10)
}

func session(id int64) string {
	if id == 0 {
		return ""
	}
	return fmt.Sprintf(" (session %d)", id)
}

func numbers(list []int64) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = strconv.FormatInt(n, 10)
	}
	return strings.Join(texts, ", ")
}

func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

const (
	reset = "\x1b[0m"
	green = "\x1b[32m"
	red   = "\x1b[31m"
)

// palette has no red and green: those are for the verdict.
var palette = []string{"\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[34m", "\x1b[96m", "\x1b[93m", "\x1b[95m", "\x1b[94m"}

// coloured is a process's name, padded, in a colour of its own.
func (t *timeline) coloured(name string, width int) string {
	padded := fmt.Sprintf("%-*s", width, name)
	if t.colours == nil || name == director {
		return padded
	}
	colour, ok := t.colours[name]
	if !ok {
		colour = palette[len(t.colours)%len(palette)]
		t.colours[name] = colour
	}
	return colour + padded + reset
}

// finish prints what was checked, or the document of --json.
func (t *timeline) finish(r report) error {
	if t.json {
		r.Timeline = t.events
		return writeJSON(t.out, r)
	}
	t.say("\nWhat was checked in the end:\n")
	for _, i := range r.Invariants {
		mark, colour := "✓", green
		if !i.OK {
			mark, colour = "✗", red
		}
		if t.colours != nil {
			mark = colour + mark + reset
		}
		t.say("  %s %s\n", mark, i.Text)
	}
	return nil
}
