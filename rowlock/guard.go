package rowlock

import (
	"context"
	"fmt"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/dialect"
)

// Guard lets the holder of a fenced lock write in the transaction, and refuses one who
// has been overtaken, with [dblock.ErrNotHeld]: then roll back, and stop. The token is
// that of [Locker.Fence] or, which is the main use, of an advisory lock
// (lock.Token(), of a lock of several keys lock.TokenOf(key)) whose locker has the
// same Schema and Table.
//
// It fails once a later grant of the key has drawn its number; on PostgreSQL under
// REPEATABLE READ and SERIALIZABLE, once that was before the transaction's snapshot, or
// the later holder's guarded transaction was committed. Those who pass exclude
// each other until their transactions end, and nobody passes after one with a higher
// token was committed. So call Guard first in each transaction, and read what the
// transaction goes by after it: a holder that was paused in the midst of its
// transaction then either commits before its successor reads, or not at all.
//
// Guard is for exclusive holds: shared ones overtake each other. Other errors are
// those of [Locker.Lock]; after any of them roll back. [dblock.ErrInvalidOption] for
// a token that is not more than zero, which is that of a lock without fencing. Any other
// number is taken for one of the key's own: one that is too high, such as another key's,
// passes and refuses the key's true holder, until a grant of the key draws a higher one.
func (l *Locker) Guard(ctx context.Context, tx dblock.Tx, key dblock.Key, token int64) error {
	const op = "guard"
	keys := []dblock.Key{key}
	if l.mistaken != nil {
		return l.failed(op, keys, l.mistaken)
	}
	if token <= 0 {
		return l.failed(op, keys, dialect.Invalidf("the token is %d, that of a lock without fencing: set advisory.Options.Fencing, or use Fence", token))
	}
	if err := checkTx(tx); err != nil {
		return l.failed(op, keys, err)
	}
	locked, err := deadlock.OrderRows(l.db, keys...)
	if err != nil {
		return l.failed(op, keys, err)
	}
	hold := l.beginHold(ctx, deadlock.Call{Kind: "guard", Keys: keys, Order: locked, Tx: tx})
	if err := l.db.Guard(ctx, tx, dialect.GuardRequest{Table: l.table(), Key: locked[0], Token: token}); err != nil {
		return l.failed(op, keys, withRemains(l.db, err))
	}
	hold.Acquired()
	return nil
}

// Fenced guards a row of the user's by itself, without Guard: a column of type BIGINT
// NOT NULL DEFAULT 0 keeps the token of the row's last writer, and an UPDATE with
//
//	set, where := rowlock.Fenced("fence", lock.Token())
//	`UPDATE checkpoints SET position = $1, ` + set + ` WHERE projector = $2 AND ` + where
//
// changes nothing where that was a later holder: no row affected means to stop. A new
// holder writes once like this before it reads. The column is SQL text, as
// t.fence; the token is written out, so that the placeholders are those of the rest of
// the statement, whatever their style.
//
// MySQL and MariaDB count the rows that changed: an UPDATE that leaves all as it was
// affects none there, unless the DSN has clientFoundRows=true.
func Fenced(column string, token int64) (set, where string) {
	return fmt.Sprintf("%s = %d", column, token), fmt.Sprintf("%s <= %d", column, token)
}
