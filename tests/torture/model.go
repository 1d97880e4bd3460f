package torture

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// step is an operation on one key, as the model sees it.
type step struct {
	hold hold
	ends bool // the hold ends; false: it begins
	// before is the number of the grant before this one in the whole history. The
	// rule that numbers grow prescribes that order already; to know it keeps the
	// search short, and changes nothing about what is found.
	before int64
}

// held is the state of one key.
type held struct {
	exclusive string          // the holder, empty if there is none
	shared    map[string]bool // the holders
	token     int64           // the last one given
}

// model is a lock on one key: a grant needs that nobody holds it who conflicts,
// and a number larger than the last; what ends must have begun.
var model = porcupine.Model{
	Init: func() any { return held{} },
	Step: func(state, input, _ any) (bool, any) {
		was, s := state.(held), input.(step)
		now := held{exclusive: was.exclusive, shared: was.shared, token: was.token}
		op := s.hold.op
		switch {
		case s.ends && s.hold.shared:
			if !was.shared[op] {
				return false, nil
			}
			now.shared = maps.Clone(was.shared)
			delete(now.shared, op)
		case s.ends:
			if was.exclusive != op {
				return false, nil
			}
			now.exclusive = ""
		case was.exclusive != "", !s.hold.shared && len(was.shared) > 0, s.hold.token <= was.token, s.before != was.token:
			return false, nil
		case s.hold.shared:
			now.shared = map[string]bool{op: true}
			maps.Copy(now.shared, was.shared)
			now.token = s.hold.token
		default:
			now.exclusive, now.token = op, s.hold.token
		}
		return true, now
	},
	Equal: func(a, b any) bool {
		x, y := a.(held), b.(held)
		return x.exclusive == y.exclusive && x.token == y.token && maps.Equal(x.shared, y.shared)
	},
	DescribeOperation: func(input, _ any) string {
		s := input.(step)
		if s.ends {
			return "end of " + s.hold.op
		}
		return fmt.Sprintf("%s: %s, %d", s.hold.op, mode(&s.hold), s.hold.token)
	},
	DescribeState: func(state any) string {
		h := state.(held)
		return fmt.Sprintf("exclusive %q, shared %q, last number %d", h.exclusive, slices.Sorted(maps.Keys(h.shared)), h.token)
	},
}

// operations are the history of one key. A grant happened between the call and
// its return. A release that was confirmed happened between its call and its
// return. Any other end happened at some time after the last evidence: the
// server may free the key long after the holder has given it up.
func operations(holds []hold) []porcupine.Operation {
	tokens := make([]int64, len(holds))
	for i, h := range holds {
		tokens[i] = h.token
	}
	slices.Sort(tokens)
	clients := map[string]int{}
	var ops []porcupine.Operation
	for _, h := range holds {
		client, ok := clients[h.client()]
		if !ok {
			client = len(clients)
			clients[h.client()] = client
		}
		s := step{hold: h}
		if i, _ := slices.BinarySearch(tokens, h.token); i > 0 {
			s.before = tokens[i-1]
		}
		ops = append(ops, porcupine.Operation{ClientId: client, Input: s, Call: h.asked, Return: h.granted})
		end := porcupine.Operation{ClientId: client, Input: step{hold: h, ends: true},
			Call: max(h.asked, h.evidence), Return: forever}
		if h.endedInOrder() {
			end.Return = h.released
		}
		ops = append(ops, end)
	}
	return ops
}

// checkModel: each key behaves as if its grants and ends had happened one after
// the other, each at some moment within its own time. Where it does not, a page
// that shows why is written to the folder.
func checkModel(all []*attempt, folder string, limit time.Duration) []violation {
	f := findings{check: "linearizability"}
	byKey := holdsByKey(all)
	for _, key := range slices.SortedFunc(maps.Keys(byKey), cmp.Compare[string]) {
		ops := operations(byKey[key])
		switch porcupine.CheckOperationsTimeout(model, ops, limit) {
		case porcupine.Unknown:
			f.add("%s: undecided within %v", key, limit)
		case porcupine.Illegal:
			f.add("%s: no order of the grants and ends explains what was seen; %s", key, visualize(ops, folder, key))
		}
	}
	return f.all()
}

// visualize says where the page is.
func visualize(ops []porcupine.Operation, folder, key string) string {
	const limit = 10 * time.Second
	_, info := porcupine.CheckOperationsVerbose(model, ops, limit)
	path := filepath.Join(folder, key+".html")
	file, err := os.Create(path)
	if err == nil {
		err = porcupine.Visualize(model, info, file)
		if closeErr := file.Close(); err == nil {
			err = closeErr
		}
	}
	if err != nil {
		return fmt.Sprintf("there is no page that shows it: %v", err)
	}
	return "see " + path
}
