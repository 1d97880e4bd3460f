package servers

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// PgBouncer starts a PgBouncer for this test in front of a PostgreSQL server, with the pool mode
// "session", "transaction" or "statement". Its Database and User create them on that server and
// return DSNs that lead through the pooler; its own console is the database "pgbouncer".
// Settings are lines of its configuration, such as "default_pool_size=2".
func PgBouncer(t testing.TB, target *Server, poolMode string, settings ...string) *Server {
	t.Helper()
	s, err := launchPgBouncer(target, append([]string{"pool_mode=" + poolMode}, settings...))
	return must(t, KindPgBouncer, s, err).own(t)
}

func launchPgBouncer(target *Server, settings []string) (*Server, error) {
	if target.Kind != KindPostgres {
		return nil, fmt.Errorf("PgBouncer cannot serve %s", target.Kind)
	}
	path, ok := lookPath("pgbouncer")
	if !ok {
		return nil, missingError{KindPgBouncer}
	}
	in := &installation{
		kind:    KindPgBouncer,
		program: program{path: path},
		configure: func(folder, _ string, port int, settings []string) ([]string, error) {
			user := target.dsn.User.Username()
			password, _ := target.dsn.User.Password()
			users := filepath.Join(folder, "users")
			lines := append([]string{
				"[databases]",
				fmt.Sprintf("* = host=%s port=%s", target.dsn.Hostname(), target.dsn.Port()),
				"[pgbouncer]",
				"listen_addr=127.0.0.1",
				fmt.Sprintf("listen_port=%d", port),
				"unix_socket_dir=",
				"auth_type=md5", // SCRAM too, for who has such a password
				"auth_file=" + users,
				"auth_user=" + user, // looks up the other users
				"admin_users=" + user,
				"max_client_conn=1000",
				"ignore_startup_parameters=extra_float_digits", // lib/pq sends it
			}, settings...)
			ini := filepath.Join(folder, "pgbouncer.ini")
			return []string{ini}, errors.Join(
				writeFile(users, fmt.Sprintf("%q %q\n", user, password)),
				writeFile(ini, strings.Join(lines, "\n")+"\n"),
			)
		},
		orderly: syscall.SIGQUIT, // the one that waits for nobody, in all versions
		discard: os.Kill,
		dsn: func(_ string, port int) *url.URL {
			u := *target.dsn
			u.Host = fmt.Sprintf("127.0.0.1:%d", port)
			return &u
		},
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	s, err := in.launch(ctx, settings)
	if err == nil {
		s.target = target
	}
	return s, err
}
