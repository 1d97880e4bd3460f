package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

type execCmd struct {
	Keys             []keyArg       `name:"key" short:"k" sep:"none" required:"" placeholder:"K" help:"A key to hold; may be repeated. See below for how keys are written."`
	Try              bool           `xor:"wait" help:"Do not wait for a key that another session holds."`
	Wait             *time.Duration `xor:"wait" placeholder:"30s" help:"How long to wait for the keys at most; 0 is --try. Default: until they are free. Connecting, beforehand, may take as long again, but 2s at least and 30s at most; if it takes longer, the exit code is 1."`
	Shared           bool           `help:"Hold the keys beside others who share them (PostgreSQL, SQL Server)."`
	Fence            bool           `help:"Draw a fencing number for the first key from the lock table (see setup) and give it to the command as DBLOCK_TOKEN."`
	Schema           string         `placeholder:"NAME" help:"The schema of that lock table. Default: the connection's own."`
	Table            string         `default:"locks" help:"The name of that lock table. Default: ${default}."`
	ConflictExitCode int            `default:"75" placeholder:"N" help:"The exit code when the keys were not acquired. Default: ${default}."`
	KillAfter        time.Duration  `default:"10s" help:"When the lock is lost: how long the command has from SIGTERM to SIGKILL. Default: ${default}."`
	Command          []string       `arg:"" passthrough:"partial" name:"command" help:"The command and its arguments."`
}

// Help is shown by dblock exec --help.
func (execCmd) Help() string {
	return keyHelp + `

The command runs while dblock holds the keys, with dblock's own environment, standard input, output and error. When it ends, the keys are free, whatever it left running in the background, and dblock exits with its code.

SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP and SIGCONT are passed on to the command; while dblock still waits for the keys, they end the wait (SIGTSTP and SIGCONT: suspend it). What a terminal sends to all its foreground processes is not sent twice.

If the database ends the session that holds the keys, the command gets SIGTERM, then SIGKILL, and so does what it started: without a controlling terminal the command runs in a process group of its own for that. Under a terminal it stays in dblock's group, so that job control works, and only the command itself is ended.

If dblock is killed by SIGKILL, the database frees the keys. On Linux the command itself is then killed too; what it started goes on unguarded, and so does the command elsewhere.`
}

const tokenVariable = "DBLOCK_TOKEN"

// Validate is called when the command line has been read.
func (c *execCmd) Validate() error {
	switch {
	case c.Wait != nil && *c.Wait < 0:
		return fmt.Errorf("--wait %v: must not be negative", *c.Wait)
	case c.KillAfter < 0:
		return fmt.Errorf("--kill-after %v: must not be negative", c.KillAfter)
	case c.ConflictExitCode < 0 || c.ConflictExitCode > 255:
		return fmt.Errorf("--conflict-exit-code %d: must be from 0 to 255", c.ConflictExitCode)
	}
	return nil
}

func (c *execCmd) Run(ctx context.Context, a *app) error {
	cmd, err := c.command(a)
	if err != nil {
		return err
	}
	var wait time.Duration
	if c.Wait != nil {
		wait = *c.Wait
	}
	db, err := a.database(ctx, wait)
	if err != nil {
		return err
	}
	return closing(db, c.runGuarded(ctx, a, db, cmd))
}

// command finds the program before anything is locked.
func (c *execCmd) command(a *app) (*exec.Cmd, error) {
	args := c.Command
	if args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		return nil, &exitError{exitUsage, errors.New("no command after --")}
	}
	path, err := exec.LookPath(args[0])
	switch {
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return nil, &exitError{exitNotFound, fmt.Errorf("command not found: %w", err)}
	case err != nil:
		return nil, &exitError{exitCannotExec, fmt.Errorf("cannot execute the command: %w", err)}
	}
	return &exec.Cmd{Path: path, Args: args, Env: a.env, Stdin: a.stdin, Stdout: a.stdout, Stderr: a.stderr}, nil
}

func (c *execCmd) runGuarded(ctx context.Context, a *app, db dblock.DB, cmd *exec.Cmd) error {
	observer, stop := a.announceLate()
	defer stop()
	locks, err := advisory.New(db, &advisory.Options{
		Application: application(cmd.Args[0]),
		Fencing:     c.Fence,
		Schema:      c.Schema,
		Table:       c.Table,
		Observer:    observer,
	})
	if err != nil {
		return err
	}
	defer locks.Close()
	lock, err := c.lock(ctx, locks)
	stop()
	if err != nil {
		return err
	}
	if c.Fence {
		cmd.Env = append(cmd.Env[:len(cmd.Env):len(cmd.Env)], fmt.Sprintf("%s=%d", tokenVariable, lock.Token()))
	}

	code, err := c.runHolding(ctx, a, cmd, lock)
	if releaseErr := lock.Release(context.WithoutCancel(ctx)); releaseErr != nil {
		return &exitError{exitLost, errors.Join(err, fmt.Errorf("the command did not hold its keys until its end: %w", releaseErr))}
	}
	if err != nil {
		return err
	}
	return &exitError{code: code}
}

func (c *execCmd) lock(ctx context.Context, locks *advisory.Locker) (*advisory.Lock, error) {
	keys := make([]dblock.Key, len(c.Keys))
	for i, k := range c.Keys {
		keys[i] = k.Key
		if c.Shared {
			keys[i] = k.Shared()
		}
	}
	acquire := locks.Lock
	switch {
	case c.Try, c.Wait != nil && *c.Wait == 0:
		acquire = locks.TryLock
	case c.Wait != nil:
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, *c.Wait)
		defer cancel()
	}
	lock, err := acquire(ctx, keys...)
	if errors.Is(err, dblock.ErrNotAcquired) || errors.Is(err, dblock.ErrTimeout) {
		err = &exitError{c.ConflictExitCode, err}
	}
	return lock, err
}

// runHolding runs the command until it ends, or makes it end when the lock is
// lost, and returns its exit code.
func (c *execCmd) runHolding(ctx context.Context, a *app, cmd *exec.Cmd, lock *advisory.Lock) (int, error) {
	// On Linux the command dies with the thread that started it (see
	// dieWithParent), so that thread must live as long as the command.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	var p *process
	err := a.signals.handOver(ctx, func() (passOn func(os.Signal), err error) {
		p, err = startProcess(cmd)
		if err != nil {
			return nil, &exitError{exitCannotExec, fmt.Errorf("cannot execute the command: %w", err)}
		}
		return func(sig os.Signal) {
			if err := p.signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
				a.say("cannot pass %v on to the command: %v", sig, err)
			}
		}, nil
	})
	if err != nil {
		return 0, err
	}
	select {
	case <-p.ended:
	case <-lock.Done():
		a.say("lost the lock, ending the command")
		if err := p.end(c.KillAfter); err != nil {
			a.say("cannot end the command: %v", err)
		}
		<-p.ended
	}
	return p.exitCode()
}

// process is the command while it runs. Its methods signal, end and exitCode,
// and how it is started, are the operating system's matter.
type process struct {
	cmd *exec.Cmd
	// group: the command leads a process group of its own.
	group bool

	ended chan struct{} // closed when cmd has been waited for
	err   error         // what that returned
}

func startProcess(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, ended: make(chan struct{})}
	p.prepare()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		p.err = cmd.Wait()
	}()
	return p, nil
}

func (p *process) exitCode() (int, error) {
	var exit *exec.ExitError
	if p.err != nil && !errors.As(p.err, &exit) {
		return 0, fmt.Errorf("wait for the command: %w", p.err)
	}
	return exitCodeOf(p.cmd.ProcessState), nil
}

// application is what the server's views show for a command: at most as long as
// PostgreSQL keeps it.
func application(command string) string {
	const longest = 63
	name := "dblock exec " + filepath.Base(command)
	if len(name) > longest {
		name = strings.ToValidUTF8(name[:longest], "")
	}
	return name
}
