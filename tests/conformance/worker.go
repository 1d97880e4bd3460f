package conformance

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/dblock-go/dblock/tests/program"
)

// worker is a process that runs a command of tests/worker. It ends with the
// test at the latest.
type worker struct {
	t      testing.TB
	cmd    *exec.Cmd
	lines  chan string // what it printed, closed at its end
	stderr bytes.Buffer
	stdin  io.Closer // open: a worker that hangs ends with it
	wait   func() error
}

func startWorker(t testing.TB, args ...string) *worker {
	t.Helper()
	w := &worker{t: t, cmd: exec.Command(program.Build(t, "tests/worker"), args...), lines: make(chan string, 1000)}
	w.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // else each exit takes a second
	w.cmd.Stderr = &w.stderr
	stdout, err := w.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(w.lines)
		for scanner := bufio.NewScanner(stdout); scanner.Scan(); {
			w.lines <- scanner.Text()
		}
	}()
	w.wait = sync.OnceValue(func() error {
		<-read // Wait closes the pipe
		if err := w.cmd.Wait(); err != nil {
			return fmt.Errorf("%w: %s", err, w.stderr.Bytes())
		}
		return nil
	})
	t.Cleanup(func() {
		_ = w.cmd.Process.Kill() // an error says that it has ended
		_ = w.wait()
	})
	return w
}

// expect reads on until the worker prints the line.
func (w *worker) expect(want string) {
	w.t.Helper()
	ctx := testContext(w.t)
	for {
		select {
		case line, ok := <-w.lines:
			if !ok {
				w.t.Fatalf("the worker ended before %q: %v", want, w.wait())
			}
			if line == want {
				return
			}
		case <-ctx.Done():
			w.t.Fatalf("the worker did not come to %q", want)
		}
	}
}

// finish waits for the end of a worker and returns what was not read of it yet.
func (w *worker) finish() []string {
	w.t.Helper()
	var rest []string
	for line := range w.lines {
		rest = append(rest, line)
	}
	if err := w.wait(); err != nil {
		w.t.Fatalf("worker: %v", err)
	}
	return rest
}

// kill ends the worker as kill -9 does.
func (w *worker) kill() {
	w.t.Helper()
	if err := w.cmd.Process.Kill(); err != nil {
		w.t.Fatal(err)
	}
	_ = w.wait() // says that it was killed
}
