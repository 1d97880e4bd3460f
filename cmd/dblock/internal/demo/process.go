package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// Command is the subcommand of ours, not for people, that the demo's processes
// run: Command ROLE NAME ARGS.
const Command = "demo-process"

const (
	// endWithin is how long a process has to end by itself when its stdin does.
	endWithin = 20 * time.Second
	// dsnVariable tells the processes the database; a password in arguments could
	// be seen by others.
	dsnVariable = "DBLOCK_DSN"
)

// cast are the processes of one act. What they tell comes out of next, one at a
// time.
type cast struct {
	exe      string
	env      []string
	timeline *timeline

	told      chan told
	closing   chan struct{}
	readers   sync.WaitGroup
	processes map[string]*process
}

// told is what a process tells, or its end.
type told struct {
	message
	by    *process
	ended bool
	err   error // of the end
}

// message is a line of a process's stdout.
type message struct {
	Event
	DSN string `json:"dsn,omitempty"` // of the throwaway server
}

type process struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stderr bytes.Buffer
	killed bool
}

func (p *play) newCast() (*cast, error) { return newCast(p.Config, p.timeline) }

func newCast(c Config, t *timeline) (*cast, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find our own program, which the demo's processes run: %w", err)
	}
	env := make([]string, 0, len(c.Env)+1)
	for _, variable := range c.Env {
		if !strings.HasPrefix(variable, dsnVariable+"=") {
			env = append(env, variable)
		}
	}
	return &cast{
		exe: exe, env: append(env, dsnVariable+"="+c.DSN), timeline: t,
		told: make(chan told), closing: make(chan struct{}), processes: map[string]*process{},
	}, nil
}

// start starts a process, which then waits for its cue.
func (c *cast) start(role, name string, args ...string) (*process, error) {
	p := &process{name: name, cmd: exec.Command(c.exe, append([]string{Command, role, name}, args...)...)}
	p.cmd.Env = c.env
	p.cmd.Stderr = &p.stderr
	p.cmd.SysProcAttr = ownGroup()
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p.stdin = stdin
	c.processes[name] = p
	c.readers.Go(func() { c.read(p, stdout) })
	return p, nil
}

// read passes on what a process tells until it ends.
func (c *cast) read(p *process, stdout io.Reader) {
	lines := json.NewDecoder(stdout)
	for {
		t := told{by: p}
		if err := lines.Decode(&t.message); err != nil {
			break
		}
		c.pass(t)
	}
	_, readErr := io.Copy(io.Discard, stdout)
	c.pass(told{by: p, ended: true, err: errors.Join(p.cmd.Wait(), readErr)})
}

func (c *cast) pass(t told) {
	select {
	case c.told <- t:
	case <-c.closing:
	}
}

// next is what a process tells next, on the timeline already. The end of a
// process that was not killed is an error unless it ended well.
func (c *cast) next(ctx context.Context) (told, error) {
	select {
	case t := <-c.told:
		if t.ended {
			delete(c.processes, t.by.name)
			if t.err != nil && !t.by.killed {
				return t, t.by.failure(t.err)
			}
			return t, nil
		}
		t.Process, t.PID = t.by.name, t.by.cmd.Process.Pid
		t.Event = c.timeline.add(t.Event)
		return t, nil
	case <-ctx.Done():
		return told{}, context.Cause(ctx)
	}
}

// failure says in one line why a process failed: what it wrote to stderr, of
// which a crash is only the first line.
func (p *process) failure(err error) error {
	line, _, _ := strings.Cut(strings.TrimSpace(p.stderr.String()), "\n")
	if line = strings.TrimPrefix(line, "dblock: "); line != "" {
		return fmt.Errorf("%s: %s", p.name, line)
	}
	return fmt.Errorf("%s: %w", p.name, err)
}

// cue waits until all processes are ready, and lets them begin at once.
func (c *cast) cue(ctx context.Context) error {
	for ready := 0; ready < len(c.processes); {
		t, err := c.next(ctx)
		if err != nil {
			return err
		}
		if t.Kind == kindReady {
			ready++
		}
	}
	for _, p := range c.processes {
		if _, err := io.WriteString(p.stdin, "\n"); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// playOut lets all processes begin and waits until they have ended.
func (c *cast) playOut(ctx context.Context) error {
	if err := c.cue(ctx); err != nil {
		return err
	}
	for len(c.processes) > 0 {
		if _, err := c.next(ctx); err != nil {
			return err
		}
	}
	return nil
}

// stop asks a process to end.
func (p *process) stop() error { return p.stdin.Close() }

// kill ends a process by SIGKILL, or what is like it.
func (p *process) kill() error {
	p.killed = true
	return p.cmd.Process.Kill()
}

// close ends what still runs and waits for it.
func (c *cast) close() {
	close(c.closing)
	for _, p := range c.processes {
		_ = p.stop() // closed before, at worst
		timer := time.AfterFunc(endWithin, func() { _ = p.cmd.Process.Kill() })
		defer timer.Stop()
	}
	c.readers.Wait()
}
