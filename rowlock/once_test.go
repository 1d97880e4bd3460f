package rowlock_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// fakeMarks is a database whose transactions find some ids marked.
type fakeMarks struct {
	fakeDB
	done   []int64
	fail   []error // of the next calls
	marked []dialect.MarkRequest
}

func (db *fakeMarks) MarkRows(_ context.Context, _ dialect.Tx, r dialect.MarkRequest) ([]bool, error) {
	db.marked = append(db.marked, r)
	if len(db.fail) > 0 {
		err := db.fail[0]
		db.fail = db.fail[1:]
		return nil, err
	}
	first := make([]bool, len(r.Keys))
	for i, key := range r.Keys {
		first[i] = !slices.Contains(db.done, key.ID)
	}
	return first, nil
}

func TestMarksAreSortedAndAnsweredInTheOrderOfTheCall(t *testing.T) {
	var messages []dblock.Key
	for _, id := range []string{"d", "a", "c", "b", "a", "d"} {
		messages = append(messages, dblock.NewKey("message", id))
	}
	db := &fakeMarks{done: []int64{messages[2].ResolveDigest().ID}}
	first, err := rowlock.NewOnce(db).MarkEach(t.Context(), &fakeTx{db: &db.fakeDB}, messages...)
	if want := []bool{true, true, false, true, false, false}; err != nil || !slices.Equal(first, want) {
		t.Errorf("%v, %v, want %v", first, err, want)
	}
	r := db.marked[0]
	if r.Table.Name != "once" || len(r.Keys) != 4 || !slices.IsSortedFunc(r.Keys, func(a, b dialect.Key) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	}) {
		t.Errorf("asked for %+v", r)
	}
}

func TestDoOnceEndsItsTransaction(t *testing.T) {
	message := dblock.NewKey("message", "1")
	unwanted := errors.New("unwanted")
	deadlocked := driverError{dialect.Deadlock}
	for name, test := range map[string]struct {
		done                       bool
		fail                       []error
		of                         error
		first                      bool
		ran, committed, rolledBack int
	}{
		"first":                  {first: true, ran: 1, committed: 1},
		"done before":            {done: true, committed: 1},
		"the function fails":     {of: unwanted, ran: 1, rolledBack: 1},
		"a deadlock starts anew": {fail: []error{deadlocked, deadlocked}, first: true, ran: 1, committed: 1, rolledBack: 2},
	} {
		t.Run(name, func(t *testing.T) {
			db := &fakeMarks{fail: test.fail}
			if test.done {
				db.done = []int64{message.ResolveDigest().ID}
			}
			ran := 0
			first, err := rowlock.DoOnce(t.Context(), rowlock.NewOnce(db), func(context.Context, dblock.Tx) error {
				ran++
				return test.of
			}, message)
			if first != test.first || err != test.of || ran != test.ran {
				t.Errorf("%t, %v, the function ran %d times", first, err, ran)
			}
			if err := db.check(test.committed, test.rolledBack); err != nil {
				t.Error(err)
			}
		})
	}
}

// A commit that fails is no success, and a second attempt that finds the work done
// does not claim it.
func TestDoOnceClaimsOnlyWhatItCommitted(t *testing.T) {
	message := dblock.NewKey("message", "1")
	db := &fakeMarks{}
	db.commit = func(context.Context) error {
		if len(db.done) > 0 {
			return nil
		}
		db.done = []int64{message.ResolveDigest().ID} // somebody else's
		return driverError{dialect.Serialization}
	}
	first, err := rowlock.DoOnce(t.Context(), rowlock.NewOnce(db), func(context.Context, dblock.Tx) error { return nil }, message)
	if first || err != nil {
		t.Errorf("%t, %v", first, err)
	}
	db.commit = func(context.Context) error { return driverError{dialect.Lost} }
	db.done = nil
	first, err = rowlock.DoOnce(t.Context(), rowlock.NewOnce(db), func(context.Context, dblock.Tx) error { return nil }, message)
	if first || !errors.Is(err, dblock.ErrLost) {
		t.Errorf("%t, %v", first, err)
	}
}

func TestOnceMistakes(t *testing.T) {
	ctx, message := t.Context(), dblock.NewKey("message")
	nothing := func(context.Context, dblock.Tx) error { return nil }
	do := func(o *rowlock.Once, fn func(context.Context, dblock.Tx) error) error {
		_, err := rowlock.DoOnce(ctx, o, fn, message)
		return err
	}
	once := rowlock.NewOnce(&fakeMarks{})
	_, cleanErr := rowlock.NewOnce(nil).Clean(ctx)
	for name, err := range map[string]error{
		"no db":       do(rowlock.NewOnce(nil), nothing),
		"two options": do(rowlock.NewOnce(&fakeMarks{}, nil, nil), nothing),
		"isolation":   do(rowlock.NewOnce(&fakeMarks{}, &rowlock.OnceOptions{Isolation: -1}), nothing),
		"no Once":     do(nil, nothing),
		"no function": do(once, nil),
		"clean":       cleanErr,
	} {
		if !errors.Is(err, dblock.ErrInvalidOption) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
