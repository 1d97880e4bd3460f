package dialect

import "time"

// CleanRequest is one call of DB.CleanRows: a page of a lock table in the order of
// the ids.
type CleanRequest struct {
	Table Table
	From  int64 // the page begins with this id
	Rows  int   // how many rows the page has at most
	// Age is how old a fencing number must be for its row to go.
	Age time.Duration
}

// Cleaned is what became of a page.
type Cleaned struct {
	Deleted int64
	// Last is the page's last id. More is false if the table has no further page.
	Last int64
	More bool
}
