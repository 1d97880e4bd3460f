package torture

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// forever is later than every stamp.
const forever = math.MaxInt64

// attempt is one call for keys and what came of it.
type attempt struct {
	op      string
	call    history.Call
	keys    []history.Key // with tokens once granted
	asked   int64
	refused int64 // 0 if not
	granted int64 // 0 if not
	// evidence is until when the lock was held at least: the moment before the last
	// thing that only a holder can do. 0 if there was none.
	evidence  int64
	heard     int64 // of the loss, 0 if not
	releasing int64 // 0 if it was not released
	released  int64 // 0 if no release returned
	class     string
	err       string
	writes    []history.Record // acknowledged
	stale     []history.Record
}

// endedInOrder reports a release that the server confirmed.
func (a *attempt) endedInOrder() bool { return a.released != 0 && a.class == "" }

// heardLoss is when the holder heard that it had lost the lock, 0 if it did not.
func (a *attempt) heardLoss() int64 {
	if a.heard == 0 && a.granted != 0 && dialect.Class(a.class) == dblock.ErrLost {
		return a.released
	}
	return a.heard
}

// attempts gathers the records by call, in the order of the calls.
func attempts(records []history.Record) []*attempt {
	records = slices.Clone(records)
	slices.SortStableFunc(records, func(a, b history.Record) int { return cmp.Compare(a.At, b.At) })
	byOp := map[string]*attempt{}
	var all []*attempt
	for _, r := range records {
		if r.Op == "" {
			continue
		}
		a, ok := byOp[r.Op]
		if !ok {
			a = &attempt{op: r.Op, asked: r.At}
			byOp[r.Op], all = a, append(all, a)
		}
		switch r.What {
		case history.Ask:
			a.call, a.keys, a.asked = r.Call, r.Keys, r.At
		case history.Refused:
			a.refused, a.class, a.err = r.At, r.Class, r.Error
		case history.Granted:
			a.keys, a.granted = r.Keys, r.At
		case history.Held:
			a.evidence = max(a.evidence, r.At)
		case history.Wrote:
			a.writes = append(a.writes, r)
		case history.Stale:
			a.stale = append(a.stale, r)
		case history.Lost:
			a.heard = r.At
		case history.Releasing:
			a.releasing = r.At
		case history.Released:
			a.released, a.class, a.err = r.At, r.Class, r.Error
			if r.Class == "" && r.Error == "" {
				a.evidence = max(a.evidence, a.releasing)
			}
		}
	}
	return all
}

// hold is a granted attempt as one of its keys sees it.
type hold struct {
	*attempt
	key    string
	shared bool
	token  int64
}

// holdsByKey are the granted attempts, by key, in the order of the calls.
func holdsByKey(all []*attempt) map[string][]hold {
	byKey := map[string][]hold{}
	for _, a := range all {
		if a.granted == 0 {
			continue
		}
		for _, k := range a.keys {
			byKey[k.Name] = append(byKey[k.Name], hold{attempt: a, key: k.Name, shared: k.Shared, token: k.Token})
		}
	}
	return byKey
}

// client is the goroutine that made the call.
func (a *attempt) client() string { return a.op[:strings.LastIndexByte(a.op, '-')] }
