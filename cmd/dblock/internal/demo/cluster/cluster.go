// Package cluster runs a throwaway PostgreSQL: found, downloaded or installed,
// in a temporary folder, on a loopback port, gone at the end.
package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	initWithin  = 2 * time.Minute
	startWithin = time.Minute
	stopWithin  = 10 * time.Second
	portTries   = 5
	superuser   = "dblock"
)

// Server is a running PostgreSQL. Its processes and files are gone after Close.
// On Linux its processes also end with the thread that started it: call Start
// with the goroutine locked to a thread that lasts (runtime.LockOSThread).
type Server struct {
	// DSN names the server's superuser and its password, which nobody else knows.
	DSN string
	// Description says for people what runs where.
	Description string

	folder   string
	programs programs
	log      *log
	ended    chan struct{}
	kill     func() error
}

// Start finds PostgreSQL, downloads it, or, as root on Debian, installs it, and
// starts a new server. What takes long is told to say. The error names what to
// install where there is no PostgreSQL to be had.
func Start(ctx context.Context, say func(text string)) (*Server, error) {
	account, err := serverAccount()
	if err != nil {
		return nil, err
	}
	folder, err := account.newFolder()
	if err != nil {
		return nil, err
	}
	s, err := startIn(ctx, folder, account, say)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(folder))
	}
	return s, nil
}

func startIn(ctx context.Context, folder string, account account, say func(string)) (*Server, error) {
	bin, err := provide(ctx, thisMachine(account), waysHere(folder, account), say)
	if err != nil {
		return nil, err
	}
	s := &Server{folder: folder, programs: programs{bin: bin, folder: folder, account: account}}
	password := rand.Text()
	if err := s.initialize(ctx, password); err != nil {
		return nil, fmt.Errorf("create a PostgreSQL cluster with %s: %w", bin, err)
	}
	for try := 1; ; try++ {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		err = s.start(ctx, port)
		if err == nil {
			s.DSN = (&url.URL{
				Scheme:   "postgres",
				User:     url.UserPassword(superuser, password),
				Host:     "127.0.0.1:" + strconv.Itoa(port),
				Path:     "/postgres",
				RawQuery: "sslmode=disable",
			}).String()
			s.Description = fmt.Sprintf("%s from %s, on port %d of this machine only", s.version(ctx), bin, port)
			return s, nil
		}
		if try == portTries || !strings.Contains(s.log.tail(), "Address already in use") {
			return nil, fmt.Errorf("start PostgreSQL with %s: %w", bin, err)
		}
	}
}

func (s *Server) data() string { return filepath.Join(s.folder, "data") }

func (s *Server) initialize(ctx context.Context, password string) error {
	ctx, cancel := context.WithTimeout(ctx, initWithin)
	defer cancel()
	file := filepath.Join(s.folder, "password")
	if err := os.WriteFile(file, []byte(password), 0o600); err != nil {
		return err
	}
	if err := s.programs.account.handOver(file); err != nil {
		return err
	}
	_, err := s.programs.run(ctx, "initdb", "--pgdata="+s.data(), "--username="+superuser,
		"--auth=scram-sha-256", "--pwfile="+file, "--encoding=UTF8", "--locale=C", "--no-sync")
	return errors.Join(err, os.Remove(file))
}

// start returns when the server accepts connections.
func (s *Server) start(ctx context.Context, port int) error {
	cmd := s.programs.command("postgres", "-D", s.data())
	for _, setting := range []string{
		"listen_addresses=127.0.0.1",
		"port=" + strconv.Itoa(port),
		"unix_socket_directories=",
		"shared_buffers=32MB",
		"fsync=off", // the data need not outlive the server
		"logging_collector=off",
		"log_destination=stderr",
		"lc_messages=C", // for log to understand
	} {
		cmd.Args = append(cmd.Args, "-c", setting)
	}
	s.log = newLog()
	cmd.Stderr = s.log
	if err := cmd.Start(); err != nil {
		return err
	}
	s.ended, s.kill = make(chan struct{}), cmd.Process.Kill
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(s.ended)
	}()
	timer := time.NewTimer(startWithin)
	defer timer.Stop()
	select {
	case <-s.log.ready:
		return nil
	case <-s.ended:
		return fmt.Errorf("it ended at once:\n%s", s.log.tail())
	case <-timer.C:
		return errors.Join(fmt.Errorf("not ready after %v:\n%s", startWithin, s.log.tail()), s.stop())
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), s.stop())
	}
}

// Ended is closed when the server is not running any more.
func (s *Server) Ended() <-chan struct{} { return s.ended }

// Close ends the server and removes its files.
func (s *Server) Close() error {
	return errors.Join(s.stop(), os.RemoveAll(s.folder))
}

func (s *Server) stop() error {
	select {
	case <-s.ended:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	if _, err := s.programs.run(ctx, "pg_ctl", "stop", "-D", s.data(), "-m", "immediate"); err != nil {
		if killErr := s.kill(); killErr != nil && !errors.Is(killErr, os.ErrProcessDone) {
			return errors.Join(err, killErr)
		}
	}
	<-s.ended
	return nil
}

// version is for instance "PostgreSQL 17.2".
func (s *Server) version(ctx context.Context) string {
	output, err := s.programs.run(ctx, "postgres", "--version")
	_, number, ok := strings.Cut(output, "(PostgreSQL) ")
	if err != nil || !ok {
		return "PostgreSQL"
	}
	number, _, _ = strings.Cut(strings.TrimSpace(number), " ")
	return "PostgreSQL " + number
}

// programs are PostgreSQL's, run by the server's account.
type programs struct {
	bin, folder string
	account     account
}

func (p programs) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(p.bin, name), args...)
	p.prepare(cmd)
	return cmd
}

func (p programs) prepare(cmd *exec.Cmd) {
	cmd.Dir = p.folder
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "PG") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	cmd.Env = append(cmd.Env, "LC_ALL=C")
	cmd.SysProcAttr = p.account.attributes()
}

// run calls a program that does its work and ends.
func (p programs) run(ctx context.Context, name string, args ...string) (output string, err error) {
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, name), args...)
	p.prepare(cmd)
	return runToEnd(ctx, cmd)
}

// runToEnd asks the command to end when ctx does, and makes it end soon after.
func runToEnd(ctx context.Context, cmd *exec.Cmd) (output string, err error) {
	cmd.Cancel = func() error { return interrupt(cmd.Process) }
	cmd.WaitDelay = stopWithin
	all, err := cmd.CombinedOutput()
	if err == nil {
		return string(all), nil
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	return "", fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, lastLines(string(all)))
}

func lastLines(text string) string {
	const most = 8
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}
