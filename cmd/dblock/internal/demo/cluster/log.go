package cluster

import (
	"strings"
	"sync"
)

// log takes what the server writes to stderr, whole lines at a time.
type log struct {
	ready chan struct{} // closed when the server accepts connections

	mu       sync.Mutex
	text     string
	announce sync.Once
}

// keep is how much of the log's end is kept, for errors.
const keep = 8 << 10

func newLog() *log { return &log{ready: make(chan struct{})} }

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text += string(p)
	if strings.Contains(l.text, "database system is ready to accept connections") {
		l.announce.Do(func() { close(l.ready) })
	}
	l.text = l.text[max(0, len(l.text)-keep):]
	return len(p), nil
}

func (l *log) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return lastLines(l.text)
}
