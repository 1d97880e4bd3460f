// Command dblock locks with the database that you already run: it runs commands
// and migrations one at a time, and shows who holds and who waits.
//
// See dblock --help, and dblock COMMAND --help.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"

	"github.com/alecthomas/kong"

	"github.com/dblock-go/dblock"
)

// commandLine is everything that can be asked of the command.
type commandLine struct {
	DSN     string           `name:"dsn" placeholder:"URL" help:"The database: postgres://, mysql://, mariadb:// or sqlserver://, then user:password@host:port/name. Default: the environment's DBLOCK_DSN, which keeps the password out of the list of processes."`
	Version kong.VersionFlag `help:"Print the version and exit."`

	Exec    execCmd    `cmd:"" help:"Run a command while holding keys: flock(1) over the database."`
	Migrate migrateCmd `cmd:"" help:"Run goose migrations, one process at a time."`
	Setup   setupCmd   `cmd:"" help:"Create the lock table that fencing and row locks use."`
	Ls      lsCmd      `cmd:"" help:"List who holds and who waits for advisory locks."`
	Graph   graphCmd   `cmd:"" help:"Show who waits for whom, for keys, rows and tables, and the deadlocks."`
	Doctor  doctorCmd  `cmd:"" help:"Look at what is behind the DSN, whether locks are safe there, and what to change."`
	Bench   benchCmd   `cmd:"" help:"Measure what locks cost on this database, in round trips."`
	Hash    hashCmd    `cmd:"" help:"Show what each database locks for a key. Needs no database."`
	Demo    demoCmd    `cmd:"" help:"Show the three uses at work, on a throwaway PostgreSQL or on --dsn."`

	DemoProcess demoProcessCmd `cmd:"" hidden:""`
}

const description = `Locks with the database that you already run.

Results go to stdout, as JSON with --json (all but exec); errors go to stderr.

Exit codes:
  0        done
  1        failed, also to connect; locks would not be safe here (doctor);
           something could not be measured (bench)
  2        wrong usage
  75       not acquired: held by another session (exec, migrate)
  76       lost: the database ended the session that held the lock (exec)
  126,127  the command cannot be executed, was not found (exec)
  128+n    ended by signal n: dblock itself, or the command (exec)
Otherwise exec exits with the code of its command.`

// The exit codes are part of what the command promises. See description.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitNotAcquired = 75 // EX_TEMPFAIL
	exitLost        = 76
	exitCannotExec  = 126
	exitNotFound    = 127
	exitSignal      = 128
)

func main() {
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, env: os.Environ(), open: openDatabase}
	os.Exit(a.main(context.Background(), os.Args[1:]))
}

// app is what the commands work with.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	env            []string
	open           func(ctx context.Context, dsn string, allowUnsafe bool) (dblock.DB, error)

	dsn      string
	signals  *signals
	stderrMu sync.Mutex
}

// main runs one command line and returns its exit code.
func (a *app) main(ctx context.Context, args []string) int {
	ctx, a.signals = hearSignals(ctx)
	defer a.signals.stop()
	err := a.run(ctx, args)
	if text := errorText(err); text != "" {
		a.say("%s", text)
	}
	return exitCode(ctx, err)
}

func (a *app) run(ctx context.Context, args []string) error {
	var line commandLine
	exited := false // after --help and --version
	parser, err := kong.New(&line,
		kong.Name("dblock"),
		kong.Description(description),
		kong.ConfigureHelp(kong.HelpOptions{NoAppDescFormat: true}),
		kong.Vars{"version": version()},
		kong.Writers(a.stdout, a.stderr),
		kong.Exit(func(int) { exited = true }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(a),
	)
	if err != nil {
		return err
	}
	parsed, err := parser.Parse(args)
	if exited {
		return nil
	}
	if err != nil {
		return &exitError{exitUsage, fmt.Errorf("%s; see dblock --help", usageText(err))}
	}
	a.dsn = line.DSN
	return parsed.Run()
}

// usageText is an error of the parser without passwords. A number with a minus
// in front looks like a flag to the parser, whose way out would not help: nothing
// here is negative.
func usageText(err error) string {
	text := password.ReplaceAllString(err.Error(), "$1:***@")
	if m := negativeValue.FindStringSubmatch(text); m != nil {
		return fmt.Sprintf("%s %s: must not be negative", m[1], m[2])
	}
	if m := negativeArg.FindStringSubmatch(text); m != nil {
		return fmt.Sprintf(`%[1]s is taken for a flag: a version is at least 1; for a key write "-- %[1]s"`, m[1])
	}
	return text
}

var (
	negativeValue = regexp.MustCompile(`^(--[a-z-]+): expected \w+ value but got "(-\d[^"]*)"`)
	negativeArg   = regexp.MustCompile(`^unknown flag (-\d)`)
)

// password is what stands between a user's name and a host: a DSN that was given
// where none is expected is part of the parser's error.
var password = regexp.MustCompile(`([^\s:@]+):\S+@`)

// say writes one line to stderr.
func (a *app) say(format string, args ...any) {
	a.stderrMu.Lock()
	defer a.stderrMu.Unlock()
	fmt.Fprintf(a.stderr, "dblock: "+format+"\n", args...)
}

// exitError is an error with an exit code of its own. Without a cause there is
// nothing to be said, only the code.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func exitCode(ctx context.Context, err error) int {
	if err == nil {
		return 0
	}
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	var got signalError
	if errors.As(context.Cause(ctx), &got) {
		return exitSignal + int(got.signal)
	}
	if errors.Is(err, dblock.ErrInvalidKey) || errors.Is(err, dblock.ErrInvalidOption) {
		return exitUsage
	}
	return exitFailed
}

// errorText is an error in one line, however many its cause took, without the
// prefixes that the line begins with already, and without what could steer a
// terminal: servers repeat what they were sent.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return strings.ReplaceAll(printable(oneLine(err.Error())), "dblock: ", "")
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

func version() string {
	module := "(unknown)"
	if info, ok := debug.ReadBuildInfo(); ok {
		module = info.Main.Version
	}
	return fmt.Sprintf("dblock %s %s %s/%s", module, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
