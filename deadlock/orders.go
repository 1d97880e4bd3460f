package deadlock

import (
	"slices"
	"unique"

	"github.com/dblock-go/dblock"
)

// class says which locks are the same to a Checker.
type class struct{ kind, name string }

// node is a class of locks, or one of its keys.
type node struct {
	class unique.Handle[class]
	ofKey bool
	key   int64
}

// nesting says that somebody who held from waited for to.
type nesting struct {
	from, to     node
	held, wanted dblock.Mode
	oneCall      bool
}

// edge is a nesting with its first witness.
type edge struct {
	nesting
	step Step
}

// orders are the nestings learnt last, in lists that begin with the oldest.
type orders struct {
	edges  map[nesting]*edge
	from   map[node][]*edge
	oldest []*edge
}

// learn returns the shortest cycle that one of the edges closes. They are new, and differ in
// nothing but what is held.
func (o *orders) learn(edges []*edge) []*edge {
	if len(edges) == 0 {
		return nil
	}
	if o.edges == nil {
		o.edges, o.from = map[nesting]*edge{}, map[node][]*edge{}
	}
	for _, e := range edges {
		if o.edges[e.nesting] != nil { // twice among them
			continue
		}
		if len(o.oldest) == maxOrders {
			o.forgetOldest()
		}
		o.edges[e.nesting] = e
		o.from[e.from] = append(o.from[e.from], e)
		o.oldest = append(o.oldest, e)
	}
	return o.cycle(edges)
}

func (o *orders) forgetOldest() {
	e := o.oldest[0]
	o.oldest = o.oldest[1:]
	delete(o.edges, e.nesting)
	younger := o.from[e.from][1:]
	if o.from[e.from] = younger; len(younger) == 0 {
		delete(o.from, e.from)
	}
}

// cycle is the shortest walk from one of the first edges back to it, in which each waits
// for what the next holds. Calls for several keys follow one order, so that a cycle of
// nothing but those is none.
func (o *orders) cycle(firsts []*edge) []*edge {
	// Of the walks to a state one is enough.
	type state struct {
		at     node
		wanted dblock.Mode
		nested bool // not every step is within one call
	}
	type visit struct {
		edge   *edge
		nested bool
		before int
	}
	start := firsts[0]
	for _, first := range firsts {
		if !first.oneCall && first.blockedBy(first) {
			return []*edge{first}
		}
	}
	if len(o.from[start.to]) == 0 {
		return nil
	}
	visits := []visit{{start, !start.oneCall, -1}}
	seen := map[state]bool{}
	for i := 0; i < min(len(visits), maxVisits); i++ {
		v := visits[i]
		end := slices.IndexFunc(firsts, v.edge.blockedBy)
		if v.nested && end >= 0 && i > 0 {
			walk := []*edge{}
			for ; i > 0; i = visits[i].before {
				walk = append(walk, visits[i].edge)
			}
			walk = append(walk, firsts[end])
			slices.Reverse(walk)
			return walk
		}
		for _, next := range o.from[v.edge.to] {
			nested := v.nested || !next.oneCall
			if s := (state{next.to, next.wanted, nested}); v.edge.blockedBy(next) && !seen[s] {
				seen[s] = true
				visits = append(visits, visit{next, nested, i})
			}
		}
	}
	return nil
}

// blockedBy: what the edge waits for is what the other holds.
func (e *edge) blockedBy(other *edge) bool {
	return e.to == other.from && (e.wanted != dblock.Shared || other.held != dblock.Shared)
}
