//go:build linux

package torture

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock/tests/torture/history"
)

// process is a worker under test.
type process struct {
	name    string
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	stderr  bytes.Buffer
	drained chan struct{} // closed when it says that it is
	ended   chan struct{} // closed when it has ended and all that it wrote is read
	killed  bool

	mu      sync.Mutex
	records []history.Record
	err     error // of reading or of the process
}

func startProcess(t testing.TB, program string, plan history.Plan) *process {
	t.Helper()
	argument, err := json.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{name: plan.Name, cmd: exec.Command(program, "torture", string(argument)),
		drained: make(chan struct{}), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", "GOTRACEBACK=all")
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
	go func() {
		defer close(p.ended)
		err := history.Read(stdout, p.add)
		if err != nil {
			_ = p.cmd.Process.Kill() // it could write no more
		}
		err = errors.Join(err, p.cmd.Wait())
		p.mu.Lock()
		defer p.mu.Unlock()
		p.err = err
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // an error says that it has ended
		<-p.ended
	})
	return p
}

func (p *process) add(r history.Record) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.records = append(p.records, r)
	if r.What == history.Drained {
		close(p.drained)
	}
}

// kill ends the process as kill -9 does.
func (p *process) kill() {
	p.killed = true
	_ = p.cmd.Process.Kill() // an error says that it has ended
	<-p.ended
}

// drain tells the process to hold nothing and to ask for nothing any more.
func (p *process) drain() error {
	_, err := io.WriteString(p.stdin, "drain\n")
	return err
}

// finish lets the process end by itself.
func (p *process) finish() error { return p.stdin.Close() }

// within waits for something of the process. One that does not come to it is
// made to show where its goroutines are.
func (p *process) within(limit time.Duration, what string, done <-chan struct{}) []violation {
	const toDump = 10 * time.Second
	select {
	case <-done:
		return nil
	case <-p.ended:
		return nil // finished says why
	case <-time.After(limit):
	}
	_ = p.cmd.Process.Signal(syscall.SIGQUIT)
	select {
	case <-p.ended:
	case <-time.After(toDump):
		p.kill()
	}
	p.killed = true
	return []violation{{"hang", fmt.Sprintf("%s has not %s within %v; its goroutines:\n%s", p.name, what, limit, p.stderr.Bytes())}}
}

// finished says how a process that has ended did so, if not as it should: data
// races and panics are on its standard error.
func (p *process) finished() []violation {
	<-p.ended
	p.mu.Lock()
	defer p.mu.Unlock()
	if (p.err == nil || p.killed) && p.stderr.Len() == 0 {
		return nil
	}
	return []violation{{"process", fmt.Sprintf("%s: %v: %s", p.name, p.err, p.stderr.Bytes())}}
}

func (p *process) history() []history.Record {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.records
}
