//go:build linux

package bench

import (
	"bytes"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// roles are what this binary does as a worker: a process of its own, which talks
// over its standard input and output and ends with its input.
var roles = map[string]func(in *gob.Decoder, out *gob.Encoder) error{
	"contend": contend,
	"etcd":    serveEtcd,
}

const roleVariable = "DBLOCK_BENCH_ROLE"

// workIfAsked runs the process as the worker that it was started as; false if it was not.
func workIfAsked() bool {
	role, asked := os.LookupEnv(roleVariable)
	if !asked {
		return false
	}
	if err := roles[role](gob.NewDecoder(os.Stdin), gob.NewEncoder(os.Stdout)); err != nil && !errors.Is(err, io.EOF) {
		fmt.Fprintln(os.Stderr, role, "worker:", err)
		os.Exit(1)
	}
	return true
}

type worker struct {
	in  *gob.Encoder
	out *gob.Decoder
}

// startWorker starts this binary again. The worker ends with the test.
func startWorker(t testing.TB, role string) worker {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), roleVariable+"="+role, "GORACE=atexit_sleep_ms=0")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	startChild(t, cmd)
	return worker{gob.NewEncoder(stdin), gob.NewDecoder(stdout)}
}

func (w worker) send(t testing.TB, message any) {
	t.Helper()
	if err := w.in.Encode(message); err != nil {
		t.Fatalf("to a worker: %v", err)
	}
}

func (w worker) receive(t testing.TB, message any) {
	t.Helper()
	if err := w.out.Decode(message); err != nil {
		t.Fatalf("from a worker: %v", err)
	}
}

// startChild starts a process that is killed when the test ends, and by the kernel
// when this process dies.
func startChild(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // an error says that it has ended
		_ = cmd.Wait()         // says that it was killed
		if t.Failed() && stderr.Len() > 0 {
			t.Logf("%s: %s", cmd, stderr.Bytes())
		}
	})
}

func freeAddress(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// await waits until a server that was started answers.
func await(t testing.TB, what string, answers func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := answers()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not answer: %v", what, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
