package proxy

import (
	"io"
	"net"
	"net/url"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
)

// Commits leads to a PostgreSQL, MySQL or MariaDB server without TLS. Of one commit in
// three it cuts the connection where the answer should follow.
type Commits struct {
	DSN string // through the proxy

	upstream string
	seen     atomic.Int32
	lost     atomic.Int32
}

// NewCommits ends with the test.
func NewCommits(t testing.TB, dsn string) *Commits {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Commits{upstream: u.Host}
	u.Host = listener.Addr().String()
	p.DSN = u.String()
	var all sync.WaitGroup
	t.Cleanup(func() {
		listener.Close()
		all.Wait() // those who use the proxy have closed their connections before
	})
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			all.Go(func() { p.serve(client) })
		}
	})
	return p
}

// Lost is how many answers were lost.
func (p *Commits) Lost() int { return int(p.lost.Load()) }

var commits = regexp.MustCompile(`(?i)(^|[^a-z_])commit($|[^a-z])`)

func (p *Commits) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.upstream)
	if err != nil {
		return
	}
	defer server.Close()
	var deaf atomic.Bool
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		defer client.Close()
		_, _ = io.Copy(unless{client, &deaf}, server)
	}()
	request := make([]byte, 64<<10)
	for {
		n, err := client.Read(request)
		if err != nil {
			break
		}
		if commits.Match(request[:n]) && p.seen.Add(1)%3 == 0 {
			deaf.Store(true)
			p.lost.Add(1)
		}
		if _, err := server.Write(request[:n]); err != nil {
			break
		}
	}
	server.Close()
	<-answered
}

// unless fails once it is deaf.
type unless struct {
	io.Writer
	deaf *atomic.Bool
}

func (u unless) Write(b []byte) (int, error) {
	if u.deaf.Load() {
		return 0, io.ErrClosedPipe
	}
	return u.Writer.Write(b)
}
