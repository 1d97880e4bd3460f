package dialect

import (
	"fmt"
	"slices"
)

// FenceStride is by how much two draws of fencing numbers for one key are apart at
// least. A draw writes the first of its numbers into the key's fence row (see
// [FenceRows]); the FenceStride - 1 numbers after it belong to it, too.
//
// The first number is the server's clock in microseconds since 1970, or FenceStride
// more than the one before where that is larger. So numbers go on growing when the
// row, or the whole table, was deleted, and when a failover has lost the latest; and
// they stay below 2^53, up to which JSON and JavaScript have integers.
const FenceStride = 64

// GuardRequest is one call of DB.Guard.
type GuardRequest struct {
	Table Table
	Key   Key
	Token int64 // more than 0
}

// GuardRows are the keys whose rows of a lock table remember the highest fencing
// number that a guarded transaction had, in the same order. They are apart from the
// FenceRows so that drawing a number never waits for a transaction.
func GuardRows(keys ...Key) []Key {
	const apart = 0x6ca1ab1e0ddba11 // any number does, as long as it never changes
	rows := slices.Clone(keys)
	for i := range rows {
		rows[i].ID ^= apart
		rows[i].Mode = Exclusive
	}
	return rows
}

// Overtaken is the error of a DB.Guard that found a higher number.
func Overtaken(r GuardRequest) error {
	return &Error{Class: NotHeld, Remains: RemainsUsable,
		Err:  fmt.Errorf("key %s has been granted to somebody else since number %d", r.Key.Label, r.Token),
		Hint: "roll back and stop: the lock is lost"}
}
