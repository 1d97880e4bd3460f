//go:build linux

package bench

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

const (
	contenderProcesses  = 4
	contenderGoroutines = 8 // in each of them
)

// hot: processes with several goroutines each fight for one key. dblock's locker is
// measured in turns with a blocking connection for each goroutine, in the same
// processes.
func hot(t *testing.T, d *database, p plan) {
	fight := fmt.Sprintf("one key, %d processes × %d goroutines", contenderProcesses, contenderGoroutines)
	for _, load := range []struct {
		name     string
		hold     time.Duration
		handOffs targets
		fairness target
		p99      target
	}{
		{"free", 0, mostly(atLeast(8), atLeast(6)), atLeast(0.95), target{}},
		{"held", time.Millisecond, mostly(atLeast(1.05), atLeast(1.0)), target{}, atMost(1.0)},
	} {
		t.Run(load.name, func(t *testing.T) {
			what := fight + ", no hold"
			if load.hold > 0 {
				what = fmt.Sprintf("%s, holds of %v", fight, load.hold)
			}
			handOffs := row{what: what + ": hand-offs against one blocking connection per waiter", target: load.handOffs.of(d.kind)}
			fairness := row{what: what + ": Jain index over all goroutines", target: load.fairness}
			middle := row{what: what + ": median wait"}
			p99 := row{what: what + ": p99 of the waits", target: load.p99}
			var ours, theirs []fought
			for i := range p.repetitions {
				t.Run(fmt.Sprint(i+1), func(t *testing.T) {
					our, their := fightInTurns(t, d, p.hot, load.hold)
					ours, theirs = append(ours, our), append(theirs, their)
					handOffs.values = append(handOffs.values, our.handOffs/their.handOffs)
					fairness.values = append(fairness.values, our.jain)
					middle.values = append(middle.values, float64(our.median)/float64(their.median))
					p99.values = append(p99.values, float64(our.p99)/float64(their.p99))
				})
			}
			handOffs.detail = sides(ours, theirs, "%.0f/s", func(f fought) float64 { return f.handOffs })
			fairness.detail = sides(ours, theirs, "%.2f", func(f fought) float64 { return f.jain })
			middle.detail = sides(ours, theirs, "%.2f ms", func(f fought) float64 { return milliseconds(f.median) })
			p99.detail = sides(ours, theirs, "%.2f ms", func(f fought) float64 { return milliseconds(f.p99) })
			for _, r := range []row{handOffs, fairness, middle, p99} {
				d.report.add(d.kind, r)
			}
		})
	}
}

func sides(ours, theirs []fought, format string, value func(fought) float64) string {
	text := func(all []fought) string {
		var values []float64
		for _, f := range all {
			values = append(values, value(f))
		}
		return fmt.Sprintf(format, median(values))
	}
	return text(ours) + " / " + text(theirs)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// fought is how a fight for the key went.
type fought struct {
	handOffs    float64 // per second
	jain        float64
	median, p99 time.Duration // of the waits
}

// fightInTurns lets new processes fight, dblock's and the raw way in turns.
func fightInTurns(t *testing.T, d *database, length, hold time.Duration) (our, their fought) {
	workers := make([]worker, contenderProcesses)
	for i := range workers {
		workers[i] = startWorker(t, "contend")
		workers[i].send(t, contenders{Kind: d.kind, DSN: d.dsn, Goroutines: contenderGoroutines})
	}
	const turns = 4
	ways := []string{wayDblock, wayBlocking}
	fights := map[string][]fought{}
	for _, way := range ways { // connects, prepares, fills caches
		fight(t, workers, round{Way: way, Length: length / turns, Hold: hold})
	}
	for i := range turns {
		for n := range ways {
			way := ways[(i+n)%len(ways)]
			fights[way] = append(fights[way], fight(t, workers, round{Way: way, Length: length / turns, Hold: hold}))
		}
	}
	return middleOf(fights[wayDblock]), middleOf(fights[wayBlocking])
}

func middleOf(all []fought) fought {
	of := func(value func(fought) float64) float64 {
		var values []float64
		for _, f := range all {
			values = append(values, value(f))
		}
		return median(values)
	}
	return fought{
		handOffs: of(func(f fought) float64 { return f.handOffs }),
		jain:     of(func(f fought) float64 { return f.jain }),
		median:   time.Duration(of(func(f fought) float64 { return float64(f.median) })),
		p99:      time.Duration(of(func(f fought) float64 { return float64(f.p99) })),
	}
}

// fight lets all processes fight at the same time, and looks whether two held the
// key at once.
func fight(t *testing.T, workers []worker, r round) fought {
	t.Helper()
	r.Until = time.Now().Add(r.Length)
	for _, w := range workers {
		w.send(t, r)
	}
	var all []held
	var shares []int
	for _, w := range workers {
		var o outcome
		w.receive(t, &o)
		if o.Err != "" {
			t.Fatalf("%s: %s", r.Way, o.Err)
		}
		for _, goroutine := range o.Holds {
			within := 0
			for _, h := range goroutine {
				if h.Granted < r.Until.UnixNano() {
					within++
				}
			}
			shares = append(shares, within)
			all = append(all, goroutine...)
		}
	}
	if n := overlaps(all); n > 0 {
		t.Errorf("%s: %d of %d holders held the key while another did", r.Way, n, len(all))
	}
	var waits []time.Duration
	total := 0
	for _, h := range all {
		waits = append(waits, time.Duration(h.Granted-h.Asked))
	}
	for _, s := range shares {
		total += s
	}
	return fought{handOffs: float64(total) / r.Length.Seconds(), jain: jain(shares), median: median(waits), p99: quantile(waits, 0.99)}
}

// overlaps counts the holds that began before an earlier one had ended.
func overlaps(all []held) int {
	slices.SortFunc(all, func(a, b held) int { return int(a.Granted - b.Granted) })
	n, ended := 0, int64(0)
	for _, h := range all {
		if h.Granted < ended {
			n++
		}
		ended = max(ended, h.Releasing)
	}
	return n
}
