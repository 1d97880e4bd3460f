package servers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
)

// program is an installed binary.
type program struct {
	root string // the folder that is "/" to it, if it is in a tree of its own
	path string // as it is called inside root
}

// command prepares a call. Arguments that are paths of files are translated by inside.
func (p program) command(args ...string) *exec.Cmd {
	cmd := exec.Command(p.path, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Dir = "/"
	confine(cmd, p.root)
	return cmd
}

// inside returns the name that a file has for the program.
func (p program) inside(path string) string { return strings.TrimPrefix(path, p.root) }

// run calls a program that does its work and ends, and returns its output.
func run(ctx context.Context, cmd *exec.Cmd) (string, error) {
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := startProcess(cmd); err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { cmd.Process.Kill() })
	defer stop()
	if err := cmd.Wait(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", cmd.Path, err, tail(output.String()))
	}
	return output.String(), nil
}

// starts takes what is to run on the parent thread. The kernel ends our processes when the thread
// that started them ends, so one thread that lasts as long as this process starts them all.
var starts = sync.OnceValue(func() chan<- func() {
	starts := make(chan func())
	go func() {
		runtime.LockOSThread()
		for start := range starts {
			start()
		}
	}()
	return starts
})

func startProcess(cmd *exec.Cmd) error {
	result := make(chan error, 1)
	starts() <- func() { result <- cmd.Start() }
	return <-result
}

// process is a server process, the usual engine.
type process struct {
	command func() *exec.Cmd
	folder  string // its files; removed with it
	// Signals to end it: in order, and at once when its data is not needed any more.
	orderly, discard os.Signal

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{}
}

func (p *process) start(context.Context) error {
	log, err := os.OpenFile(p.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := p.command()
	cmd.Stdout, cmd.Stderr = log, log
	if err := startProcess(cmd); err != nil {
		return err
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(exited)
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd, p.exited = cmd, exited
	return nil
}

func (p *process) current() (*os.Process, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process, p.exited
}

func (p *process) running() bool {
	_, exited := p.current()
	select {
	case <-exited:
		return false
	default:
		return true
	}
}

func (p *process) pid() int {
	proc, _ := p.current()
	return proc.Pid
}

func (p *process) signal(sig os.Signal) error {
	proc, _ := p.current()
	return proc.Signal(sig)
}

func (p *process) kill() error {
	proc, exited := p.current()
	if err := killTree(proc); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return await(exited)
}

func (p *process) stop() error { return p.end(p.orderly) }

// end sends a signal and kills the process if that does not end it.
func (p *process) end(sig os.Signal) error {
	proc, exited := p.current()
	if err := proc.Signal(sig); err == nil {
		resume(proc)
		if await(exited) == nil {
			return nil
		}
	}
	return p.kill()
}

func await(exited <-chan struct{}) error {
	select {
	case <-exited:
		return nil
	case <-time.After(stopTimeout):
		return errors.New("the process does not end")
	}
}

func (p *process) remove() {
	if err := errors.Join(p.end(p.discard), removeFolder(p.folder)); err != nil {
		fmt.Fprintf(os.Stderr, "servers: %v\n", err)
	}
}

func (p *process) log() string { return filepath.Join(p.folder, "log") }

func (p *process) logTail() string {
	log, err := os.ReadFile(p.log())
	if err != nil {
		return err.Error()
	}
	return tail(string(log))
}

// tail returns the last lines of a text.
func tail(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-25):], "\n")
}

const folderPrefix = "dblock-servers-"

// newFolder makes a folder for a server's files, in this test binary's own folder below parent.
func (r *registry) newFolder(parent, name string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	own, ok := r.folders[parent]
	if !ok {
		sweep(parent)
		var err error
		own, err = os.MkdirTemp(parent, fmt.Sprintf("%s%d-", folderPrefix, os.Getpid()))
		if err != nil {
			return "", err
		}
		// The servers may run as another user, who has to get to the folders within.
		if err := os.Chmod(own, 0o711); err != nil {
			return "", err
		}
		r.folders[parent] = own
	}
	return os.MkdirTemp(own, name+"-")
}

// sweep removes the folders of test binaries that ended before they could do it.
func sweep(parent string) {
	folders, _ := filepath.Glob(filepath.Join(parent, folderPrefix+"*"))
	for _, folder := range folders {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(folder), folderPrefix), "-")
		if n, err := strconv.Atoi(pid); err == nil && !alive(n) {
			servers, _ := filepath.Glob(filepath.Join(folder, "*"))
			for _, server := range servers {
				_ = removeFolder(server)
			}
			_ = os.RemoveAll(folder) // another user's stays
		}
	}
}

// removeFolder removes the files of a server that has ended.
func removeFolder(folder string) error {
	// PostgreSQL writes key and id of its shared memory to the seventh line of this file, and leaves
	// both the memory and the file behind when it is killed.
	file, _ := os.ReadFile(filepath.Join(folder, "data", "postmaster.pid"))
	if lines := strings.Split(string(file), "\n"); len(lines) > 6 {
		var key, id int
		if _, err := fmt.Sscan(lines[6], &key, &id); err == nil {
			removeSharedMemory(key, id)
		}
	}
	return os.RemoveAll(folder)
}

// freePort picks a port below those that the system gives to outgoing connections, so that it is
// still free when a server restarts.
func freePort() (int, error) {
	var err error
	for range 20 {
		port := 20000 + rand.IntN(10000)
		var l net.Listener
		if l, err = net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port)); err == nil {
			return port, l.Close()
		}
	}
	return 0, err
}
