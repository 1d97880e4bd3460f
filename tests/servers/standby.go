package servers

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"testing"
)

// Standby starts a streaming replica of a PostgreSQL server for this test. Its Database and User
// create them on the primary and return DSNs on the replica, where they arrive a moment later;
// its own DSN works at once. SELECT pg_promote() makes a primary of it.
func Standby(t testing.TB, primary *Server) *Server {
	t.Helper()
	s, err := launchStandby(primary)
	return must(t, KindPostgres, s, err).own(t)
}

func launchStandby(primary *Server) (*Server, error) {
	in, err := findInstallation(KindPostgres)
	if err != nil {
		return nil, err
	}
	if in == nil {
		return nil, missingError{KindPostgres}
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	password, _ := primary.dsn.User.Password()
	backup := program{path: filepath.Join(filepath.Dir(in.program.path), "pg_basebackup")}
	in.initialize = nil
	configure, dsn := in.configure, in.dsn
	in.configure = func(folder, _ string, port int, settings []string) ([]string, error) {
		data := filepath.Join(folder, "data")
		if err := os.RemoveAll(data); err != nil { // of an attempt whose port was taken
			return nil, err
		}
		if err := handOver(folder); err != nil {
			return nil, err
		}
		cmd := backup.command("--pgdata="+data, "--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--dbname="+primary.DSN())
		if _, err := run(ctx, cmd); err != nil {
			return nil, fmt.Errorf("copy the primary: %w", err)
		}
		return configure(folder, password, port, settings)
	}
	in.dsn = func(_ string, port int) *url.URL { return dsn(password, port) }
	s, err := in.launch(ctx, nil)
	if err == nil {
		s.target = primary
	}
	return s, err
}
