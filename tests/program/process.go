package program

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// Process is a program that tells on standard output, a line at a time, how far it
// got. It ends with the test at the latest.
type Process struct {
	t      testing.TB
	cmd    *exec.Cmd
	lines  chan string // what it printed, closed at its end
	stderr bytes.Buffer
	stdin  io.Closer // open: a program that hangs ends with it
	wait   func() error
}

// Worker starts a command of tests/worker.
func Worker(t testing.TB, args ...string) *Process {
	t.Helper()
	return Start(t, exec.Command(Build(t, "tests/worker"), args...))
}

// Start starts a program.
func Start(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	p := &Process{t: t, cmd: cmd, lines: make(chan string, 1000)}
	p.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // else each exit takes a second
	p.cmd.Stderr = &p.stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(p.lines)
		for scanner := bufio.NewScanner(stdout); scanner.Scan(); {
			p.lines <- scanner.Text()
		}
	}()
	p.wait = sync.OnceValue(func() error {
		<-read // Wait closes the pipe
		if err := p.cmd.Wait(); err != nil {
			return fmt.Errorf("%p: %s", err, p.stderr.Bytes())
		}
		return nil
	})
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // an error says that it has ended
		_ = p.wait()
	})
	return p
}

// Expect reads on until the process prints a line that begins in this way, and
// returns the rest of that line.
func (p *Process) Expect(beginning string) string {
	p.t.Helper()
	bound := time.NewTimer(time.Minute)
	defer bound.Stop()
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.t.Fatalf("the process ended before %q: %v", beginning, p.wait())
			}
			if rest, ok := strings.CutPrefix(line, beginning); ok {
				return strings.TrimSpace(rest)
			}
		case <-bound.C:
			p.t.Fatalf("the process did not come to %q", beginning)
		}
	}
}

// Signal sends it a signal.
func (p *Process) Signal(sig os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// Finish waits for the end of the process and returns what was not read of it yet.
func (p *Process) Finish() []string {
	p.t.Helper()
	var rest []string
	for line := range p.lines {
		rest = append(rest, line)
	}
	if err := p.wait(); err != nil {
		p.t.Fatalf("%v", err)
	}
	return rest
}

// Kill ends the process as kill -9 does.
func (p *Process) Kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Fatal(err)
	}
	_ = p.wait() // says that it was killed
}
