package torture

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// violation is something that must never be.
type violation struct {
	check string // which check found it
	text  string
}

func (v violation) String() string { return v.check + ": " + v.text }

// findings gathers the violations of one check. A defect breaks a rule again and
// again; the first ones tell as much as all.
type findings struct {
	check string
	found []violation
	more  int
}

func (f *findings) add(format string, args ...any) {
	const most = 5
	if len(f.found) == most {
		f.more++
		return
	}
	f.found = append(f.found, violation{f.check, fmt.Sprintf(format, args...)})
}

func (f *findings) all() []violation {
	if f.more > 0 {
		return append(f.found, violation{f.check, fmt.Sprintf("and %d more", f.more)})
	}
	return f.found
}

// checkOverlap: while one holds a key for certain, nobody else does who
// conflicts with it, and nobody who conflicts is granted it. See the package
// documentation for what is certain.
func checkOverlap(all []*attempt) []violation {
	f := findings{check: "overlap"}
	for key, holds := range holdsByKey(all) {
		slices.SortFunc(holds, func(a, b hold) int { return cmp.Compare(a.granted, b.granted) })
		// For each place in that order, which of the holds before it lasted longest.
		var longest, longestExclusive []*hold
		longer := func(so []*hold, h *hold) *hold {
			if len(so) > 0 {
				if last := so[len(so)-1]; last != nil && (h == nil || last.evidence >= h.evidence) {
					return last
				}
			}
			return h
		}
		for i := range holds {
			h := &holds[i]
			before := longest
			if h.shared {
				before = longestExclusive
			}
			if h.evidence >= h.granted && i > 0 {
				if x := before[i-1]; x != nil && x.evidence >= h.granted {
					f.add("%s: %s (%s) was held until %d at least, %s (%s) from %d until %d at least",
						key, x.op, mode(x), x.evidence, h.op, mode(h), h.granted, h.evidence)
				}
			}
			n, _ := slices.BinarySearchFunc(holds[:i], h.asked, func(x hold, asked int64) int { return cmp.Compare(x.granted, asked) })
			if n > 0 {
				if x := before[n-1]; x != nil && x.evidence >= h.granted {
					f.add("%s: %s (%s) was held from %d until %d at least, %s (%s) was granted between %d and %d",
						key, x.op, mode(x), x.granted, x.evidence, h.op, mode(h), h.asked, h.granted)
				}
			}
			longest = append(longest, longer(longest, h))
			if h.shared {
				longestExclusive = append(longestExclusive, longer(longestExclusive, nil))
			} else {
				longestExclusive = append(longestExclusive, longer(longestExclusive, h))
			}
		}
	}
	return f.all()
}

func mode(h *hold) string {
	if h.shared {
		return "shared"
	}
	return "exclusive"
}

// checkFencing: every grant has a number, none is given twice, and a grant that
// was returned before another was asked for has the smaller one.
func checkFencing(all []*attempt) []violation {
	f := findings{check: "fencing"}
	for key, holds := range holdsByKey(all) {
		slices.SortFunc(holds, func(a, b hold) int { return cmp.Compare(a.granted, b.granted) })
		given := map[int64]string{}
		var largest []*hold // so far, in the order of the grants
		for i := range holds {
			h := &holds[i]
			if h.token <= 0 {
				f.add("%s: %s has the number %d", key, h.op, h.token)
			}
			if other, ok := given[h.token]; ok {
				f.add("%s: %s and %s have the same number %d", key, other, h.op, h.token)
			}
			given[h.token] = h.op
			n, _ := slices.BinarySearchFunc(holds[:i], h.asked, func(x hold, asked int64) int { return cmp.Compare(x.granted, asked) })
			if n > 0 && largest[n-1].token > h.token {
				x := largest[n-1]
				f.add("%s: %s has %d and was granted before %s was asked for, which has %d", key, x.op, x.token, h.op, h.token)
			}
			if i > 0 && largest[i-1].token > h.token {
				h = largest[i-1]
			}
			largest = append(largest, h)
		}
	}
	return f.all()
}

// checkStale: whose write a row refused because of a larger fencing number had
// lost the lock by then, so it holds nothing later.
func checkStale(all []*attempt) []violation {
	f := findings{check: "stale"}
	for _, a := range all {
		for _, s := range a.stale {
			if a.evidence > s.At {
				f.add("%s: %s was refused for a newer holder at %d, and held until %d at least", s.Row, a.op, s.At, a.evidence)
			}
		}
	}
	return f.all()
}

// logged is a row of the witness log: one write that was committed.
type logged struct {
	Key   string
	Way   history.Way
	N     int64
	Token int64
	Op    string
}

// witness is what the witness tables contain in the end.
type witness struct {
	log  []logged
	rows map[string]int64 // n by witnessRow
}

func witnessRow(key string, way history.Way) string { return key + " " + string(way) }

// checkWitness: the writes of a row are numbered without a gap or a duplicate,
// up to what the row says now; the fencing numbers never fall along the way; and
// every write that was acknowledged is there.
func checkWitness(all []*attempt, w witness) []violation {
	f := findings{check: "witness"}
	byRow := map[string][]logged{}
	there := map[logged]bool{}
	for _, l := range w.log {
		row := witnessRow(l.Key, l.Way)
		byRow[row] = append(byRow[row], l)
		there[logged{Key: l.Key, Way: l.Way, N: l.N, Op: l.Op}] = true
	}
	for row, n := range w.rows {
		if count := int64(len(byRow[row])); n != count {
			f.add("%s: it says %d after %d writes", row, n, count)
		}
	}
	for row, writes := range byRow {
		slices.SortStableFunc(writes, func(a, b logged) int { return cmp.Or(cmp.Compare(a.N, b.N), cmp.Compare(a.Token, b.Token)) })
		var last logged
		for _, l := range writes {
			switch {
			case l.N == last.N:
				f.add("%s: %s (%d) and %s (%d) both wrote %d: one update is lost", row, last.Op, last.Token, l.Op, l.Token, l.N)
			case l.N != last.N+1:
				f.add("%s: %s wrote %d after %d", row, l.Op, l.N, last.N)
			}
			if l.Token < last.Token {
				f.add("%s: %s wrote %d with the number %d after %s with %d", row, l.Op, l.N, l.Token, last.Op, last.Token)
			}
			last = l
		}
	}
	for _, a := range all {
		for _, write := range a.writes {
			if !there[logged{Key: write.Row, Way: write.Way, N: write.N, Op: a.op}] {
				f.add("%s: %s wrote %d, which was acknowledged and is not there", witnessRow(write.Row, write.Way), a.op, write.N)
			}
		}
	}
	return f.all()
}

// What a call may fail with while faults go on. A deadlock is not among it, nor
// is an error without a class.
var mayFail = []dialect.Class{dblock.ErrTimeout, dblock.ErrCanceled, dblock.ErrLost, dblock.ErrUnavailable}

// checkErrors: calls fail for the reasons that their documentation names.
func checkErrors(all []*attempt) []violation {
	f := findings{check: "errors"}
	for _, a := range all {
		class := dialect.Class(a.class)
		switch {
		case a.class == "" && a.err == "":
		case a.refused != 0 && a.call == history.Try && class == dblock.ErrNotAcquired:
		case a.granted != 0 && a.call != history.InTx && class != dblock.ErrLost:
			f.add("%s (%s), released: class %q: %s", a.op, a.call, class, a.err)
		case !slices.Contains(mayFail, class):
			f.add("%s (%s): class %q: %s", a.op, a.call, class, a.err)
		}
	}
	return f.all()
}

// checkLiveness: after the last fault every key was granted again.
func checkLiveness(all []*attempt, keys []dblock.Key, calm int64) []violation {
	f := findings{check: "liveness"}
	granted := map[string]bool{}
	for key, holds := range holdsByKey(all) {
		granted[key] = slices.ContainsFunc(holds, func(h hold) bool { return h.call != "" && h.asked > calm })
	}
	for _, key := range keys {
		if !granted[key.String()] {
			f.add("%s was never granted after the last fault", key)
		}
	}
	return f.all()
}
