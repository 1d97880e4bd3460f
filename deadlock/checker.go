package deadlock

import (
	"context"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"unique"
	"weak"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// CheckerOptions shape a [Checker]. The zero value, and nil, mean the defaults.
type CheckerOptions struct {
	// ClassOf says which keys are locked in the same places of the program for the same
	// reason, so that what is learnt of one is true of all. Default: the first part of
	// the key, the number of a raw key.
	ClassOf func(dblock.Key) string
	// Nested reports a call for a key inside of another for a key of the same class as
	// soon as it is seen. Default: when keys of the class were seen in both orders.
	Nested bool
	// Ignore names pairs of classes that are known not to deadlock with each other,
	// because a third lock is held around both, for instance:
	//
	//	Ignore: [][2]string{{"account", "order"}}
	//
	// Neither order of the two is learnt then, of whatever kind their locks are. A pair of a
	// class with itself is one too. Each report ends with the pair that silences it.
	// Default: none.
	Ignore [][2]string
	// OnInversion hears of each inversion, once, on the goroutine that was about to lock
	// and before it does. Default: nobody; see [Checker.Inversions].
	OnInversion func(Inversion)
}

// Checker learns in which order locks are taken inside one another, and reports the
// first time that two orders contradict each other: an [Inversion], which could become
// a deadlock though it has not. Give one Checker to advisory.Options, rowlock.Options,
// rowlock.RowsOptions and rowlock.OnceOptions of all that locks in a program, in development
// and in tests:
//
//	checker := deadlock.NewChecker(nil)
//	locks, err := advisory.New(db, &advisory.Options{Checker: checker})
//	rows := rowlock.New(db, &rowlock.Options{Checker: checker})
//	accounts := rowlock.NewRows(db, rowlock.RowsOptions{Table: "account", Key: []string{"id"}, Checker: checker})
//	t.Cleanup(func() { checker.Report(t) })
//
// # What it sees
//
// It learns orders of classes of keys, [CheckerOptions.ClassOf], apart for the kinds of
// locks and for each lock table, see [Call]: who takes an account inside of an order, and
// elsewhere any order inside of any account, hears of it. Rows of the application's own are
// of the class of their table, messages of rowlock.Once of that of its table. Within one
// class it learns orders of keys, so it reports those that were seen in both orders. Cycles
// of any length count, between several databases too, which no server sees. Shared holds do
// not wait for each other. A try, or a claim, does not wait, but what it was granted is
// waited for. The keys of one call are taken in one global order, so such calls cannot
// deadlock each other; a nested call against that order can, and is reported once both
// were seen. Only the database knows that order of an application's own rows, so that of
// them just nested calls are compared.
//
// A call is inside another if it gets the context of that: the one that Do, InTx,
// OnSession and DoTx give to their functions, [advisory.Lock.Context], and whatever is
// derived of them, in other goroutines too; or if both lock in the same transaction. A
// goroutine for which the holder does not wait gets another context. Go does not tell which
// goroutine calls, so a Lock that is followed by another with the plain context is not
// known to be held. Nor are locks of a caller's transaction, outside of that transaction;
// [WithTx] makes a context which carries them. A *sql.Conn in which transactions begin and
// end is no transaction: its locks are known to be held in later calls only if all of them
// get such a context. A transaction inside of another, by a savepoint (tx.Begin of pgx), is
// another one: lock in the outer one.
//
// It does not see statements of the application's own (see [Checker.Begin]), nor the guard
// of package migrations. It knows rows by their values as they are written, so that 'a' and
// 'A' are two to it whatever the collation says, and keys by their parts, so that the same
// key in two databases is one: where that happens each database needs a Checker of its own.
// It knows nothing of locks that guard an inversion: silence
// such pairs with [CheckerOptions.Ignore].
//
// # What it costs
//
// A nil Checker costs a comparison. Otherwise each key costs some microseconds, however
// many are held around it: it is compared with those taken last, and what is missing
// follows from what those had around them. An order that is new costs a search for a cycle,
// which may take a tenth of a millisecond. A Checker remembers the last 10,000 orders of
// classes, and of keys, looks at the first 100 keys of a call, gives up the search for a
// cycle after 1,000 locks, and keeps 1,000 inversions.
//
// [advisory.Lock.Context]: https://pkg.go.dev/github.com/dblock-go/dblock/advisory#Lock.Context
type Checker struct {
	options CheckerOptions
	ignored map[[2]string]bool

	mu         sync.Mutex
	classes    orders // between different classes
	keys       orders // between keys of one class
	txs        map[txID]*holding
	sweepAt    int // how many transactions make it look for those that are gone
	inversions []Inversion
	reported   map[string]bool
}

const (
	maxOrders     = 10_000
	maxKeys       = 100
	maxVisits     = 1000
	maxInversions = 1000
	sweepFirst    = 64
)

// NewChecker makes a Checker that has learnt nothing yet.
func NewChecker(o *CheckerOptions) *Checker {
	c := &Checker{ignored: map[[2]string]bool{}, txs: map[txID]*holding{}, sweepAt: sweepFirst, reported: map[string]bool{}}
	if o != nil {
		c.options = *o
	}
	for _, pair := range c.options.Ignore {
		c.ignored[pair], c.ignored[[2]string{pair[1], pair[0]}] = true, true
	}
	if c.options.ClassOf == nil {
		c.options.ClassOf = firstPart
	}
	return c
}

func firstPart(k dblock.Key) string {
	if parts := k.Parts(); len(parts) > 0 {
		return parts[0]
	}
	return k.String()
}

// Call is one call for keys, as a [Checker] sees it.
type Call struct {
	// Kind keeps locks apart that have nothing to do with each other, even if their keys
	// are equal. Those of dblock are "advisory"; "row" and "guard" of the lock table, with
	// the table's name in front if it is another one; "table row" of a table of the
	// application's own; and "mark" of rowlock.Once.
	Kind string
	// Keys are those of the call.
	Keys []dblock.Key
	// Order is the same as [Order] or [OrderRows] returned it: as the call takes them. It
	// is nil if only the server knows that; then nothing is learnt of their order.
	Order []dialect.Key
	// Try: the call does not wait.
	Try bool
	// Tx is the caller's transaction that will hold the keys; nil if it is another's or
	// a session.
	Tx dblock.Tx
}

// Hold is what a call holds, from [Hold.Acquired] to [Hold.Release] or to the end of its
// transaction. All methods of a nil Hold do nothing.
type Hold struct {
	checker *Checker
	locks   []lock
	ordered bool // the locks are taken in their order here
	place   Place
	state   atomic.Int32
	tx      txID
	alone   *holding // of its locks only; nil until it is needed
}

const (
	wanted int32 = iota
	held
	released
)

// Begin tells the Checker of a call before it waits. Packages advisory and rowlock do
// that by themselves; it is exported for code that locks by its own statements. Begin
// of a nil Checker returns a nil Hold.
func (c *Checker) Begin(ctx context.Context, call Call) *Hold {
	if c == nil {
		return nil
	}
	return c.begin(ctx, call)
}

func (c *Checker) begin(ctx context.Context, call Call) *Hold {
	h := &Hold{checker: c, place: caller(), tx: txIn(ctx, call.Tx), locks: c.locks(call), ordered: call.Order != nil}
	if call.Try {
		return h
	}
	if i, found := c.learn(ctx, h); found && c.options.OnInversion != nil {
		c.options.OnInversion(i)
	}
	return h
}

func (c *Checker) locks(call Call) []lock {
	classes := make(map[int64]string, len(call.Keys))
	for _, k := range call.Keys {
		classes[k.ID()] = c.options.ClassOf(k)
	}
	taken := call.Order
	if taken == nil {
		taken = make([]dialect.Key, min(len(call.Keys), maxKeys))
		for i := range taken {
			taken[i] = call.Keys[i].ResolveID()
		}
	}
	locks := make([]lock, min(len(taken), maxKeys))
	for i, k := range taken[:len(locks)] {
		locks[i] = lock{class: unique.Make(class{call.Kind, classes[k.ID]}), id: k.ID, label: k.Label, mode: k.Mode,
			covers: !call.Try && k.Mode != dblock.Shared && (i == 0 || call.Order != nil)}
	}
	return locks
}

// learn returns the inversion that the call is the first to show. Of several the one with
// the fewest steps says it all.
func (c *Checker) learn(ctx context.Context, h *Hold) (found Inversion, isNew bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var shortest []*edge
	note := func(cycle []*edge) {
		if shortest == nil || cycle != nil && len(cycle) < len(shortest) {
			shortest = cycle
		}
	}
	around := c.around(ctx, h.tx)
	has := c.txs[h.tx]
	var before holding // what the call itself has taken
	for i := range h.locks {
		b := &h.locks[i]
		if has.has(b) {
			continue
		}
		var outer, call lesson
		for _, o := range around {
			c.nest(o, h, b, false, &outer)
		}
		if h.ordered && len(h.locks) > 1 {
			c.nest(&before, h, b, true, &call)
			before.add(h, b)
		}
		for _, l := range []lesson{outer, call} {
			note(c.classes.learn(l.classes))
			note(c.keys.learn(l.keys))
		}
	}
	if shortest == nil {
		return found, false
	}
	found = inversionOf(shortest)
	id := found.identity()
	if c.reported[id] || len(c.inversions) == maxInversions {
		return found, false
	}
	c.reported[id] = true
	c.inversions = append(c.inversions, found)
	return found, true
}

// lesson is what is new of one lock: edges that end there.
type lesson struct{ classes, keys []*edge }

// nest finds what is new in that outer is held when b of inner is waited for.
func (c *Checker) nest(outer *holding, inner *Hold, b *lock, oneCall bool, l *lesson) {
	note := func(learnt *orders, news *[]*edge, from, to node, a heldLock) {
		n := nesting{from: from, to: to, held: a.mode, wanted: b.mode, oneCall: oneCall}
		if learnt.edges[n] == nil {
			*news = append(*news, &edge{n, Step{Held: a.taken(a.by.place), Wanted: b.taken(inner.place), OneCall: oneCall}})
		}
	}
	ignored := func(other *group) bool {
		if len(c.ignored) > 0 && c.ignored[[2]string{other.class.Value().name, b.class.Value().name}] {
			b.covers = false
			return true
		}
		return false
	}
	ofClass := node{class: b.class}
	for _, g := range outer.of(b.class) {
		if g == nil || ignored(g) {
			continue
		}
		if same, ok := g.lock(b.id); ok {
			note(&c.keys, &l.keys, b.node(), b.node(), same)
		}
		for a := range nearby(g.locks, oneCall) {
			switch {
			case a.id == b.id:
			case c.options.Nested && !oneCall:
				note(&c.classes, &l.classes, ofClass, ofClass, a)
			default:
				note(&c.keys, &l.keys, a.node(), b.node(), a)
			}
		}
	}
	for g := range nearby(outer.groups, oneCall) {
		if g.class != b.class && !ignored(g) {
			note(&c.classes, &l.classes, node{class: g.class}, ofClass, g.locks[len(g.locks)-1])
		}
	}
}

// around is what a context knows to be held: the innermost first.
type around struct {
	hold  *Hold // or
	tx    txID  // what that transaction holds
	conn  txID  // on which it runs, where that is all that is known of it
	outer *around
}

type aroundInContext struct{}

func within(ctx context.Context, a around) context.Context {
	a.outer = aroundIn(ctx)
	if a.conn != (txID{}) {
		a.tx = idOf(&a)
	}
	return context.WithValue(ctx, aroundInContext{}, &a)
}

func aroundIn(ctx context.Context) *around {
	a, _ := ctx.Value(aroundInContext{}).(*around)
	return a
}

// WithTx says that what gets the context is done inside the transaction of db: there a
// [Retry] on db runs its function once, and a [Checker] counts the locks of the
// transaction as held. The functions that dblock calls with a transaction get such a
// context. Of a transaction that was begun on a *sql.Conn nothing but this context tells
// where it begins and ends.
func WithTx(ctx context.Context, db dblock.DB, tx dblock.Tx) context.Context {
	a := around{tx: txOf(tx)}
	if a.tx == (txID{}) {
		a.conn = connOf(tx)
	}
	return within(context.WithValue(ctx, outermost{db}, true), a)
}

// around is what is held around a call. The caller has c.mu.
func (c *Checker) around(ctx context.Context, tx txID) []*holding {
	var all []*holding
	add := func(o *holding) {
		if o != nil && !slices.Contains(all, o) {
			all = append(all, o)
		}
	}
	add(c.txs[tx])
	for a := aroundIn(ctx); a != nil; a = a.outer {
		switch {
		case a.hold == nil:
			add(c.txs[a.tx])
		case a.hold.checker != c || a.hold.state.Load() != held:
		case a.hold.tx != (txID{}):
			add(c.txs[a.hold.tx])
		default:
			add(a.hold.holding())
		}
	}
	return all
}

// holding is of a hold that belongs to no transaction. The caller has c.mu.
func (h *Hold) holding() *holding {
	if h.alone == nil {
		h.alone = &holding{}
		h.alone.addAll(h)
	}
	return h.alone
}

// Acquired says that the call was granted its keys.
func (h *Hold) Acquired() {
	if h != nil && h.state.CompareAndSwap(wanted, held) {
		h.checker.attach(h)
	}
}

// In says that the keys belong to a transaction which began with them or after them, and
// in which the same key can be locked again.
func (h *Hold) In(tx dblock.Tx) {
	if h == nil {
		return
	}
	id := txOf(tx)
	h.checker.mu.Lock()
	h.tx = id
	h.checker.mu.Unlock()
	h.checker.attach(h)
}

// Context is ctx for what is done while the keys are held.
func (h *Hold) Context(ctx context.Context) context.Context {
	if h == nil {
		return ctx
	}
	return within(ctx, around{hold: h})
}

// Release says that the keys are not held any more, and if they belonged to a transaction
// that it has ended.
func (h *Hold) Release() {
	if h != nil {
		h.state.Store(released)
		h.checker.detach(h)
	}
}

// attach makes the hold one of its transaction's.
func (c *Checker) attach(h *Hold) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.tx == (txID{}) || h.state.Load() != held {
		return
	}
	if c.txs[h.tx] == nil {
		c.txs[h.tx] = &holding{}
	}
	c.txs[h.tx].addAll(h)
	if len(c.txs) < c.sweepAt {
		return
	}
	for tx := range c.txs {
		if tx.Value() == nil {
			delete(c.txs, tx)
		}
	}
	c.sweepAt = max(sweepFirst, 2*len(c.txs))
}

func (c *Checker) detach(h *Hold) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.txs, h.tx)
}

// txID tells transactions apart without keeping them alive: it is never that of another
// one, even if that gets the same address later.
type txID = weak.Pointer[byte]

// txIn is the transaction in which a call with the context runs.
func txIn(ctx context.Context, tx dblock.Tx) txID {
	if id := txOf(tx); id != (txID{}) {
		return id
	}
	if conn := connOf(tx); conn != (txID{}) {
		for a := aroundIn(ctx); a != nil; a = a.outer {
			if a.conn == conn {
				return a.tx
			}
		}
	}
	return txID{}
}

// txOf is zero for what may be several transactions, one after the other.
func txOf(tx dblock.Tx) txID {
	native := nativeOf(tx)
	switch native.(type) {
	case interface{ Commit() error }, interface{ Commit(context.Context) error }:
		return idOf(native)
	}
	return txID{}
}

// connOf is what tells those connections apart.
func connOf(tx dblock.Tx) txID { return idOf(nativeOf(tx)) }

func nativeOf(tx dblock.Tx) any {
	if s, ok := tx.(interface{ Native() any }); ok {
		return s.Native()
	}
	return tx
}

func idOf(native any) txID {
	v := reflect.ValueOf(native)
	if v.Kind() != reflect.Pointer {
		return txID{}
	}
	return weak.Make((*byte)(v.UnsafePointer()))
}

// Inversions are those found so far, each once, at most 1,000.
func (c *Checker) Inversions() []Inversion {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.inversions)
}

// Report fails a test with each of the inversions.
func (c *Checker) Report(t interface {
	Helper()
	Errorf(format string, args ...any)
}) {
	t.Helper()
	for _, i := range c.Inversions() {
		t.Errorf("%s", i)
	}
}
