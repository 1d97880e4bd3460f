package deadlock

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

// Order turns the keys of one call into the advisory locks that the database
// takes for them, in the one global order in which every call takes them, so
// that calls for several keys cannot deadlock each other. Keys that stand for
// the same lock, even by a collision of hashes, are merged; the exclusive mode
// wins. Names are computed only where the database locks by name. It is the order of
// package advisory, exported for code that locks by itself.
//
// Errors: [dblock.ErrInvalidKey], and [dblock.ErrUnsupported] for shared keys
// where the database has no shared mode.
func Order(db dblock.DB, keys ...dblock.Key) ([]dialect.Key, error) {
	if dialect.IsNil(db) {
		return nil, dialect.Invalidf("the database is nil")
	}
	features := db.Features()
	if features.ByName {
		return order(db, keys, features.Shared, func(k dblock.Key) dialect.Key { return k.Resolve(features.Scope) }, byName)
	}
	return order(db, keys, features.Shared, dblock.Key.ResolveID, byID)
}

// OrderRows is [Order] for the rows of a lock table, which are locked by the key's id
// and can be shared on every database.
func OrderRows(db dblock.DB, keys ...dblock.Key) ([]dialect.Key, error) {
	if dialect.IsNil(db) {
		return nil, dialect.Invalidf("the database is nil")
	}
	return order(db, keys, true, func(k dblock.Key) dialect.Key { return k.Resolve("") }, byID)
}

func byID(a, b dialect.Key) int   { return cmp.Compare(a.ID, b.ID) }
func byName(a, b dialect.Key) int { return strings.Compare(a.Name, b.Name) }

func order(db dblock.DB, keys []dblock.Key, shared bool, resolve func(dblock.Key) dialect.Key, byLock func(a, b dialect.Key) int) ([]dialect.Key, error) {
	switch {
	case len(keys) == 0:
		return nil, &dialect.Error{Class: dblock.ErrInvalidKey, Hint: "name at least one key"}
	case len(keys) > dblock.MaxKeys:
		return nil, &dialect.Error{Class: dblock.ErrInvalidKey,
			Hint: fmt.Sprintf("%d keys in one call, at most %d: lock something coarser", len(keys), dblock.MaxKeys)}
	}
	ordered := make([]dialect.Key, len(keys))
	for i, k := range keys {
		if !k.Valid() {
			return nil, &dialect.Error{Class: dblock.ErrInvalidKey,
				Hint: fmt.Sprintf("key %d of %d is empty", i+1, len(keys))}
		}
		if k.Mode() == dblock.Shared && !shared {
			return nil, &dialect.Error{Class: dblock.ErrUnsupported,
				Hint: fmt.Sprintf("no shared mode on %s for key %s: lock it exclusively", db.Name(), k)}
		}
		ordered[i] = resolve(k)
	}
	if len(ordered) == 1 {
		return ordered, nil
	}
	slices.SortFunc(ordered, func(a, b dialect.Key) int {
		if order := byLock(a, b); order != 0 {
			return order
		}
		return cmp.Compare(a.Mode, b.Mode)
	})
	return slices.CompactFunc(ordered, func(a, b dialect.Key) bool { return byLock(a, b) == 0 }), nil
}
