package deadlock_test

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// program takes locks under a Checker, as advisory and rowlock do.
type program struct {
	*deadlock.Checker
	kind string
}

func newProgram(o *deadlock.CheckerOptions) *program {
	return &program{deadlock.NewChecker(o), "advisory"}
}

func (p *program) call(keys ...dblock.Key) deadlock.Call {
	c := deadlock.Call{Kind: p.kind, Keys: keys}
	for _, k := range keys {
		c.Order = append(c.Order, k.ResolveID())
	}
	slices.SortFunc(c.Order, func(a, b dialect.Key) int { return cmp.Compare(a.ID, b.ID) })
	return c
}

// lock holds the keys for what is done with the context that it returns.
func (p *program) lock(ctx context.Context, keys ...dblock.Key) (context.Context, *deadlock.Hold) {
	return take(ctx, p.Checker, p.call(keys...))
}

func (p *program) try(ctx context.Context, keys ...dblock.Key) (context.Context, *deadlock.Hold) {
	c := p.call(keys...)
	c.Try = true
	return take(ctx, p.Checker, c)
}

func (p *program) lockTx(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) {
	c := p.call(keys...)
	c.Tx = tx
	take(ctx, p.Checker, c)
}

// lockRows takes them in an order that only the server knows.
func (p *program) lockRows(ctx context.Context, tx dblock.Tx, keys ...dblock.Key) {
	take(ctx, p.Checker, deadlock.Call{Kind: p.kind, Keys: keys, Tx: tx})
}

func take(ctx context.Context, c *deadlock.Checker, call deadlock.Call) (context.Context, *deadlock.Hold) {
	h := c.Begin(ctx, call)
	h.Acquired()
	return h.Context(ctx), h
}

// nest takes the keys one inside the other, and gives them back.
func (p *program) nest(ctx context.Context, keys ...dblock.Key) {
	for _, k := range keys {
		var h *deadlock.Hold
		ctx, h = p.lock(ctx, k)
		defer h.Release()
	}
}

// mustHave fails unless there are as many as expected.
func (p *program) mustHave(t testing.TB, want int) []deadlock.Inversion {
	t.Helper()
	found := p.Inversions()
	if len(found) != want {
		t.Fatalf("%d inversions, want %d: %v", len(found), want, found)
	}
	return found
}

type transaction struct{ id int }

func (*transaction) ExecContext(context.Context, string, ...any) (sql.Result, error) { return nil, nil }
func (*transaction) Commit() error                                                   { return nil }

// connection is, like a *sql.Conn, not bound to one transaction.
type connection struct{ _ int }

func (*connection) ExecContext(context.Context, string, ...any) (sql.Result, error) { return nil, nil }

func key2(class string, n int) dblock.Key { return dblock.NewKey(class, fmt.Sprint(n)) }

// ascending are two keys of the classes whose one order is that of the arguments.
func ascending(first, second string) (a, b dblock.Key) {
	for n := 0; ; n++ {
		a, b = key2(first, 0), key2(second, n)
		if a.ID() < b.ID() {
			return a, b
		}
	}
}

func orderThenAccount(ctx context.Context, p *program) {
	order := p.Begin(ctx, p.call(key2("order", 1)))
	order.Acquired()
	defer order.Release()
	account := p.Begin(order.Context(ctx), p.call(key2("account", 7)))
	account.Acquired()
	account.Release()
}

func accountThenOrder(ctx context.Context, p *program) {
	account := p.Begin(ctx, p.call(key2("account", 8)))
	account.Acquired()
	defer account.Release()
	order := p.Begin(account.Context(ctx), p.call(key2("order", 2)))
	order.Acquired()
	order.Release()
}

func TestCheckerReportsAnInversionWithAllPlaces(t *testing.T) {
	var heard []deadlock.Inversion
	p := newProgram(&deadlock.CheckerOptions{OnInversion: func(i deadlock.Inversion) { heard = append(heard, i) }})
	for range 3 {
		orderThenAccount(t.Context(), p)
	}
	p.mustHave(t, 0)
	for range 3 {
		accountThenOrder(t.Context(), p)
	}
	inversion := p.mustHave(t, 1)[0]
	if len(heard) != 1 {
		t.Errorf("heard of it %d times", len(heard))
	}
	if len(inversion.Steps) != 2 {
		t.Fatalf("%d steps", len(inversion.Steps))
	}
	for i, want := range []struct{ held, wanted string }{{"account/8", "order/2"}, {"order/1", "account/7"}} {
		s := inversion.Steps[i]
		if s.Held.Key != want.held || s.Wanted.Key != want.wanted {
			t.Errorf("step %d: %s then %s, want %v", i, s.Held.Key, s.Wanted.Key, want)
		}
		if s.Wanted.Place.Line != s.Held.Place.Line+3 {
			t.Errorf("step %d: %s, then %s: want three lines below", i, s.Held.Place, s.Wanted.Place)
		}
	}
	text := inversion.String()
	for _, part := range []string{"advisory account", "advisory order", "account/8", "order/2", "order/1", "account/7",
		"checker_test.go:", "(deadlock_test.orderThenAccount)", "(deadlock_test.accountThenOrder)", "one call", "Ignore"} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is missing in:\n%s", part, text)
		}
	}
	t.Logf("%s", text)
}

func TestCheckerFindsCyclesOfAnyLength(t *testing.T) {
	p := newProgram(nil)
	a, b, c, d := key2("a", 1), key2("b", 1), key2("c", 1), key2("d", 1)
	for _, pair := range [][2]dblock.Key{{a, b}, {b, c}, {c, d}, {a, d}} {
		p.nest(t.Context(), pair[0], pair[1])
	}
	p.mustHave(t, 0)
	p.nest(t.Context(), d, a)
	if steps := len(p.mustHave(t, 1)[0].Steps); steps != 2 {
		t.Errorf("%d steps, want the shortest cycle: 2", steps)
	}
	p = newProgram(nil)
	for _, pair := range [][2]dblock.Key{{a, b}, {b, c}, {c, d}, {d, a}} {
		p.nest(t.Context(), pair[0], pair[1])
	}
	if steps := len(p.mustHave(t, 1)[0].Steps); steps != 4 {
		t.Errorf("%d steps, want 4", steps)
	}
	p = newProgram(nil)
	p.nest(t.Context(), a, b)
	p.nest(t.Context(), b, c, a) // of which c inside b and a inside c close a longer one
	if steps := len(p.mustHave(t, 1)[0].Steps); steps != 2 {
		t.Errorf("%d steps, want the shortest cycle of the call: 2", steps)
	}
}

func TestCheckerIsSilentAboutWhatCannotDeadlock(t *testing.T) {
	a, b := ascending("a", "b")
	for name, run := range map[string]func(ctx context.Context, p *program){
		"one order": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			p.nest(ctx, key2("a", 5), key2("b", 9))
		},
		"one after the other": func(ctx context.Context, p *program) {
			p.nest(ctx, a)
			p.nest(ctx, b)
			p.nest(ctx, a)
		},
		"given back before": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			inside, h := p.lock(ctx, b)
			h.Release()
			p.nest(inside, a)
		},
		"never granted": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			h := p.Begin(ctx, p.call(b))
			p.nest(h.Context(ctx), a)
		},
		"keys of one call": func(ctx context.Context, p *program) {
			for n := range 20 {
				p.lock(ctx, key2("a", n), key2("b", n), key2("a", n+1))
			}
		},
		"nested in the order of calls": func(ctx context.Context, p *program) {
			p.lock(ctx, a, b)
			p.nest(ctx, a, b)
		},
		"tries": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			inside, _ := p.lock(ctx, b)
			p.try(inside, a)
		},
		"shared on both sides": func(ctx context.Context, p *program) {
			p.nest(ctx, a.Shared(), b)
			p.nest(ctx, b, a.Shared())
		},
		"the same key shared twice": func(ctx context.Context, p *program) {
			p.nest(ctx, a.Shared(), a.Shared())
		},
		"other kinds": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			(&program{p.Checker, "row"}).nest(ctx, b, a)
		},
		"one class in one order": func(ctx context.Context, p *program) {
			p.nest(ctx, key2("a", 1), key2("a", 2))
			p.nest(ctx, key2("a", 2), key2("a", 3))
			p.nest(ctx, key2("a", 1), key2("a", 3))
		},
		"rows of one call, in an order that is not known": func(ctx context.Context, p *program) {
			p.lockRows(ctx, &transaction{1}, a, b, key2("a", 1))
			p.lockRows(ctx, &transaction{2}, key2("a", 1), b, a)
			p.nest(ctx, b, a)
		},
		"another transaction": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			p.lockTx(ctx, &transaction{1}, b)
			p.lockTx(ctx, &transaction{2}, a)
		},
		"the next transaction of a connection": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			conn := &connection{}
			for _, k := range []dblock.Key{b, a} {
				p.lockTx(deadlock.WithTx(ctx, &fakeDB{}, conn), conn, k)
			}
		},
		"given back before, out of order": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			outer, first := p.lock(ctx, b)
			inner, _ := p.try(outer, key2("c", 1)) // which does not wait inside of b
			first.Release()
			p.nest(inner, a)
		},
		"another transaction of a connection": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			conn := &connection{}
			p.lockTx(ctx, conn, b)
			p.lockTx(ctx, conn, a)
		},
		"a key of a call that the transaction has": func(ctx context.Context, p *program) {
			p.nest(ctx, b, a)
			tx := &transaction{}
			p.lockTx(ctx, tx, b)
			p.lockTx(ctx, tx, a, b)
		},
		"a key that the transaction has": func(ctx context.Context, p *program) {
			tx := &transaction{}
			p.lockTx(ctx, tx, a)
			p.lockTx(ctx, tx, b.Shared())
			p.lockTx(ctx, tx, a.Shared())
			p.lockTx(ctx, tx, b.Shared(), a)
			tx = &transaction{}
			h := p.Begin(ctx, p.call(b))
			h.In(tx)
			h.Acquired()
			p.lockTx(h.Context(ctx), tx, b)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProgram(nil)
			run(t.Context(), p)
			p.mustHave(t, 0)
		})
	}
}

func TestCheckerReportsWhatCanDeadlock(t *testing.T) {
	a, b := ascending("a", "b")
	for name, run := range map[string]func(ctx context.Context, p *program){
		"other keys of the classes": func(ctx context.Context, p *program) {
			p.nest(ctx, key2("a", 1), key2("b", 2))
			p.nest(ctx, key2("b", 3), key2("a", 4))
		},
		"nested against the order of calls": func(ctx context.Context, p *program) {
			p.lock(ctx, a, b)
			p.nest(ctx, b, a)
		},
		"what a try was granted": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			inside, _ := p.try(ctx, b)
			p.lock(inside, a)
		},
		"shared on one side": func(ctx context.Context, p *program) {
			p.nest(ctx, a.Shared(), b)
			p.nest(ctx, b, a)
		},
		"with locks in between": func(ctx context.Context, p *program) {
			p.nest(ctx, a, key2("x", 1), b)
			p.nest(ctx, b, key2("y", 1), a)
		},
		"kinds in both orders": func(ctx context.Context, p *program) {
			rows := &program{p.Checker, "row"}
			inside, _ := p.lock(ctx, a)
			rows.lock(inside, a)
			inside, _ = rows.lock(ctx, a)
			p.lock(inside, a)
		},
		"one class in both orders": func(ctx context.Context, p *program) {
			p.nest(ctx, key2("a", 1), key2("a", 2))
			p.nest(ctx, key2("a", 2), key2("a", 1))
		},
		"one class in the order of a long transaction": func(ctx context.Context, p *program) {
			tx := &transaction{}
			for n := range 100 {
				p.lockTx(ctx, tx, key2("a", n))
			}
			p.nest(ctx, key2("a", 99), key2("a", 0))
		},
		"one class after many tries": func(ctx context.Context, p *program) {
			tx := &transaction{}
			for n := range 30 {
				c := p.call(key2("a", n))
				c.Try, c.Tx = true, tx
				take(ctx, p.Checker, c)
			}
			p.lockTx(ctx, tx, key2("a", 30))
			p.nest(ctx, key2("a", 30), key2("a", 0))
		},
		"one class after many that are shared": func(ctx context.Context, p *program) {
			tx := &transaction{}
			for n := range 30 {
				p.lockTx(ctx, tx, key2("a", n).Shared())
			}
			p.lockTx(ctx, tx, key2("a", 30))
			p.nest(ctx, key2("a", 30), key2("a", 0))
		},
		"one class after many rows of one call": func(ctx context.Context, p *program) {
			tx := &transaction{}
			var rows []dblock.Key
			for n := range 30 {
				rows = append(rows, key2("a", n))
			}
			p.lockRows(ctx, tx, rows...)
			p.lockTx(ctx, tx, key2("a", 30))
			p.nest(ctx, key2("a", 30), key2("a", 0))
		},
		"one class in a call with another in between": func(ctx context.Context, p *program) {
			first, between := ascending("a", "b")
			last := key2("a", 0)
			for n := 1; last.ID() <= between.ID(); n++ {
				last = key2("a", n)
			}
			p.lock(ctx, first, between, last)
			p.nest(ctx, last, first)
		},
		"many classes in a long transaction": func(ctx context.Context, p *program) {
			tx := &transaction{}
			for n := range 100 {
				p.lockTx(ctx, tx, key2(fmt.Sprint(n), 1))
			}
			p.nest(ctx, key2("99", 1), key2("50", 1))
		},
		"the same key long before": func(ctx context.Context, p *program) {
			tx := &transaction{}
			for n := range 100 {
				p.lockTx(ctx, tx, key2("a", n))
			}
			p.nest(deadlock.WithTx(ctx, &fakeDB{}, tx), key2("a", 50))
		},
		"one class in a circle": func(ctx context.Context, p *program) {
			for n := range 5 {
				p.nest(ctx, key2("fork", n), key2("fork", (n+1)%5))
			}
		},
		"the same key": func(ctx context.Context, p *program) { p.nest(ctx, a, a) },
		"shared, then exclusive in one transaction": func(ctx context.Context, p *program) {
			tx := &transaction{}
			p.lockTx(ctx, tx, a.Shared())
			p.lockTx(ctx, tx, a)
		},
		"in one transaction": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			tx := &transaction{}
			p.lockTx(ctx, tx, b)
			p.lockTx(context.Background(), tx, a)
		},
		"in a transaction that began with its locks": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			tx := &transaction{}
			h := p.Begin(ctx, p.call(b))
			h.In(tx)
			h.Acquired()
			p.lockTx(ctx, tx, a)
		},
		"in a context of a transaction": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			tx := &transaction{}
			p.lockTx(ctx, tx, b)
			p.nest(deadlock.WithTx(ctx, &fakeDB{}, tx), a)
		},
		"in a transaction of a connection that the context tells of": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			conn := &connection{}
			inside := deadlock.WithTx(ctx, &fakeDB{}, conn)
			p.lockTx(inside, conn, b)
			p.lockTx(inside, conn, a)
		},
		"in a second transaction of a context": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			outer, inner := &transaction{1}, &transaction{2}
			p.lockTx(ctx, outer, b)
			inside := deadlock.WithTx(deadlock.WithTx(ctx, &fakeDB{}, outer), &fakeDB{}, inner)
			p.lockTx(inside, inner, a)
		},
		"what is held after an outer one was given back": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			outer, first := p.lock(ctx, key2("c", 1))
			inner, _ := p.lock(outer, b)
			first.Release()
			p.nest(inner, a)
		},
		"in the context of a lock whose transaction took another": func(ctx context.Context, p *program) {
			p.nest(ctx, a, b)
			tx := &transaction{}
			h := p.Begin(ctx, p.call(key2("c", 1)))
			h.In(tx)
			h.Acquired()
			p.lockTx(ctx, tx, b)
			p.lock(h.Context(ctx), a)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProgram(nil)
			run(t.Context(), p)
			t.Logf("%s", p.mustHave(t, 1)[0])
		})
	}
}

func TestCheckerOptions(t *testing.T) {
	a, b := key2("a", 1), key2("b", 1)
	both := func(p *program) {
		p.nest(t.Context(), a, b)
		p.nest(t.Context(), b, a)
	}
	p := newProgram(&deadlock.CheckerOptions{Ignore: [][2]string{{"b", "a"}}})
	both(p)
	p.mustHave(t, 0)

	// What is ignored is not taken for known either.
	o := &deadlock.CheckerOptions{}
	for n := range 20 {
		o.Ignore = append(o.Ignore, [2]string{"a", fmt.Sprint(n)})
	}
	p = newProgram(o)
	tx := &transaction{}
	p.lockTx(t.Context(), tx, a)
	for n := range 20 {
		p.lockTx(t.Context(), tx, key2(fmt.Sprint(n), 1))
	}
	p.lockTx(t.Context(), tx, b)
	p.nest(t.Context(), b, a)
	p.mustHave(t, 1)

	p = newProgram(&deadlock.CheckerOptions{Nested: true})
	p.nest(t.Context(), key2("a", 1), key2("a", 2))
	p.mustHave(t, 1)

	// That of the first parts would be an inversion of classes.
	p = newProgram(&deadlock.CheckerOptions{ClassOf: func(k dblock.Key) string { return k.String() }})
	p.nest(t.Context(), key2("a", 1), key2("b", 1))
	p.nest(t.Context(), key2("b", 2), key2("a", 2))
	p.mustHave(t, 0)
	both(p)
	p.mustHave(t, 1)

	p = newProgram(nil)
	p.nest(t.Context(), dblock.RawKey(1), dblock.RawKey(2))
	p.nest(t.Context(), dblock.RawKey(2), dblock.RawKey(1))
	p.mustHave(t, 1)
}

type failures []string

func (*failures) Helper() {}

func (f *failures) Errorf(format string, args ...any) { *f = append(*f, fmt.Sprintf(format, args...)) }

func TestCheckerReport(t *testing.T) {
	var f failures
	p := newProgram(nil)
	p.Report(&f)
	if len(f) != 0 {
		t.Errorf("%q", f)
	}
	p.nest(t.Context(), key2("a", 1), key2("b", 1))
	p.nest(t.Context(), key2("b", 1), key2("a", 1))
	p.Report(&f)
	if len(f) != 1 || !strings.Contains(f[0], "inversion") {
		t.Errorf("%q", f)
	}
}

func TestNilCheckerCostsNothing(t *testing.T) {
	var c *deadlock.Checker
	p := newProgram(nil)
	call := p.call(key2("a", 1))
	ctx := t.Context()
	if n := testing.AllocsPerRun(100, func() {
		inside, h := take(ctx, c, call)
		h.In(nil)
		h.Release()
		if inside != ctx {
			t.Error("another context")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if c.Inversions() != nil {
		t.Error("inversions of nothing")
	}
	c.Report(t)
}

func BenchmarkChecker(b *testing.B) {
	p := newProgram(nil)
	outer, inner := p.call(key2("a", 1)), p.call(key2("b", 1))
	for name, c := range map[string]*deadlock.Checker{"nil": nil, "on": p.Checker} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ctx, first := take(b.Context(), c, outer)
				_, second := take(ctx, c, inner)
				second.Release()
				first.Release()
			}
		})
	}
}

// A transaction that locks 1,000 keys in as many calls, again and again.
func BenchmarkCheckerInTransaction(b *testing.B) {
	const locks = 1000
	for name, classes := range map[string]int{"one class": 1, "20 classes": 20, "1000 classes": locks} {
		b.Run(name, func(b *testing.B) {
			p := newProgram(nil)
			calls := make([]deadlock.Call, locks)
			for n := range calls {
				calls[n] = p.call(key2(fmt.Sprint("class", n*classes/locks), n))
			}
			b.ReportAllocs()
			for b.Loop() {
				tx := &transaction{}
				for _, call := range calls {
					call.Tx = tx
					take(b.Context(), p.Checker, call)
				}
			}
			p.mustHave(b, 0)
		})
	}
}

func TestCheckerIsSafeForConcurrentUse(t *testing.T) {
	p := newProgram(&deadlock.CheckerOptions{OnInversion: func(deadlock.Inversion) {}})
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for n := range 200 {
				p.nest(t.Context(), key2("a", n%7), key2("b", g), key2("a", n%7+1))
				tx := &transaction{n}
				p.lockTx(t.Context(), tx, key2("c", n))
				p.lockTx(t.Context(), tx, key2("a", n))
				p.Inversions()
			}
		})
	}
	all.Wait()
	if len(p.Inversions()) == 0 {
		t.Error("the inversion of a and b was not found")
	}
}
