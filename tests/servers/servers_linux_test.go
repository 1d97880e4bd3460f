package servers

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestServersDieWithTheBinary(t *testing.T) {
	// All of them, or there is nothing to hold.
	Postgres(t)
	MySQL(t)
	MariaDB(t)

	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "DBLOCK_TEST_HELPER=hold servers")
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	folders := map[int]string{}
	lines := bufio.NewScanner(stdout)
	for lines.Scan() && lines.Text() != "ready" {
		var pid int
		var folder string
		if _, err := fmt.Sscan(lines.Text(), &pid, &folder); err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		folders[pid] = folder
	}
	memory := sharedMemory(t, folders)
	if len(folders) == 0 {
		t.Skip("the servers are not processes")
	}
	for pid := range folders {
		if !alive(pid) {
			t.Errorf("process %d does not run", pid)
		}
	}

	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	for pid, folder := range folders {
		eventually(t, fmt.Sprintf("process %d (%s) is gone", pid, folder), func() bool { return !alive(pid) })
		// As the next test binary does it.
		own := filepath.Dir(folder)
		eventually(t, own+" is removed", func() bool {
			sweep(filepath.Dir(own))
			_, err := os.Stat(own)
			return os.IsNotExist(err)
		})
	}
	segments, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(strings.Fields(string(segments)), memory) {
		t.Errorf("PostgreSQL's shared memory %s is left", memory)
	}
}

// sharedMemory returns the id of PostgreSQL's shared memory, one of the servers in these folders.
func sharedMemory(t *testing.T, folders map[int]string) string {
	t.Helper()
	for _, folder := range folders {
		file, err := os.ReadFile(filepath.Join(folder, "data", "postmaster.pid"))
		if err == nil {
			return strings.Fields(strings.Split(string(file), "\n")[6])[1]
		}
	}
	t.Fatal("no PostgreSQL server")
	return ""
}

func TestServersDoNotRunAsRoot(t *testing.T) {
	each(t, func(t *testing.T, kind Kind) {
		pid := sharedServer(t, kind).Pid()
		if pid == 0 {
			t.Skip("the server is not a process")
		}
		info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
		if err != nil {
			t.Fatal(err)
		}
		if info.Sys().(*syscall.Stat_t).Uid == 0 {
			t.Error("the server runs as root")
		}
	})
}

// A server that stands still looks like a network that is cut; it must still be possible to go on
// and to end it.
func TestStoppedProcess(t *testing.T) {
	each(t, func(t *testing.T, kind Kind) {
		s := Start(t, kind)
		db := s.Open(t, s.DSN())
		db.SetMaxIdleConns(0)
		s.Signal(t, syscall.SIGSTOP)
		answered := make(chan error, 1)
		go func() { answered <- db.Ping() }()
		select {
		case err := <-answered:
			t.Fatalf("a stopped server answers a new connection: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		s.Signal(t, syscall.SIGCONT)
		if err := <-answered; err != nil {
			t.Errorf("after it goes on: %v", err)
		}
		s.Signal(t, syscall.SIGSTOP)
	})
}
