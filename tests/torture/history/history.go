// Package history is what the processes of the torture test write down and the
// test reads: one JSON line for each step, stamped by a clock that they share.
package history

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// Plan tells a process what to do. It is the argument of the worker's command
// "torture".
type Plan struct {
	DSN     string
	Name    string // of the process, unique in the run
	Seed    uint64
	Clients int // goroutines that lock
	Keys    int // that they lock
	// Planted is a defect that the worker shall have; see the worker's build tag
	// planted_bug. Empty: none.
	Planted string
}

// What is a step in the life of a hold.
type What string

const (
	// Ask: a call is about to be made. Stamped before the call.
	Ask What = "ask"
	// Refused: the call returned an error. Stamped after it returned.
	Refused What = "refused"
	// Granted: the call returned a lock. Stamped after it returned.
	Granted What = "granted"
	// Held is evidence: something that only a holder can do succeeded. Stamped
	// before it was tried, since that is how long the hold had lasted at least.
	Held What = "held"
	// Wrote: the commit of a write to a witness row was acknowledged. Stamped
	// after that.
	Wrote What = "wrote"
	// Stale: a witness row refused a write because of a larger fencing number.
	// Stamped after the refusal.
	Stale What = "stale"
	// Lost: the lock's context ended with a loss. Stamped when it was heard.
	Lost What = "lost"
	// Releasing: a release is about to be called. Stamped before the call.
	Releasing What = "releasing"
	// Released: the release returned, Class and Error say with which error.
	Released What = "released"
	// Drained: the process holds nothing and asks for nothing any more.
	Drained What = "drained"
)

// Call is how a lock was asked for.
type Call string

const (
	Try    Call = "try"    // TryLock
	Wait   Call = "wait"   // Lock with a deadline
	Cancel Call = "cancel" // Lock whose context is cancelled
	InTx   Call = "in tx"  // InTx with a deadline
)

// Way is how a witness row is guarded.
type Way string

const (
	// OnSession: written in a transaction on the session that holds the lock, and
	// guarded by nothing else.
	OnSession Way = "session"
	// Fenced: written through another connection, guarded by the fencing number.
	Fenced Way = "fenced"
)

// Key is a key of a call.
type Key struct {
	Name   string `json:"name"`
	Shared bool   `json:"shared,omitempty"`
	Token  int64  `json:"token,omitempty"` // with Granted
}

// Record is one step.
type Record struct {
	At    int64  `json:"at"` // Now
	What  What   `json:"what"`
	Op    string `json:"op,omitempty"` // the call, unique in the run
	Call  Call   `json:"call,omitempty"`
	Keys  []Key  `json:"keys,omitempty"`
	Row   string `json:"row,omitempty"` // with Wrote and Stale: the key whose row it was
	Way   Way    `json:"way,omitempty"`
	N     int64  `json:"n,omitempty"`
	Class string `json:"class,omitempty"`
	Error string `json:"error,omitempty"`
}

// Duration is the time between two stamps.
func Duration(from, to int64) time.Duration { return time.Duration(to - from) }

// Writer writes records, each with one write to the system: whoever kills the
// process finds all that it had written.
type Writer struct {
	mu sync.Mutex
	w  io.Writer
}

// NewWriter makes a Writer.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write writes a record.
func (w *Writer) Write(r Record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err = w.w.Write(append(line, '\n'))
	return err
}

// Read passes on the records that a process writes, until it ends. A last line
// that a kill cut short is left out.
func Read(r io.Reader, each func(Record)) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var record Record
		if err := json.Unmarshal(line, &record); err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
		each(record)
	}
}
