package demo

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// goodFacts are those of a demo in which everything held.
func goodFacts() facts {
	f := facts{
		events: []Event{
			{Process: "replica-1", Kind: kindMigrated, Versions: []int64{1, 2, 3}},
			{Process: "replica-2", Kind: kindMigrated},
			{Process: "replica-3", Kind: kindMigrated},
			{Process: "replica-4", Kind: kindMigrated},
		},
		applied:  []int64{1, 2, 3},
		balances: map[int]int{1: 850, 2: 1150},
		steps:    []step{{1, 1, "projector-2"}, {2, 1, "projector-2"}, {3, 2, "projector-1"}, {4, 3, "projector-3"}},
	}
	for _, teller := range tellers {
		f.events = append(f.events, Event{Kind: kindMoved, Count: transfersOfTeller, From: teller.from, To: teller.to, Amount: teller.amount})
	}
	f.events = append(f.events,
		Event{MS: 10, Process: "projector-2", Kind: kindLeading, Fence: 1},
		Event{MS: 20, Process: director, Kind: kindKilled, Victim: "projector-2", Fence: 1},
		Event{MS: 33, Process: "projector-1", Kind: kindLeading, Fence: 2},
		Event{MS: 40, Process: director, Kind: kindLate, Fence: 1},
		Event{MS: 50, Process: "projector-3", Kind: kindLeading, Fence: 3})
	return f
}

func broken(f facts) []string {
	var names []string
	for _, i := range check(f) {
		if !i.OK {
			names = append(names, i.Name)
		}
		if i.Text == "" {
			names = append(names, i.Name+" says nothing")
		}
	}
	return names
}

func TestInvariantsOfAGoodDemo(t *testing.T) {
	if names := broken(goodFacts()); names != nil {
		t.Errorf("broken: %v", names)
	}
	if ms := takeover(goodFacts().events); ms != 13 {
		t.Errorf("takeover in %v ms", ms)
	}
}

func TestInvariantsNoticeWhatBroke(t *testing.T) {
	event := func(f *facts, kind Kind, nth int) *Event {
		for i := range f.events {
			if f.events[i].Kind == kind {
				if nth == 0 {
					return &f.events[i]
				}
				nth--
			}
		}
		t.Fatalf("no %s", kind)
		return nil
	}
	for _, test := range []struct {
		name string
		harm func(f *facts)
		want []string
	}{
		{"two replicas migrate", func(f *facts) { event(f, kindMigrated, 1).Versions = []int64{3} }, []string{"migrations_applied_once"}},
		{"recorded twice", func(f *facts) { f.applied = []int64{1, 2, 2, 3} }, []string{"migrations_applied_once"}},
		{"not recorded", func(f *facts) { f.applied = []int64{1, 2} }, []string{"migrations_applied_once"}},
		{"a replica is missing", func(f *facts) { event(f, kindMigrated, 3).Kind = "gone" }, []string{"migrations_applied_once"}},
		{"money lost", func(f *facts) { f.balances[1]-- }, []string{"money_kept"}},
		{"money in the wrong place", func(f *facts) { f.balances[1]--; f.balances[2]++ }, []string{"money_kept"}},
		{"no accounts", func(f *facts) { f.balances = nil }, []string{"money_kept"}},
		{"a teller is missing", func(f *facts) { event(f, kindMoved, 0).Kind = "gone" }, []string{"money_kept"}},
		{"deadlocks", func(f *facts) { event(f, kindMoved, 2).Deadlocks = 1 }, []string{"no_deadlock"}},
		{"a number twice", func(f *facts) { event(f, kindLeading, 2).Fence = 2 }, []string{"one_leader_at_a_time"}},
		{"the number does not grow", func(f *facts) { event(f, kindLeading, 1).Fence = 1 }, []string{"one_leader_at_a_time", "killed_leader_replaced"}},
		{"the old leader goes on", func(f *facts) { f.steps[2], f.steps[3] = step{3, 2, "projector-1"}, step{4, 1, "projector-2"} }, []string{"one_leader_at_a_time"}},
		{"another's number", func(f *facts) { f.steps[3].leader = "projector-1" }, []string{"one_leader_at_a_time"}},
		{"a lost step", func(f *facts) { f.steps = slices.Delete(f.steps, 1, 2) }, []string{"one_leader_at_a_time"}},
		{"a doubled step", func(f *facts) { f.steps[2].position = 2 }, []string{"one_leader_at_a_time"}},
		{"no steps", func(f *facts) { f.steps = nil }, []string{"one_leader_at_a_time"}},
		{"nobody takes over", func(f *facts) { f.events = f.events[:len(f.events)-3] }, []string{"one_leader_at_a_time", "killed_leader_replaced", "late_write_refused"}},
		{"nobody was killed", func(f *facts) { event(f, kindKilled, 0).Kind = "gone" }, []string{"killed_leader_replaced", "late_write_refused"}},
		{"the dead leads", func(f *facts) { event(f, kindLeading, 1).Process = "projector-2"; f.steps[2].leader = "projector-2" }, []string{"killed_leader_replaced"}},
		{"the late write succeeds", func(f *facts) { event(f, kindLate, 0).Rows = 1 }, []string{"late_write_refused"}},
		{"no late write", func(f *facts) { event(f, kindLate, 0).Kind = "gone" }, []string{"late_write_refused"}},
		{"a late write with another number", func(f *facts) { event(f, kindLate, 0).Fence = 2 }, []string{"late_write_refused"}},
		{"a lock is left", func(f *facts) { f.held = []string{"held by session 7"} }, []string{"nothing_left_locked"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := goodFacts()
			test.harm(&f)
			if names := broken(f); !slices.Equal(names, test.want) {
				t.Errorf("broken: %v, want %v", names, test.want)
			}
		})
	}
}

func TestTimelineForPeople(t *testing.T) {
	var out bytes.Buffer
	line := newTimeline(Config{Stdout: &out})
	line.begin()
	line.act("Deploy")
	line.add(Event{Process: "replica-1", Kind: kindAcquired, Session: 42})
	line.add(Event{Process: "replica-2", Kind: kindWaiting, Session: 42})
	line.add(Event{Process: "replica-2", Kind: kindWaiting, Session: 43})
	line.add(Event{Process: "replica-2", Kind: kindWaiting})
	line.add(Event{Process: "projector-1", Kind: kindWorking})
	if err := line.finish(report{Invariants: []Invariant{{OK: true, Text: "held"}, {Text: "broke"}}}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"1. Deploy\n", "replica-1    holds the lock (session 42)", "replica-2    waits for replica-1\n",
		"waits for session 43\n", "the server does not tell which", "✓ held\n", "✗ broke\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "projector-1") || strings.Contains(out.String(), "\x1b") {
		t.Errorf("too much in\n%s", out.String())
	}
}

func TestTimelineForPrograms(t *testing.T) {
	var out bytes.Buffer
	line := newTimeline(Config{Stdout: &out, JSON: true})
	line.say("for people")
	line.begin()
	line.act("Deploy")
	line.add(Event{Process: "replica-1", PID: 7, Kind: kindMigrated, Versions: []int64{1, 2}})
	if err := line.finish(report{OK: true, Database: "postgres"}); err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v in\n%s", err, out.String())
	}
	if !r.OK || len(r.Timeline) != 2 || r.Timeline[1].Text != "applied 2 migrations: 1, 2" {
		t.Errorf("%+v", r)
	}
}

func TestOnlyTheDemoStartsItsProcesses(t *testing.T) {
	err := RunChild(t.Context(), Config{Stdin: strings.NewReader("")}, "hacker", "x", nil)
	if err == nil || !strings.Contains(err.Error(), "hacker") {
		t.Errorf("%v", err)
	}
}
