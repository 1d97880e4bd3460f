package sqlserver

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

var (
	keyA = dialect.Key{ID: 7, Name: "a#0000000000000007", Label: "a"}
	keyB = dialect.Key{ID: -8, Name: "b#fffffffffffffff8", Label: "b", Mode: dialect.Shared}
	keys = []dialect.Key{keyA, keyB}
)

func openDB(t *testing.T, script ...answer) (*stub, *DB) {
	t.Helper()
	s, db := newStub(t, script...)
	return s, newDB(db)
}

func openSession(t *testing.T, script ...answer) (*stub, dialect.Session) {
	t.Helper()
	s, d := openDB(t, script...)
	session, err := d.OpenSession(t.Context(), dialect.SessionOptions{Application: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { session.Close() })
	return s, session
}

// wantError checks the class, the code and, if it is given, what remains.
func wantError(t *testing.T, err error, class dialect.Class, code string, remains ...dialect.Remains) {
	t.Helper()
	if dialect.ClassOf(err) != class || !errors.Is(err, class) {
		t.Fatalf("got %v, want class %q", err, class)
	}
	var e *dialect.Error
	errors.As(err, &e)
	if e.Code != code {
		t.Errorf("%v has code %q, want %q", err, e.Code, code)
	}
	if len(remains) > 0 && e.Remains != remains[0] {
		t.Errorf("%v leaves %d of the transaction, want %d", err, e.Remains, remains[0])
	}
}

// Every return code of sp_getapplock is an outcome of its own, and none of them
// but 0 and 1 is a success. A timeout is no error of the driver.
func TestReturnCodes(t *testing.T) {
	for _, c := range []struct {
		status  int
		try     bool
		class   dialect.Class
		code    string
		remains dialect.Remains
	}{
		{status: 0},
		{status: 1},
		{0, true, "", "", 0},
		{-1, false, dialect.Timeout, "-1", dialect.RemainsUsable},
		{-1, true, dialect.NotAcquired, "-1", dialect.RemainsUsable},
		{-2, false, dialect.Canceled, "-2", dialect.RemainsUnknown},
		{-3, false, dialect.Deadlock, "-3", dialect.RemainsUsable}, // the transaction is kept
		{-999, false, dialect.Setup, "-999", dialect.RemainsUnknown},
		{2, false, dialect.Setup, "2", dialect.RemainsUnknown},
		{-4, true, dialect.Setup, "-4", dialect.RemainsUnknown},
	} {
		granted := 0
		if c.class == "" {
			granted = 1
		}
		one := []dialect.Key{keyA}

		_, session := openSession(t, status(c.status, granted))
		_, err := session.Acquire(t.Context(), dialect.Request{Keys: one, Try: c.try})
		if c.class == "" && err != nil {
			t.Errorf("session, code %d: %v", c.status, err)
		} else if c.class != "" {
			wantError(t, err, c.class, c.code)
			if !strings.Contains(err.Error(), "of a returned") {
				t.Errorf("%q does not name the key", err)
			}
		}

		_, d := openDB(t, status(c.status, granted))
		tx, err := d.Begin(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		err = d.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: one, Try: c.try})
		if c.class == "" && err != nil {
			t.Errorf("transaction, code %d: %v", c.status, err)
		} else if c.class != "" {
			wantError(t, err, c.class, c.code, c.remains)
		}
		tx.Rollback(t.Context())
	}
}

// A call that fails on the server never counts as granted, whatever the output
// parameters were before.
func TestAcquireErrorIsNoGrant(t *testing.T) {
	for number, class := range map[int32]dialect.Class{
		1227: dialect.InvalidOption, // a timeout below -1
		1224: dialect.InvalidKey,    // NULL as the resource
		1202: dialect.Setup,         // an unknown principal
		1230: dialect.Setup,         // NULL as the principal
		229:  dialect.Denied,
	} {
		_, session := openSession(t, answer{err: serverError(number)}, released(0))
		if _, err := session.Acquire(t.Context(), dialect.Request{Keys: keys}); dialect.ClassOf(err) != class {
			t.Errorf("error %d gave %v, want class %q", number, err, class)
		}
	}
	if !strings.Contains(acquireBatch, "SELECT @status = -999") {
		t.Error("the batch does not preset the return code")
	}
}

// Owner, principal and timeout are never left to defaults: @LockOwner would be
// Transaction, @LockTimeout the connection's setting.
func TestAcquireIsExplicit(t *testing.T) {
	for _, want := range []string{"sys.sp_getapplock", "@Resource = @name", "@LockMode = @mode", "@LockOwner = @owner", "@LockTimeout = @left", "@DbPrincipal = 'public'"} {
		if !strings.Contains(acquireBatch, want) {
			t.Errorf("the batch lacks %q", want)
		}
	}
	for _, want := range []string{"sys.sp_releaseapplock", "@LockOwner = @owner", "@DbPrincipal = 'public'"} {
		if !strings.Contains(releaseBatch, want) {
			t.Errorf("the release lacks %q", want)
		}
	}
	for _, c := range []struct {
		try  bool
		wait int32
	}{{false, -1}, {true, 0}} {
		stub, session := openSession(t, status(0, 2))
		if _, err := session.Acquire(t.Context(), dialect.Request{Keys: keys, Try: c.try}); err != nil {
			t.Fatal(err)
		}
		args := stub.sent("sp_getapplock")[0].args
		if args["owner"] != "Session" || args["wait"] != c.wait || args["count"] != int32(2) || args["modes"] != "XS" {
			t.Errorf("sent %v", args)
		}
		names := args["names"].(string)
		if len(names) != 2*nameSlot || strings.Fields(names)[0] != keyA.Name || strings.TrimRight(names[nameSlot:], " ") != keyB.Name {
			t.Errorf("sent names %q", names)
		}
	}
}

func TestNameThatWouldBeCutOff(t *testing.T) {
	_, session := openSession(t)
	for _, name := range []string{"", strings.Repeat("x", 65), "a b", "a "} {
		_, err := session.Acquire(t.Context(), dialect.Request{Keys: []dialect.Key{{Name: name}}})
		wantError(t, err, dialect.InvalidKey, "")
	}
}

// All or nothing: what a failed call was granted goes back with the same owner,
// and only then is the error NotAcquired.
func TestFailedTryGivesBack(t *testing.T) {
	stub, session := openSession(t, status(-1, 1), released(0))
	_, err := session.Acquire(t.Context(), dialect.Request{Keys: keys, Try: true})
	wantError(t, err, dialect.NotAcquired, "-1")
	if !strings.Contains(err.Error(), "of b returned") {
		t.Errorf("%q does not name the key that was busy", err)
	}
	back := stub.sent("sp_releaseapplock")[0].args
	if back["count"] != int32(1) || strings.TrimSpace(back["names"].(string)) != keyA.Name || back["owner"] != "Session" {
		t.Errorf("gave back %v", back)
	}

	_, session = openSession(t, status(-1, 1), answer{err: serverError(1223)})
	_, err = session.Acquire(t.Context(), dialect.Request{Keys: keys, Try: true})
	wantError(t, err, dialect.NotHeld, "1223")
}

// The owner's context may be over when a failed call has to give keys back.
func TestGivesBackAfterCancel(t *testing.T) {
	stub, d := openDB(t, status(-3, 1), released(0))
	conn, err := d.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	locks := appLocks{on: conn, owner: ownedByTransaction}
	g, err := locks.acquire(t.Context(), packed{}, -1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := locks.undo(ctx, keys[:g.granted]); err != nil {
		t.Fatal(err)
	}
	if back := stub.sent("sp_releaseapplock"); len(back) != 1 || back[0].args["owner"] != "Transaction" {
		t.Errorf("gave back %v", back)
	}
}

// The driver reports error 1223 although the return code is -999 as well.
func TestRelease(t *testing.T) {
	_, session := openSession(t, released(0), answer{err: serverError(1223)}, released(-999),
		answer{outs: map[string]any{"status": 0, "session": 99}})
	if err := session.Release(t.Context(), keys); err != nil {
		t.Error(err)
	}
	wantError(t, session.Release(t.Context(), keys), dialect.NotHeld, "1223")
	wantError(t, session.Release(t.Context(), keys), dialect.Setup, "-999")
	wantError(t, session.Release(t.Context(), keys), dialect.Unsafe, "")
}

func TestAnotherSessionAnswers(t *testing.T) {
	_, session := openSession(t, answer{outs: map[string]any{"status": 0, "granted": 2, "session": 99}},
		answer{outs: map[string]any{"held": "11", "session": 99}}, answer{outs: map[string]any{"done": "11", "session": 99}})
	_, err := session.Acquire(t.Context(), dialect.Request{Keys: keys})
	wantError(t, err, dialect.Unsafe, "")
	_, err = session.Held(t.Context(), keys)
	wantError(t, err, dialect.Unsafe, "")
	_, _, err = session.Exchange(time.Now().Add(time.Minute), keys, nil)
	wantError(t, err, dialect.Unsafe, "")
}

func TestHeldAnswersForEachKey(t *testing.T) {
	stub, session := openSession(t, answer{outs: map[string]any{"held": "10"}}, answer{outs: map[string]any{"held": "1"}})
	if held, err := session.Held(t.Context(), keys); err != nil || !slices.Equal(held, []bool{true, false}) {
		t.Errorf("got %t, %v", held, err)
	}
	sent := stub.sent("APPLOCK_MODE('public', @name, @owner)")
	if len(sent) != 1 || sent[0].args["owner"] != "Session" || sent[0].args["modes"] != "XS" {
		t.Errorf("sent %v", sent)
	}
	if held, err := session.Held(t.Context(), keys); err == nil {
		t.Errorf("one answer for two keys: %t", held)
	}
}

func TestExchangeAnswersForEachKey(t *testing.T) {
	keyC := dialect.Key{ID: 9, Name: "c#0000000000000009", Label: "c"}
	stub, session := openSession(t, answer{outs: map[string]any{"done": "101", "status": -1}})
	granted, released, err := session.Exchange(time.Now().Add(time.Minute), keys, []dialect.Key{keyC})
	if err != nil || !slices.Equal(granted, []bool{false, true}) || !slices.Equal(released, []bool{true}) {
		t.Fatalf("granted %t, released %t, %v", granted, released, err)
	}
	sent := stub.sent("sp_getapplock")
	if len(sent) != 1 || sent[0].args["owner"] != "Session" || sent[0].args["count"] != int32(3) || sent[0].args["modes"] != "RXS" {
		t.Fatalf("sent %v", sent)
	}
	if names := strings.Fields(sent[0].args["names"].(string)); !slices.Equal(names, []string{keyC.Name, keyA.Name, keyB.Name}) {
		t.Errorf("sent names %q", names)
	}
	for _, want := range []string{"SELECT @status = -999", "@LockTimeout = 0", "@LockOwner = @owner", "@DbPrincipal = 'public'",
		"ELSE IF APPLOCK_MODE('public', @name, @owner) = 'NoLock'"} {
		if !strings.Contains(sent[0].query, want) {
			t.Errorf("the batch lacks %q", want)
		}
	}
	if _, _, err := session.Exchange(time.Now().Add(time.Minute), nil, nil); err != nil || len(stub.sent("sp_getapplock")) != 1 {
		t.Errorf("an exchange of nothing: %v", err)
	}
}

// Only 0, 1 and -1 are outcomes of a try; where the batch stopped, the code says why.
func TestFailedExchange(t *testing.T) {
	for _, c := range []struct {
		answer answer
		class  dialect.Class
		code   string
		key    string
	}{
		{answer{outs: map[string]any{"done": "", "status": -999}}, dialect.Setup, "-999", "sp_releaseapplock of b"},
		{answer{outs: map[string]any{"done": "1", "status": -3}}, dialect.Deadlock, "-3", "sp_getapplock of a"},
		{answer{outs: map[string]any{"done": "0", "status": -2}}, dialect.Canceled, "-2", "sp_getapplock of a"},
		{answer{err: serverError(1205)}, dialect.Deadlock, "1205", ""},
	} {
		_, session := openSession(t, c.answer)
		_, _, err := session.Exchange(time.Now().Add(time.Minute), keys[:1], keys[1:])
		wantError(t, err, c.class, c.code)
		if !strings.Contains(err.Error(), c.key) {
			t.Errorf("%q does not name the call", err)
		}
	}
	for _, done := range []string{"1", "111", "1x"} {
		_, session := openSession(t, answer{outs: map[string]any{"done": done, "status": 0}})
		if granted, released, err := session.Exchange(time.Now().Add(time.Minute), keys, nil); err == nil {
			t.Errorf("the answer %q for two keys: %t, %t", done, granted, released)
		}
	}
}

// Fencing numbers come with the grant, in the same round trip.
func TestFence(t *testing.T) {
	granted := status(1, 2)
	granted.outs["fences"] = "41,9223372036854775807,"
	stub, session := openSession(t, granted)
	fences, err := session.Acquire(t.Context(), dialect.Request{Keys: keys, Fence: &dialect.Table{}})
	if err != nil || !slices.Equal(fences, []int64{41, math.MaxInt64}) {
		t.Fatalf("got %v, %v", fences, err)
	}
	sent := stub.sent("UPDATE [locks] WITH (UPDLOCK, HOLDLOCK, ROWLOCK) SET @fence = fence = CASE WHEN fence + 64 > @clock THEN fence + 64 ELSE @clock END")
	rows := dialect.FenceRows(keys)
	if len(sent) != 1 || !slices.Equal(strings.Fields(sent[0].args["ids"].(string)), []string{fmt.Sprint(rows[0].ID), fmt.Sprint(rows[1].ID)}) {
		t.Errorf("sent %v", sent)
	}
}

// A row that is missing is created on the session's own connection, and may have
// been created by somebody else in the meantime.
func TestFenceOfNewKey(t *testing.T) {
	granted := status(0, 2)
	granted.outs["missing"] = "0,1,"
	stub, session := openSession(t, granted, answer{err: serverError(2627)}, answer{},
		answer{outs: map[string]any{"fences": "1,1,"}})
	fences, err := session.Acquire(t.Context(), dialect.Request{Keys: keys, Fence: &dialect.Table{}})
	if err != nil || !slices.Equal(fences, []int64{1, 1}) {
		t.Fatalf("got %v, %v", fences, err)
	}
	inserted := stub.sent("INSERT INTO [locks] WITH (ROWLOCK) (id, name, fence) VALUES (@id, @name, 0);")
	if len(inserted) != 2 || inserted[1].args["id"] != dialect.FenceRows(keys)[1].ID || inserted[1].args["name"] != keyB.Name || inserted[0].session != 1 {
		t.Errorf("inserted %v", inserted)
	}
}

// A try does not wait for the row of the lock table either.
func TestFenceOfBusyRow(t *testing.T) {
	stub, session := openSession(t, answer{err: serverError(1222)}, released(0))
	_, err := session.Acquire(t.Context(), dialect.Request{Keys: keys, Try: true, Fence: &dialect.Table{}})
	wantError(t, err, dialect.NotAcquired, "1222")
	if len(stub.sent("ROWLOCK, NOWAIT")) != 1 {
		t.Error("the try waits for the row")
	}
	if back := stub.sent("sp_releaseapplock"); len(back) != 1 || back[0].args["count"] != int32(2) {
		t.Errorf("gave back %v", back)
	}

	stub, session = openSession(t, answer{err: serverError(1222)}, released(0))
	_, err = session.Acquire(t.Context(), dialect.Request{Keys: keys, Fence: &dialect.Table{}})
	wantError(t, err, dialect.Timeout, "1222")
	if back := stub.sent("sp_releaseapplock"); len(back) != 1 || back[0].args["count"] != int32(2) {
		t.Errorf("gave back %v", back)
	}
}

// What the server had granted when the call failed is not known, so each key is
// given back if it is held.
func TestFailedCallGivesBack(t *testing.T) {
	stub, session := openSession(t, answer{err: serverError(1205)}, released(0))
	_, err := session.Acquire(t.Context(), dialect.Request{Keys: keys})
	wantError(t, err, dialect.Deadlock, "1205")
	back := stub.sent("IF @doubtful = 1 AND APPLOCK_MODE('public', @name, @owner) = 'NoLock'")
	if len(back) != 1 || back[0].args["count"] != int32(2) || back[0].args["doubtful"] != true {
		t.Errorf("gave back %v", back)
	}

	stub, session = openSession(t, status(-3, 1), answer{err: serverError(229)})
	_, err = session.Acquire(t.Context(), dialect.Request{Keys: keys})
	wantError(t, err, dialect.Deadlock, "-3")
	if back := stub.sent("sp_releaseapplock"); len(back) != 1 || back[0].args["count"] != int32(1) || !strings.Contains(err.Error(), "give back") {
		t.Errorf("gave back %v: %v", back, err)
	}
}

// sp_getapplock with the owner Transaction returns -999 and only informs (15626)
// outside a transaction; sp_releaseapplock raises error 3918.
func TestOutsideTransaction(t *testing.T) {
	_, d := openDB(t, status(-999, 0), answer{})
	err := d.AcquireTx(t.Context(), d.db, dialect.TxRequest{Keys: keys})
	wantError(t, err, dialect.Unsupported, "")
	_, err = d.LockRows(t.Context(), d.db, dialect.RowRequest{Keys: []dialect.Key{keyA}})
	wantError(t, err, dialect.Unsupported, "")
	wantError(t, d.Classify(serverError(3918)), dialect.Unsupported, "3918")
}

func TestAcquireTx(t *testing.T) {
	stub, d := openDB(t, status(-3, 1), released(0))
	tx, err := d.Begin(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	err = d.AcquireTx(t.Context(), tx, dialect.TxRequest{Keys: keys, Wait: 1500*time.Millisecond + 1})
	wantError(t, err, dialect.Deadlock, "-3", dialect.RemainsUsable)
	if args := stub.sent("sp_getapplock")[0].args; args["owner"] != "Transaction" || args["wait"] != int32(1501) {
		t.Errorf("sent %v", args)
	}
	if back := stub.sent("sp_releaseapplock"); len(back) != 1 || back[0].args["owner"] != "Transaction" || back[0].args["count"] != int32(1) {
		t.Errorf("gave back %v", back)
	}
}

func TestWaitMillis(t *testing.T) {
	background := context.Background()
	within := func(d time.Duration) context.Context {
		ctx, cancel := context.WithTimeout(background, d)
		t.Cleanup(cancel)
		return ctx
	}
	for _, c := range []struct {
		name     string
		ctx      context.Context
		try      bool
		limit    time.Duration
		min, max int32
	}{
		{"try", within(time.Hour), true, time.Hour, 0, 0},
		{"no bound", background, false, 0, -1, -1},
		{"1 ns", background, false, 1, 1, 1},
		{"400 µs", background, false, 400 * time.Microsecond, 1, 1},
		{"exact", background, false, 1500 * time.Millisecond, 1500, 1500},
		{"rounded up", background, false, 1500*time.Millisecond + 1, 1501, 1501},
		{"the largest", background, false, math.MaxInt64, math.MaxInt32, math.MaxInt32},
		{"26 days", background, false, 26 * 24 * time.Hour, math.MaxInt32, math.MaxInt32},
		{"deadline", within(time.Hour), false, 0, 3_500_000, 3_600_000},
		{"deadline before limit", within(time.Hour), false, 2 * time.Hour, 3_500_000, 3_600_000},
		{"limit before deadline", within(time.Hour), false, time.Second, 1000, 1000},
		{"deadline over", within(-time.Hour), false, 0, 1, 1},
		{"deadline over, with limit", within(-time.Hour), false, time.Second, 1, 1},
	} {
		if got := waitMillis(c.ctx, c.try, c.limit); got < c.min || got > c.max {
			t.Errorf("%s: %d, want %d to %d", c.name, got, c.min, c.max)
		}
	}
}
