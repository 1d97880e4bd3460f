//go:build unix

package command_test

import (
	"net"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// What cannot be opened is told in one line, without a password.
func TestUnusableDatabases(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		for what, test := range map[string]struct {
			code   int
			change func(u *url.URL)
		}{
			"wrong password": {1, func(u *url.URL) { u.User = url.UserPassword(u.User.Username(), "secret") }},
			"unknown user":   {1, func(u *url.URL) { u.User = url.UserPassword("nobody_at_all", "secret") }},
			"no database":    {1, func(u *url.URL) { setDatabase(u, "not_there") }},
			"no server":      {1, func(u *url.URL) { u.User = url.UserPassword("me", "secret"); u.Host = closedPort(t) }},
			"malformed":      {2, func(u *url.URL) { u.User = url.UserPassword("me", "secret"); u.RawQuery = "sslmode=%zz" }},
		} {
			u, err := url.Parse(d.dsn)
			if err != nil {
				t.Fatal(err)
			}
			test.change(u)
			commands := [][]string{{"ls"}}
			if what == "wrong password" {
				commands = append(commands,
					[]string{"setup"}, []string{"bench"}, []string{"exec", "--key", "job", "--", "echo", "ran"}, []string{"migrate", "up", "--dir", "testdata"})
			}
			for _, args := range commands {
				stdout, stderr := run(t, u.String(), test.code, args...)
				if stdout != "" || stderr == "" || strings.Contains(stderr, "\n") {
					t.Errorf("%s, %v: stdout %q, stderr:\n%s", what, args, stdout, stderr)
				}
				if secret, ok := u.User.Password(); ok && secret != "" && strings.Contains(stderr, secret) {
					t.Errorf("%s, %v: the password is in: %s", what, args, stderr)
				}
				if args[0] == "ls" {
					t.Logf("%s: %s", what, stderr)
				}
			}
		}
	})
}

// Connecting to what accepts and stays silent ends by itself, or by a signal.
func TestSilentServers(t *testing.T) {
	for _, scheme := range []string{"postgres", "mysql", "mariadb", "sqlserver"} {
		t.Run(scheme, func(t *testing.T) {
			t.Parallel()
			path := "/db"
			if scheme == "sqlserver" {
				path = "?database=db"
			}
			address, _ := silentServer(t)
			bounded := start(t, scheme+"://me:secret@"+address+path, "exec", "--wait", "10ms", "--key", "job", "--", "echo", "ran").exit(1)
			if stderr := bounded.stderr.all(t); !strings.Contains(stderr, address+" took longer than 2s") {
				t.Errorf("stderr %q", stderr)
			}
			for _, args := range [][]string{{"ls"}, {"setup"}, {"bench"}, {"migrate", "status", "--dir", "testdata"}, {"exec", "--key", "job", "--", "echo", "ran"}} {
				address, accepted := silentServer(t)
				p := start(t, scheme+"://me:secret@"+address+path, args...)
				select {
				case <-accepted:
				case <-time.After(patience):
					t.Fatalf("%v does not connect", args)
				}
				p.signal(syscall.SIGTERM)
				p.exit(128 + 15)
				if stderr := p.stderr.all(t); stderr != "dblock: connecting to "+address+": stopped by signal: terminated" {
					t.Errorf("%v: stderr %q", args, stderr)
				}
			}
		})
	}
}

// silentServer accepts connections and never says anything.
func silentServer(t *testing.T) (address string, accepted chan net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted = make(chan net.Conn, 100)
	var accepting sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		accepting.Wait()
	})
	accepting.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil { // closed
				return
			}
			defer conn.Close()
			accepted <- conn
		}
	})
	return l.Addr().String(), accepted
}

func setDatabase(u *url.URL, name string) {
	if q := u.Query(); q.Has("database") {
		q.Set("database", name)
		u.RawQuery = q.Encode()
		return
	}
	u.Path = "/" + name
}

// closedPort is an address where nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
