package rowlock_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/rowlock"
)

// keys of the tests, out of the order of their ids on purpose.
func someKeys(t *testing.T) []dblock.Key {
	keys := []dblock.Key{dblock.NewKey("account", "1"), dblock.NewKey("account", "2"), dblock.RawKey(7)}
	slices.SortFunc(keys, func(a, b dblock.Key) int {
		if a.ID() > b.ID() {
			return -1
		}
		return 1
	})
	return keys
}

func TestRowsAreLockedInTheOrderOfTheirIDs(t *testing.T) {
	db := &fakeDB{}
	keys := someKeys(t)
	rows := rowlock.New(db, &rowlock.Options{Schema: "app", Table: "my_locks"})
	if err := rows.Lock(t.Context(), &fakeTx{db: db}, append(keys, keys[0])...); err != nil {
		t.Fatal(err)
	}
	r := db.requests[0]
	if r.Table != (dialect.Table{Schema: "app", Name: "my_locks"}) || r.Try || r.Fence {
		t.Errorf("request %+v", r)
	}
	if len(r.Keys) != len(keys) {
		t.Fatalf("%d keys, want %d without duplicates", len(r.Keys), len(keys))
	}
	for i, k := range r.Keys[1:] {
		if r.Keys[i].ID >= k.ID {
			t.Errorf("id %d before %d", r.Keys[i].ID, k.ID)
		}
	}
}

func TestFencesComeInTheOrderOfTheCall(t *testing.T) {
	db := &fakeDB{}
	keys := someKeys(t) // from the largest id to the smallest
	fences, err := rowlock.New(db).Fence(t.Context(), &fakeTx{db: db}, append(keys, keys[0])...)
	if err != nil {
		t.Fatal(err)
	}
	if want := []int64{3, 2, 1, 3}; !slices.Equal(fences, want) {
		t.Errorf("%v, want %v", fences, want)
	}
}

// A transaction that was committed must not be started again.
func TestErrorOfAnEndedTransactionGivesNoWrongAdvice(t *testing.T) {
	db := &fakeDB{lockRows: func(context.Context, dialect.Tx, dialect.RowRequest) ([]int64, error) {
		return nil, &dialect.Error{Class: dialect.Closed, Remains: dialect.RemainsNothing, Err: sql.ErrTxDone}
	}}
	err := rowlock.New(db).Lock(t.Context(), &fakeTx{db: db}, dblock.NewKey("account", "1"))
	if !errors.Is(err, dblock.ErrClosed) || strings.Contains(err.Error(), "start it again") || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("%v", err)
	}
}

func TestErrorSaysWhatIsLeftOfTheTransaction(t *testing.T) {
	for remains, text := range map[dialect.Remains]string{
		dialect.RemainsUsable:  "the transaction goes on without these keys",
		dialect.RemainsAborted: "the transaction accepts only a rollback",
		dialect.RemainsNothing: "the server has rolled back the transaction",
		dialect.RemainsUnknown: "roll back the transaction",
	} {
		db := &fakeDB{lockRows: func(_ context.Context, _ dialect.Tx, r dialect.RowRequest) ([]int64, error) {
			if !r.Try {
				t.Error("a try that waits")
			}
			return nil, &dialect.Error{Class: dialect.NotAcquired, Code: "55P03", Remains: remains, Err: driverError{dialect.NotAcquired}}
		}}
		err := rowlock.New(db).TryLock(t.Context(), &fakeTx{db: db}, dblock.NewKey("account", "1"))
		if !errors.Is(err, dblock.ErrNotAcquired) || !errors.Is(err, driverError{dialect.NotAcquired}) {
			t.Errorf("%v does not match both the class and the driver's error", err)
		}
		if !strings.HasSuffix(err.Error(), text) && !strings.Contains(err.Error(), "; "+text) {
			t.Errorf("%q does not say %q", err, text)
		}
		if !strings.Contains(err.Error(), "try account/1 on fake") {
			t.Errorf("%q does not name the call", err)
		}
		if got := deadlock.Remains(db, err); got != remains {
			t.Errorf("Remains(%v) = %d, want %d", err, got, remains)
		}
	}
}

func TestNewRefusesBadArgumentsWithTheFirstCall(t *testing.T) {
	db := &fakeDB{}
	for name, rows := range map[string]*rowlock.Locker{
		"db is nil":      rowlock.New(nil),
		"2 Options":      rowlock.New(db, nil, nil),
		"Isolation is 8": rowlock.New(db, &rowlock.Options{Isolation: sql.LevelLinearizable + 1}),
		"Attempts is -1": rowlock.New(db, &rowlock.Options{Retry: &deadlock.RetryOptions{Attempts: -1}}),
	} {
		key := dblock.NewKey("k")
		_, fenceErr := rows.Fence(t.Context(), &fakeTx{db: db}, key)
		for _, err := range []error{
			rows.Lock(t.Context(), &fakeTx{db: db}, key),
			rows.TryLock(t.Context(), &fakeTx{db: db}, key),
			fenceErr,
			rowlock.InTx(t.Context(), rows, func(context.Context, dblock.Tx) error { return nil }, key),
		} {
			if !errors.Is(err, dblock.ErrInvalidOption) {
				t.Errorf("%s: %v", name, err)
			} else if !strings.Contains(err.Error(), name) {
				t.Errorf("%q does not say %q", err, name)
			}
		}
	}
	if db.begun != 0 || db.requests != nil {
		t.Error("the database was asked all the same")
	}
	if err := rowlock.New(db, nil).Lock(t.Context(), &fakeTx{db: db}, dblock.NewKey("k")); err != nil {
		t.Errorf("nil options: %v", err)
	}
}

func TestBadKeysAndTransactionsNeverReachTheDatabase(t *testing.T) {
	db := &fakeDB{}
	rows := rowlock.New(db)
	good := dblock.NewKey("k")
	for _, test := range []struct {
		name string
		tx   dblock.Tx
		keys []dblock.Key
		want error
	}{
		{"no keys", &fakeTx{db: db}, nil, dblock.ErrInvalidKey},
		{"empty key", &fakeTx{db: db}, []dblock.Key{good, {}}, dblock.ErrInvalidKey},
		{"nil transaction", nil, []dblock.Key{good}, dblock.ErrUnsupported},
		{"typed nil transaction", (*sql.Tx)(nil), []dblock.Key{good}, dblock.ErrUnsupported},
		{"typed nil connection", (*sql.Conn)(nil), []dblock.Key{good}, dblock.ErrUnsupported},
		{"a pool", new(sql.DB), []dblock.Key{good}, dblock.ErrUnsupported},
	} {
		if err := rows.Lock(t.Context(), test.tx, test.keys...); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		} else if strings.Contains(err.Error(), "roll") && !strings.Contains(err.Error(), "rowlock") {
			t.Errorf("%s: %q asks for a rollback of a transaction that was not touched", test.name, err)
		}
	}
	if db.requests != nil {
		t.Error("the database was asked all the same")
	}
}

func TestObserverHearsOfTheGrant(t *testing.T) {
	db := &fakeDB{}
	var events []dblock.EventKind
	rows := rowlock.New(db, &rowlock.Options{Observer: dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		if e.Dialect != "fake" || len(e.Keys) != 1 {
			t.Errorf("event %+v", e)
		}
		events = append(events, e.Kind)
	})})
	key := dblock.NewKey("k")
	if err := rows.Lock(t.Context(), &fakeTx{db: db}, key); err != nil {
		t.Fatal(err)
	}
	if err := rowlock.InTx(t.Context(), rows, func(context.Context, dblock.Tx) error { return nil }, key); err != nil {
		t.Fatal(err)
	}
	want := []dblock.EventKind{dblock.EventAcquired, dblock.EventAcquired, dblock.EventReleased}
	if !slices.Equal(events, want) {
		t.Errorf("%v, want %v", events, want)
	}
}

func TestCheckerTellsLockTablesApart(t *testing.T) {
	key := dblock.NewKey("a")
	for _, test := range []struct {
		outer, inner rowlock.Options
		inversions   int
	}{
		{rowlock.Options{}, rowlock.Options{Table: "others"}, 0},
		{rowlock.Options{}, rowlock.Options{Schema: "s"}, 0},
		{rowlock.Options{Table: "others"}, rowlock.Options{Table: "others"}, 1},
		{rowlock.Options{}, rowlock.Options{Table: "locks"}, 1},
	} {
		checker := deadlock.NewChecker(nil)
		test.outer.Checker, test.inner.Checker = checker, checker
		db := &fakeDB{}
		err := rowlock.InTx(t.Context(), rowlock.New(db, &test.outer), func(ctx context.Context, _ dblock.Tx) error {
			return rowlock.InTx(ctx, rowlock.New(db, &test.inner), func(context.Context, dblock.Tx) error { return nil }, key)
		}, key)
		if err != nil {
			t.Fatal(err)
		}
		if found := checker.Inversions(); len(found) != test.inversions {
			t.Errorf("%d inversions, want %d: %v", len(found), test.inversions, found)
		}
	}
}
