package deadlock

import (
	"iter"
	"unique"

	"github.com/dblock-go/dblock"
)

// lock is one key of a call.
type lock struct {
	class unique.Handle[class]
	id    int64
	label string
	mode  dblock.Mode
	// covers: what was held before it is known to have been held when it was waited for, so
	// that what is waited for while it is held need not be compared with that again.
	covers bool
}

// node is the key by itself.
func (l *lock) node() node { return node{l.class, true, l.id} }

func (l *lock) taken(at Place) Taken {
	c := l.class.Value()
	return Taken{Kind: c.kind, Class: c.name, Key: l.label, Mode: l.mode, Place: at}
}

// heldLock is a lock and the call that took it.
type heldLock struct {
	*lock
	by *Hold
}

func (l heldLock) isCovering() bool { return l.covers }

// holding is what is held together, in the order in which it was taken.
type holding struct {
	groups  []*group // by their first locks
	byClass map[unique.Handle[class]]ofModes
}

// ofModes is in the order of dblock.Mode.
type ofModes [2]*group

// group are the locks of one class in one mode.
type group struct {
	class unique.Handle[class]
	locks []heldLock
	byKey map[int64]int
}

func (g *group) isCovering() bool { return g.locks[0].covers }

func (g *group) lock(id int64) (l heldLock, ok bool) {
	if g == nil {
		return l, false
	}
	i, ok := g.byKey[id]
	if ok {
		l = g.locks[i]
	}
	return l, ok
}

func (o *holding) of(c unique.Handle[class]) ofModes {
	if o == nil {
		return ofModes{}
	}
	return o.byClass[c]
}

// has: who holds this does not wait for the lock.
func (o *holding) has(l *lock) bool {
	groups := o.of(l.class)
	_, exclusive := groups[dblock.Exclusive].lock(l.id)
	_, shared := groups[dblock.Shared].lock(l.id)
	return exclusive || shared && l.mode == dblock.Shared
}

func (o *holding) addAll(h *Hold) {
	for i := range h.locks {
		o.add(h, &h.locks[i])
	}
}

func (o *holding) add(h *Hold, l *lock) {
	if o.has(l) {
		return
	}
	groups := o.byClass[l.class]
	g := groups[l.mode]
	if g == nil {
		g = &group{class: l.class, byKey: map[int64]int{}}
		o.groups = append(o.groups, g)
		if o.byClass == nil {
			o.byClass = map[unique.Handle[class]]ofModes{}
		}
		groups[l.mode] = g
		o.byClass[l.class] = groups
	}
	g.byKey[l.id] = len(g.locks)
	g.locks = append(g.locks, heldLock{l, h})
}

// nearby are those with which a lock that follows is compared. The last ones say it all, up
// to one that covers the others; a few further ones keep the cycles short. Within one call,
// whose order repeats itself, the neighbour is enough.
func nearby[T interface{ isCovering() bool }](all []T, oneCall bool) iter.Seq[T] {
	const near = 8
	return func(yield func(T) bool) {
		covered := false
		for back := 1; back <= len(all); {
			one := all[len(all)-back]
			covered = covered || one.isCovering()
			switch {
			case !yield(one), oneCall && covered:
				return
			case back < near, !covered && back < near*near:
				back++
			default:
				back *= near
			}
		}
	}
}
