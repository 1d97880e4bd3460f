//go:build unix

package command_test

import (
	"net"
	"net/url"
	"strings"
	"testing"
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
					[]string{"setup"}, []string{"exec", "--key", "job", "--", "echo", "ran"}, []string{"migrate", "up", "--dir", "testdata"})
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
