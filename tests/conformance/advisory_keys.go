package conformance

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
)

// awkward are keys that servers are known to merge, cut or refuse.
func awkward() []dblock.Key {
	keys := []dblock.Key{
		dblock.NewKey("a", "bc"), dblock.NewKey("ab", "c"), dblock.NewKey("a/bc"), dblock.NewKey("abc"),
		dblock.NewKey("Key"), dblock.NewKey("key"), dblock.NewKey("ké"), dblock.NewKey("ke"), dblock.NewKey("kE"),
		dblock.NewKey("key "), dblock.NewKey(" key"), dblock.NewKey("ß"), dblock.NewKey("ss"),
		dblock.NewKey("a\x00b"), dblock.NewKey("a\x00c"), dblock.NewKey("a"),
		dblock.NewKey("🔒"), dblock.NewKey("🔑"), dblock.NewKey("\xff"), dblock.NewKey("'; --"), dblock.NewKey("%s"),
		dblock.NewKey("", "a"), dblock.NewKey("a", ""),
		dblock.NewKey("hash-d\x9d\xb6\xe8\x90\xff\xd0\x8b"), // id 0
		dblock.RawKey(1), dblock.RawKey(math.MinInt64), dblock.RawKey(math.MaxInt64), dblock.RawKey(1 << 32),
		dblock.NewKey(strings.Repeat("ü", 64)), dblock.NewKey(strings.Repeat("ü", 65)),
	}
	for _, n := range []int{63, 64, 65, 192, 255, 256, 300} {
		keys = append(keys, dblock.NewKey(strings.Repeat("x", n)), dblock.NewKey(strings.Repeat("x", n-1)+"y"))
	}
	return keys
}

func advisoryDistinct(t *testing.T, h *Harness) {
	d := h.Database(t)
	mine, others := newLocker(t, d.DB), newLocker(t, d.Open(t))
	keys := awkward()
	for i, k := range keys {
		lock := mustLock(t, mine, k)
		mustBeHeld(t, others, k)
		rest := append(append([]dblock.Key{}, keys[:i]...), keys[i+1:]...)
		mustBeFree(t, others, rest...)
		mustRelease(t, lock)
	}
	d.nothingLeft(t)
}

func advisoryEmptyKey(t *testing.T, h *Harness) {
	l := newLocker(t, h.Database(t).DB)
	tooMany := make([]dblock.Key, dblock.MaxKeys+1)
	for i := range tooMany {
		tooMany[i] = dblock.RawKey(int64(i))
	}
	for what, keys := range map[string][]dblock.Key{
		"no key": nil, "the zero key": {{}}, "an empty part": {dblock.NewKey("")},
		"an empty key among others": {dblock.NewKey("a"), dblock.NewKey("", "")}, "too many": tooMany,
	} {
		if _, err := l.Lock(testContext(t), keys...); !errors.Is(err, dblock.ErrInvalidKey) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := l.TryLock(testContext(t), keys...); !errors.Is(err, dblock.ErrInvalidKey) {
			t.Errorf("%s, try: %v", what, err)
		}
		if err := l.Do(testContext(t), func(context.Context) error { t.Error("ran"); return nil }, keys...); !errors.Is(err, dblock.ErrInvalidKey) {
			t.Errorf("%s, do: %v", what, err)
		}
	}
}

func advisoryScope(t *testing.T, h *Harness) {
	here, there := h.Database(t), h.Database(t)
	key := dblock.NewKey("job")
	lock := mustLock(t, newLocker(t, here.DB), key)
	defer mustRelease(t, lock)
	mustBeFree(t, newLocker(t, there.DB), key)
	mustBeHeld(t, newLocker(t, here.Open(t)), key)
}
