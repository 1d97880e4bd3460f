package history

// Defects that a worker with the build tag planted_bug can have.
const (
	ReleasedEarly = "released early"    // the key is given back, the holder goes on
	ReleasedInTx  = "released in tx"    // the same in the transaction on the session
	NotReleased   = "not released"      // the key is not given back
	OldToken      = "token of the past" // a grant comes with an earlier grant's number
)

// Planted are all of them.
var Planted = []string{ReleasedEarly, ReleasedInTx, NotReleased, OldToken}
