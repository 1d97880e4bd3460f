package command_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"
)

// The command of a dblock that was killed must not go on unguarded.
func TestExecKilled(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		p := start(t, d.dsn, "exec", "--key", "job", "--", "sh", "-c", "echo ready; read x")
		p.stdout.expect(t, "ready")
		p.signal(syscall.SIGKILL)
		p.stdout.all(t) // ends only when the command has ended
		run(t, d.dsn, 0, "exec", "--wait", "30s", "--key", "job", "--", "true")
	})
}

func TestExecPassesNoConnectionOn(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		stdout, _ := run(t, d.dsn, 0, "exec", "--key", "job", "--", "sh", "-c", "ls -l /proc/$$/fd")
		if !strings.Contains(stdout, "2 -> pipe:") || strings.Contains(stdout, "socket:") {
			t.Errorf("open files of the command:\n%s", stdout)
		}
	})
}

// Ctrl-C reaches everything in the foreground, and so the command, once.
func TestExecUnderATerminal(t *testing.T) {
	d := onPostgres(t)
	keyboard, terminal := openTerminal(t)
	p := &process{t: t, ended: make(chan struct{})}
	p.cmd = command(t, d.dsn, "exec", "--key", "job", "--", "sh", "-c",
		`trap 'n=$((n+1)); echo interrupt $n' INT; trap 'echo total $n; exit 7' TERM; echo ready; while :; do sleep 0.1; done`)
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = terminal, terminal, terminal
	p.cmd.SysProcAttr.Setctty = true
	p.run(keyboard, strings.NewReader(""))
	terminal.Close()

	p.stdout.expect(t, "ready")
	if _, err := io.WriteString(keyboard, "\x03"); err != nil {
		t.Fatal(err)
	}
	p.stdout.expect(t, "interrupt 1")
	p.signal(syscall.SIGTERM)
	p.stdout.expect(t, "total 1")
	p.exit(7)
}

// SIGTSTP and SIGCONT suspend and continue dblock, its command and what that
// started together: none of it must go on while nobody watches over the lock.
func TestExecJobControl(t *testing.T) {
	d := onPostgres(t)
	p := start(t, d.dsn, "exec", "--key", "job", "--", "sh", "-c", "sh -c 'echo $$; exec sleep 60' & echo $$; read x; kill $!; exit 0")
	pids := []int{p.cmd.Process.Pid}
	for range 2 {
		pid, err := strconv.Atoi(p.stdout.expect(t, ""))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	all := func(stopped bool) func() bool {
		return func() bool {
			return !slices.ContainsFunc(pids, func(pid int) bool { return (processState(t, pid) == "T") != stopped })
		}
	}
	p.signal(syscall.SIGTSTP)
	eventually(t, "all are stopped", all(true))
	p.signal(syscall.SIGCONT)
	eventually(t, "all go on", all(false))
	p.release()
}

// processState is the third field of https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
func processState(t *testing.T, pid int) string {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))[0]
}

// openTerminal is a new pseudo-terminal: https://man7.org/linux/man-pages/man4/ptmx.4.html
func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skip("needs pseudo-terminals: ", err)
	}
	t.Cleanup(func() { master.Close() })
	var number, unlocked int32
	for request, value := range map[uintptr]*int32{syscall.TIOCGPTN: &number, syscall.TIOCSPTLCK: &unlocked} {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, master.Fd(), request, uintptr(unsafe.Pointer(value))); errno != 0 {
			t.Fatal(errno)
		}
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return master, slave
}
