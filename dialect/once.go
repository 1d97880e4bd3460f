package dialect

import "fmt"

// OnceTable is the default of the lock table that keeps what was done once.
const OnceTable = "once"

// MarkRequest is one call of DB.MarkRows.
type MarkRequest struct {
	Table Table
	Keys  []Key // sorted by ID, exclusive; the Name tells keys of the same ID apart
}

// Collides is the error of a DB.MarkRows that found the row of another key in place of
// the given one's.
func Collides(key Key) error {
	return &Error{Class: InvalidKey, Err: fmt.Errorf("the mark of key %s belongs to another key", key.Label),
		Hint: "two of 2^64 digests are the same: give the key one more part"}
}

// Unseen is the error of a DB.MarkRows that cannot see or write a row that it has locked.
func Unseen() error {
	return &Error{Class: Serialization, Err: fmt.Errorf("a mark is newer than the transaction's snapshot"), Hint: "start the transaction again"}
}
