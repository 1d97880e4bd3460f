package tests

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// orderOnly is a database of which only the features matter.
type orderOnly struct {
	dblock.DB
	features dialect.Features
}

func (o orderOnly) Name() string               { return "any" }
func (o orderOnly) Features() dialect.Features { return o.features }

func keys() *rapid.Generator[[]dblock.Key] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) dblock.Key {
		k := dblock.RawKey(rapid.Int64Range(-3, 3).Draw(t, "raw"))
		if rapid.Bool().Draw(t, "named") {
			k = dblock.NewKey(rapid.SliceOfN(rapid.StringN(1, 3, -1), 1, 3).Draw(t, "parts")...)
		}
		if rapid.Bool().Draw(t, "shared") {
			k = k.Shared()
		}
		return k
	}), 1, 20)
}

func TestOrderIsThatOfWhatIsLocked(t *testing.T) {
	for name, byName := range map[string]bool{"by id": false, "by name": true} {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				db := orderOnly{features: dialect.Features{Shared: true, ByName: byName, Scope: rapid.String().Draw(t, "scope")}}
				call := keys().Draw(t, "keys")
				ordered, err := deadlock.Order(db, call...)
				if err != nil {
					t.Fatal(err)
				}
				locked := func(k dialect.Key) (int64, string) {
					if byName {
						return 0, k.Name
					}
					return k.ID, ""
				}
				for i := 1; i < len(ordered); i++ {
					id, name := locked(ordered[i-1])
					nextID, nextName := locked(ordered[i])
					if id > nextID || name > nextName || (id == nextID && name == nextName) {
						t.Fatalf("%+v stands before %+v", ordered[i-1], ordered[i])
					}
				}
				// Every key of the call is covered, exclusively if it asked for that.
				for _, k := range call {
					id, name := locked(k.Resolve(db.features.Scope))
					i := slices.IndexFunc(ordered, func(o dialect.Key) bool {
						oid, oname := locked(o)
						return oid == id && oname == name
					})
					if i < 0 || (k.Mode() == dblock.Exclusive && ordered[i].Mode != dblock.Exclusive) {
						t.Fatalf("%v is not covered by %+v", k, ordered)
					}
				}
				// The order of the call does not matter.
				again, err := deadlock.Order(db, rapid.Permutation(call).Draw(t, "permutation")...)
				if err != nil {
					t.Fatal(err)
				}
				same := slices.EqualFunc(ordered, again, func(a, b dialect.Key) bool {
					aID, aName := locked(a)
					bID, bName := locked(b)
					return aID == bID && aName == bName && a.Mode == b.Mode
				})
				if !same {
					t.Fatalf("%+v, in another order %+v", ordered, again)
				}
			})
		})
	}
}

func TestKeysAreEqualIfTheirPartsAre(t *testing.T) {
	parts := rapid.SliceOfN(rapid.StringN(0, 4, -1), 1, 4)
	rapid.Check(t, func(t *rapid.T) {
		a, b := parts.Draw(t, "a"), parts.Draw(t, "b")
		if rapid.Bool().Draw(t, "same") {
			b = slices.Clone(a)
		}
		ka, kb := dblock.NewKey(a...), dblock.NewKey(b...)
		if !ka.Valid() || !kb.Valid() {
			t.Skip("a key without a byte")
		}
		if slices.Equal(a, b) != (ka == kb) || (ka == kb) != (ka.ID() == kb.ID()) {
			t.Fatalf("%q is %d, %q is %d, equal %v", a, ka.ID(), b, kb.ID(), ka == kb)
		}
	})
}
