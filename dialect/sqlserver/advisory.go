package sqlserver

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// cleanupTimeout bounds what must happen whatever became of the caller's context.
const cleanupTimeout = 5 * time.Second

// Who owns an application lock. Locks of the two owners are separate, even
// within one session, and do not conflict.
const (
	ownedBySession     = "Session"
	ownedByTransaction = "Transaction"
)

// What sp_getapplock and sp_releaseapplock return:
// https://learn.microsoft.com/sql/relational-databases/system-stored-procedures/sp-getapplock-transact-sql#return-code-values
const (
	statusGranted     = 0
	statusWaited      = 1
	statusTimeout     = -1
	statusCanceled    = -2
	statusDeadlock    = -3
	statusInvalidCall = -999
)

// Every batch takes its keys packed into strings of slots, so that its text, and
// with it the server's plan, is the same for any number of keys. Results come
// back in output parameters: with rows to read, go-mssqldb would interrupt a
// batch that has not ended when they are closed.
const (
	nameSlot = 64 // of @names: a name, padded with spaces
	idSlot   = 20 // of @ids: an id in decimal digits, padded with spaces
)

// acquireBatch takes the keys in order until one is not granted. Timeouts are
// return codes and not errors, so @status is set to the code for an invalid call
// before each call: a call that does not run must not look granted.
//
// @wait bounds the whole batch, in milliseconds: -1 for no bound, 0 for a try.
const acquireBatch = `
SET NOCOUNT ON;
DECLARE @name nvarchar(255), @mode nvarchar(32), @left int = @wait,
	@until datetime2 = DATEADD(millisecond, @wait, SYSUTCDATETIME());
SELECT @status = 0, @granted = 0, @session = @@SPID, @transactions = @@TRANCOUNT;
WHILE @granted < @count
BEGIN
	SELECT @status = -999,
		@name = RTRIM(SUBSTRING(@names, @granted * 64 + 1, 64)),
		@mode = CASE SUBSTRING(@modes, @granted + 1, 1) WHEN 'S' THEN 'Shared' ELSE 'Exclusive' END;
	IF @wait > 0
		SET @left = CASE WHEN SYSUTCDATETIME() < @until THEN DATEDIFF(millisecond, SYSUTCDATETIME(), @until) ELSE 0 END;
	EXEC @status = sys.sp_getapplock @Resource = @name, @LockMode = @mode, @LockOwner = @owner,
		@LockTimeout = @left, @DbPrincipal = 'public';
	IF @status NOT IN (0, 1) BREAK;
	SET @granted += 1;
END;
`

// releaseBatch gives the keys back, the last one first. It goes on after a key
// that was not held, for which the server raises error 1223, unless @doubtful
// says that this may be so.
const releaseBatch = `
SET NOCOUNT ON;
DECLARE @name nvarchar(255), @result int;
SELECT @status = 0, @session = @@SPID;
WHILE @count > 0
BEGIN
	SELECT @result = -999, @name = RTRIM(SUBSTRING(@names, (@count - 1) * 64 + 1, 64));
	IF @doubtful = 1 AND APPLOCK_MODE('public', @name, @owner) = 'NoLock'
		SET @result = 0;
	ELSE
		EXEC @result = sys.sp_releaseapplock @Resource = @name, @LockOwner = @owner, @DbPrincipal = 'public';
	IF @result <> 0 SET @status = @result;
	SET @count -= 1;
END;
`

// heldBatch asks for the mode of each key: '1' in @held for one that is held, '0'
// for one that is not. A mode may be stronger than what was asked for: several
// holds by one owner add up to the union of their modes.
const heldBatch = `
SET NOCOUNT ON;
DECLARE @i int = 0, @name nvarchar(255), @mode nvarchar(32);
SELECT @held = '', @session = @@SPID;
WHILE @i < @count
BEGIN
	SET @name = RTRIM(SUBSTRING(@names, @i * 64 + 1, 64));
	SET @mode = APPLOCK_MODE('public', @name, @owner);
	SET @held += CASE WHEN @mode = 'Exclusive' OR (@mode <> 'NoLock' AND SUBSTRING(@modes, @i + 1, 1) = 'S') THEN '1' ELSE '0' END;
	SET @i += 1;
END;
`

// exchangeBatch first releases the keys that @modes has an 'R' for, then tries for
// the others, without waiting. @done gets '1' for each key released or granted, '0'
// for one that was not held or is not free. It stops at any other return code.
//
// Releasing what is not held would raise an error, so it asks first.
const exchangeBatch = `
SET NOCOUNT ON;
DECLARE @i int = 0, @name nvarchar(255), @mode nvarchar(32);
SELECT @status = 0, @done = '', @session = @@SPID;
WHILE @i < @count
BEGIN
	SELECT @status = -999,
		@name = RTRIM(SUBSTRING(@names, @i * 64 + 1, 64)),
		@mode = CASE SUBSTRING(@modes, @i + 1, 1) WHEN 'R' THEN NULL WHEN 'S' THEN 'Shared' ELSE 'Exclusive' END;
	IF @mode IS NOT NULL
		EXEC @status = sys.sp_getapplock @Resource = @name, @LockMode = @mode, @LockOwner = @owner,
			@LockTimeout = 0, @DbPrincipal = 'public';
	ELSE IF APPLOCK_MODE('public', @name, @owner) = 'NoLock'
		SET @status = -1;
	ELSE
		EXEC @status = sys.sp_releaseapplock @Resource = @name, @LockOwner = @owner, @DbPrincipal = 'public';
	IF @status NOT IN (0, 1, -1) BREAK;
	SET @done += CASE @status WHEN -1 THEN '0' ELSE '1' END;
	SET @i += 1;
END;
`

// packed is the keys of one call as the batches take them.
type packed struct {
	count             int32
	names, modes, ids string
}

// pack refuses what would not arrive as it is: a name that is cut off or padded
// is another lock.
func pack(keys []dialect.Key) (packed, error) {
	var names, modes, ids strings.Builder
	for _, k := range keys {
		if k.Name == "" || len(k.Name) > nameSlot || strings.ContainsRune(k.Name, ' ') {
			return packed{}, &dialect.Error{Class: dialect.InvalidKey,
				Hint: fmt.Sprintf("the name %q is not 1 to %d characters without spaces", k.Name, nameSlot)}
		}
		fmt.Fprintf(&names, "%-*s", nameSlot, k.Name)
		if k.Mode == dialect.Shared {
			modes.WriteByte('S')
		} else {
			modes.WriteByte('X')
		}
		fmt.Fprintf(&ids, "%-*d", idSlot, k.ID)
	}
	return packed{int32(len(keys)), names.String(), modes.String(), ids.String()}, nil
}

// parameters are those that the batches for several modes have in common.
func (p packed) parameters() []any {
	return []any{sql.Named("count", p.count), sql.Named("names", p.names), sql.Named("modes", p.modes)}
}

// appLocks is one owner's application locks on one connection.
type appLocks struct {
	on    dialect.Tx
	owner string
}

// grant is what acquireBatch answers.
type grant struct {
	status       int32
	granted      int32 // how many keys are held, the first ones
	session      int32
	transactions int32 // how many are open, one within the other
}

// acquire runs acquireBatch, followed in the same round trip by the batch for
// the rows of the lock table if rows is not nil. After an error it is unknown
// what is held.
func (a appLocks) acquire(ctx context.Context, p packed, wait int32, rows *rowBatch) (grant, error) {
	g := grant{status: statusInvalidCall}
	query := acquireBatch
	args := append(p.parameters(), sql.Named("owner", a.owner), sql.Named("wait", wait),
		out("status", &g.status), out("granted", &g.granted), out("session", &g.session), out("transactions", &g.transactions))
	if rows != nil {
		query += "IF @status NOT IN (0, 1) RETURN;" + rows.text()
		args = append(args, rows.parameters(p)...)
	}
	if _, err := a.on.ExecContext(ctx, query, args...); err != nil {
		return grant{}, err
	}
	return g, nil
}

// release gives the keys back once each and answers which session it was that
// did so. doubtful: not all of them need be held.
func (a appLocks) release(ctx context.Context, keys []dialect.Key, doubtful bool) (session int32, err error) {
	p, err := pack(keys)
	if err != nil {
		return 0, err
	}
	status := int32(statusInvalidCall)
	_, err = a.on.ExecContext(ctx, releaseBatch, sql.Named("count", p.count), sql.Named("names", p.names),
		sql.Named("owner", a.owner), sql.Named("doubtful", doubtful), out("status", &status), out("session", &session))
	if err != nil {
		return 0, err
	}
	if status != statusGranted {
		return 0, statusError("sp_releaseapplock", status, "", false)
	}
	return session, nil
}

// undo gives back what a failed call was or may have been granted, whatever
// became of ctx.
func (a appLocks) undo(ctx context.Context, granted []dialect.Key) error {
	if len(granted) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if _, err := a.release(ctx, granted, true); err != nil {
		return fmt.Errorf("give back what was granted before: %w", err)
	}
	return nil
}

// held answers for each key, and which session it is.
func (a appLocks) held(ctx context.Context, keys []dialect.Key) (held []bool, session int32, err error) {
	p, err := pack(keys)
	if err != nil {
		return nil, 0, err
	}
	var answer string
	_, err = a.on.ExecContext(ctx, heldBatch, append(p.parameters(), sql.Named("owner", a.owner),
		out("held", &answer), out("session", &session))...)
	if err != nil {
		return nil, 0, err
	}
	held, err = parseFlags(answer, len(keys))
	return held, session, err
}

// exchange runs exchangeBatch.
func (a appLocks) exchange(ctx context.Context, tries, releases []dialect.Key) (granted, released []bool, session int32, err error) {
	keys := slices.Concat(releases, tries)
	p, err := pack(keys)
	if err != nil {
		return nil, nil, 0, err
	}
	p.modes = strings.Repeat("R", len(releases)) + p.modes[len(releases):]
	status, done := int32(statusInvalidCall), ""
	_, err = a.on.ExecContext(ctx, exchangeBatch, append(p.parameters(), sql.Named("owner", a.owner),
		out("status", &status), out("done", &done), out("session", &session))...)
	if err != nil {
		return nil, nil, 0, err
	}
	if n := len(done); n < len(keys) && status != statusGranted {
		procedure := "sp_getapplock"
		if n < len(releases) {
			procedure = "sp_releaseapplock"
		}
		return nil, nil, 0, statusError(procedure, status, keys[n].Label, true)
	}
	flags, err := parseFlags(done, len(keys))
	if err != nil {
		return nil, nil, 0, err
	}
	return flags[len(releases):], flags[:len(releases)], session, nil
}

// parseFlags reads one '0' or '1' for each of n keys.
func parseFlags(list string, n int) ([]bool, error) {
	if len(list) != n || strings.Trim(list, "01") != "" {
		return nil, fmt.Errorf("the server answered %q for %d keys", list, n)
	}
	flags := make([]bool, n)
	for i := range flags {
		flags[i] = list[i] == '1'
	}
	return flags, nil
}

// failure is what a grant means for its caller; nil if all keys are held. The
// code of a failure is that of the key after those granted.
func (g grant) failure(keys []dialect.Key, try bool) error {
	if g.status == statusGranted || g.status == statusWaited {
		return nil
	}
	label := ""
	if int(g.granted) < len(keys) {
		label = keys[g.granted].Label
	}
	return statusError("sp_getapplock", g.status, label, try)
}

// statusError gives every return code that is not a success its class.
func statusError(procedure string, status int32, label string, try bool) error {
	e := &dialect.Error{Code: strconv.Itoa(int(status))}
	var meaning string
	switch status {
	case statusTimeout:
		e.Class, e.Remains, meaning = dialect.Timeout, dialect.RemainsUsable, "lock request timed out"
		if try {
			e.Class, meaning = dialect.NotAcquired, "not granted at once"
		}
	case statusCanceled:
		e.Class, meaning = dialect.Canceled, "lock request canceled"
	case statusDeadlock:
		e.Class, e.Remains, meaning = dialect.Deadlock, dialect.RemainsUsable, "chosen as deadlock victim"
		e.Hint = "give back all locks, then try again"
	case statusInvalidCall:
		e.Class, meaning = dialect.Setup, "invalid call"
		e.Hint = "the server refused the parameters of the call"
	default:
		e.Class, meaning = dialect.Setup, "unknown return code"
		e.Hint = "this server is not known to dblock"
	}
	if label != "" {
		label = " of " + label
	}
	e.Err = fmt.Errorf("%s%s returned %d: %s", procedure, label, status, meaning)
	return e
}

// waitMillis is the bound of a wait on the server, which has whole milliseconds
// in a 32-bit integer: 0 for a try, -1 without any bound, else the shorter of
// limit (if positive) and the time left to ctx, rounded up and at least 1, so
// that rounding never makes a try or an endless wait of it.
func waitMillis(ctx context.Context, try bool, limit time.Duration) int32 {
	if try {
		return 0
	}
	deadline, bounded := ctx.Deadline()
	if left := time.Until(deadline); bounded && (limit <= 0 || left < limit) {
		limit = left
	} else if limit <= 0 {
		return -1
	}
	ms := int64(limit / time.Millisecond)
	if limit%time.Millisecond > 0 {
		ms++
	}
	return int32(min(max(ms, 1), math.MaxInt32))
}

// out is an output parameter.
func out(name string, value any) any { return sql.Named(name, sql.Out{Dest: value}) }
