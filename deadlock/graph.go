package deadlock

import (
	"cmp"
	"maps"
	"slices"
)

// graph is who waits for whom.
type graph struct {
	waits    []Wait            // sorted, without duplicates
	blockers map[int64][]int64 // by waiter, sorted
}

func newGraph(waits []Wait) *graph {
	waits = slices.DeleteFunc(slices.Clone(waits), func(w Wait) bool { return w.Waiter == w.Blocker })
	slices.SortFunc(waits, func(a, b Wait) int {
		return cmp.Or(cmp.Compare(a.Waiter, b.Waiter), cmp.Compare(a.Blocker, b.Blocker), compareTargets(a.Target, b.Target))
	})
	g := &graph{waits: slices.Compact(waits), blockers: map[int64][]int64{}}
	for _, w := range g.waits {
		if known := g.blockers[w.Waiter]; len(known) == 0 || known[len(known)-1] != w.Blocker {
			g.blockers[w.Waiter] = append(known, w.Blocker)
		}
	}
	return g
}

// place is where a session waits.
type place struct {
	session int64
	target  Target
}

// inLine are the places of all waiters.
func inLine(waits []Wait) map[place]bool {
	places := map[place]bool{}
	for _, w := range waits {
		places[place{w.Waiter, w.Target}] = true
	}
	return places
}

// direct leaves out waits for those who stand in the same line, if all whom they
// wait for are waited for anyway. No cycle and no root is lost by that.
func (g *graph) direct() []Wait {
	line := inLine(g.waits)
	return slices.DeleteFunc(slices.Clone(g.waits), func(w Wait) bool {
		return line[place{w.Blocker, w.Target}] && subset(g.blockers[w.Blocker], g.blockers[w.Waiter])
	})
}

// subset is for sorted lists.
func subset(small, large []int64) bool {
	for _, x := range small {
		i, found := slices.BinarySearch(large, x)
		if !found {
			return false
		}
		large = large[i:]
	}
	return true
}

// roots block somebody and wait for nobody.
func (g *graph) roots() []int64 {
	roots := map[int64]bool{}
	for _, w := range g.waits {
		if len(g.blockers[w.Blocker]) == 0 {
			roots[w.Blocker] = true
		}
	}
	return slices.Sorted(maps.Keys(roots))
}

// cycles has the shortest one of each set of sessions that all wait for each other,
// beginning with its smallest session.
func (g *graph) cycles() [][]int64 {
	var found [][]int64
	for _, component := range g.components() {
		if start := slices.Min(component); len(component) > 1 {
			found = append(found, g.shortest(start, component))
		}
	}
	slices.SortFunc(found, slices.Compare)
	return found
}

// components are the strongly connected ones, by Tarjan's algorithm, without
// recursion: a queue of waiters may be long.
// https://en.wikipedia.org/wiki/Tarjan%27s_strongly_connected_components_algorithm
func (g *graph) components() [][]int64 {
	type visit struct {
		session int64
		next    int // of its blockers
	}
	var (
		found   [][]int64
		stack   []int64
		path    []visit
		order   = map[int64]int{} // of the first visit, from 1
		low     = map[int64]int{}
		onStack = map[int64]bool{}
	)
	enter := func(session int64) {
		order[session] = len(order) + 1
		low[session] = order[session]
		stack, onStack[session] = append(stack, session), true
		path = append(path, visit{session: session})
	}
	for _, start := range slices.Sorted(maps.Keys(g.blockers)) {
		if order[start] != 0 {
			continue
		}
		enter(start)
		for len(path) > 0 {
			top := &path[len(path)-1]
			session := top.session
			if blockers := g.blockers[session]; top.next < len(blockers) {
				blocker := blockers[top.next]
				top.next++
				if order[blocker] == 0 {
					enter(blocker)
				} else if onStack[blocker] {
					low[session] = min(low[session], order[blocker])
				}
				continue
			}
			path = path[:len(path)-1]
			if len(path) > 0 {
				parent := path[len(path)-1].session
				low[parent] = min(low[parent], low[session])
			}
			if low[session] == order[session] {
				i := slices.Index(stack, session)
				component := slices.Clone(stack[i:])
				stack = stack[:i]
				for _, s := range component {
					onStack[s] = false
				}
				found = append(found, component)
			}
		}
	}
	return found
}

// shortest is a shortest cycle through start within the component.
func (g *graph) shortest(start int64, component []int64) []int64 {
	within := map[int64]bool{}
	for _, s := range component {
		within[s] = true
	}
	from := map[int64]int64{}
	for line := []int64{start}; len(line) > 0; line = line[1:] {
		for _, blocker := range g.blockers[line[0]] {
			if blocker == start {
				cycle := []int64{line[0]}
				for s := line[0]; s != start; {
					s = from[s]
					cycle = append(cycle, s)
				}
				slices.Reverse(cycle)
				return cycle
			}
			if _, seen := from[blocker]; !seen && within[blocker] {
				from[blocker] = line[0]
				line = append(line, blocker)
			}
		}
	}
	return nil
}

// waitEdge is from a waiter to its blocker.
type waitEdge struct{ waiter, blocker int64 }

// cyclic are the edges of the cycles.
func (s *Snapshot) cyclic() map[waitEdge]bool {
	edges := map[waitEdge]bool{}
	for _, c := range s.Cycles {
		for i, waiter := range c {
			edges[waitEdge{waiter, c[(i+1)%len(c)]}] = true
		}
	}
	return edges
}
