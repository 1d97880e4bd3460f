package dialect

import (
	"errors"
	"fmt"
)

// Class says what an error means for the caller. Each Class is itself an error:
// errors.Is(err, dialect.Deadlock). Package dblock publishes them as its
// sentinels.
type Class string

const (
	NotAcquired   Class = "held by another session"
	Timeout       Class = "timed out"
	Canceled      Class = "canceled"
	Deadlock      Class = "deadlock"
	Serialization Class = "could not serialize access"
	Lost          Class = "session lost"
	NotHeld       Class = "not held"
	NotFound      Class = "no such row"
	InvalidKey    Class = "invalid key"
	InvalidOption Class = "invalid option"
	Unsupported   Class = "not supported by this database"
	Unsafe        Class = "locks would not be safe here"
	Capacity      Class = "out of capacity"
	Setup         Class = "not set up"
	Denied        Class = "permission denied"
	Unavailable   Class = "cannot connect"
	Closed        Class = "closed"
)

func (c Class) Error() string { return string(c) }

// Remains says what is left of a transaction after an error in it.
type Remains uint8

const (
	// RemainsUnknown: assume the worst.
	RemainsUnknown Remains = iota
	// RemainsUsable: the transaction goes on, with the locks that it had before.
	RemainsUsable
	// RemainsAborted: the transaction is open and keeps its locks, but accepts
	// only a rollback.
	RemainsAborted
	// RemainsNothing: the server has rolled back the whole transaction.
	RemainsNothing
)

// Error is an error of a database, with its meaning.
type Error struct {
	Class   Class
	Code    string // the server's own code: an SQLSTATE or a number; may be empty
	Hint    string // the way out, in words for this database; may be empty
	Remains Remains
	Err     error // the cause; may be nil
}

func (e *Error) Error() string {
	text := e.Class.Error()
	if e.Err != nil {
		text = fmt.Sprintf("%s: %v", text, e.Err)
	}
	if e.Hint != "" {
		text = fmt.Sprintf("%s (%s)", text, e.Hint)
	}
	return text
}

// Unwrap lets errors.Is and errors.As reach both the class and the cause.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Class}
	}
	return []error{e.Class, e.Err}
}

// Invalidf is an error of class InvalidOption whose hint says what is wrong.
func Invalidf(format string, args ...any) error {
	return &Error{Class: InvalidOption, Hint: fmt.Sprintf(format, args...)}
}

// ClassOf is the class of an error that a dialect returned, empty if it has none.
func ClassOf(err error) Class {
	var class Class
	errors.As(err, &class)
	return class
}
