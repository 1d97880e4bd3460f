package servers

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// nobody is the user that servers run as when we are root: they refuse root.
const nobody = 65534

func isRoot() bool { return os.Geteuid() == 0 }

// confine makes a command end with this process and run without root's rights.
func confine(cmd *exec.Cmd, root string) {
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:    root,
		Setpgid:   true, // the terminal's Ctrl-C is for the tests, which then end the server
		Pdeathsig: syscall.SIGKILL,
	}
	if isRoot() {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
}

// handOver gives a folder to the user that servers run as.
func handOver(folder string) error {
	if !isRoot() {
		return nil
	}
	return filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, nobody, nobody)
	})
}

// killTree kills a process and its children, and waits until the children are gone.
func killTree(p *os.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil { // no new children from here on
		return err
	}
	pid := strconv.Itoa(p.Pid)
	list, _ := os.ReadFile(filepath.Join("/proc", pid, "task", pid, "children"))
	if err := p.Kill(); err != nil {
		return err
	}
	var children []int
	for _, field := range strings.Fields(string(list)) {
		if child, err := strconv.Atoi(field); err == nil {
			_ = syscall.Kill(child, syscall.SIGKILL) // it may have ended by itself
			children = append(children, child)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	return poll(ctx, func() bool {
		for _, child := range children {
			if alive(child) {
				return false
			}
		}
		return true
	})
}

func removeSharedMemory(key, id int) {
	var segment unix.SysvShmDesc
	if _, err := unix.SysvShmCtl(id, unix.IPC_STAT, &segment); err == nil && int(segment.Perm.Key) == key {
		_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	}
}

// resume lets a stopped process see its other signals.
func resume(p *os.Process) { _ = p.Signal(syscall.SIGCONT) }

// alive says whether a process exists and is more than a zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ESRCH)
	}
	// The state follows the command's name, which is in parentheses.
	_, state, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')'):]), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}
