package transaction

import (
	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
)

// Retries is how a transaction that locks the keys is tried again: as its user says, if
// given is not nil, and with the locker's observer where that names none.
func Retries(given *deadlock.RetryOptions, keys []dblock.Key, observer dblock.Observer) *deadlock.RetryOptions {
	var o deadlock.RetryOptions
	if given != nil {
		o = *given
	}
	o.Keys = keys
	if o.Observer == nil {
		o.Observer = observer
	}
	return &o
}
