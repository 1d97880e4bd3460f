//go:build unix

package main

import (
	"errors"
	"os"
	"syscall"
	"time"
	"unsafe"
)

// passedOn are the signals that exec passes on to its command.
var passedOn = []os.Signal{
	syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT,
	syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGTSTP, syscall.SIGCONT,
}

// pollGroup is how often end looks whether a process group is empty: nothing
// tells when its last process ends.
const pollGroup = 20 * time.Millisecond

// isJobControl: the signal stops or continues a process, and never ends it.
func isJobControl(sig os.Signal) bool { return sig == syscall.SIGTSTP || sig == syscall.SIGCONT }

// suspend does what SIGTSTP does to a process that does not catch it.
func suspend(sig os.Signal) {
	if sig == syscall.SIGTSTP {
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	}
}

// prepare chooses the command's process group. A group of its own lets end
// reach what the command started; but under a terminal it would cut the command
// off from the keyboard and from job control.
func (p *process) prepare() {
	p.group = !hasTerminal()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: p.group}
	dieWithParent(p.cmd.SysProcAttr)
}

// signal passes a signal on, once.
func (p *process) signal(sig os.Signal) error {
	switch sig {
	case syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTSTP:
		// The keyboard's signals go to the whole group in the foreground.
		if !p.group && inForeground() {
			return nil
		}
	}
	if p.group && isJobControl(sig) {
		// dblock stops too, and with it the watch over the lock.
		return p.kill(sig.(syscall.Signal))
	}
	return p.cmd.Process.Signal(sig)
}

// end makes the command, and what else is in its group, end: by SIGTERM, and
// after the grace by SIGKILL.
func (p *process) end(grace time.Duration) error {
	// A stopped process hears of SIGTERM only when it goes on.
	if err := errors.Join(p.kill(syscall.SIGTERM), p.kill(syscall.SIGCONT)); err != nil {
		return err
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	poll := time.NewTicker(pollGroup)
	defer poll.Stop()
	for p.running() {
		select {
		case <-poll.C:
		case <-timer.C:
			return p.kill(syscall.SIGKILL)
		}
	}
	return nil
}

func (p *process) kill(sig syscall.Signal) error {
	var err error
	if p.group {
		err = syscall.Kill(-p.cmd.Process.Pid, sig)
	} else {
		err = p.cmd.Process.Signal(sig)
	}
	if errors.Is(err, syscall.ESRCH) || errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

func (p *process) running() bool {
	if p.group {
		return !errors.Is(syscall.Kill(-p.cmd.Process.Pid, 0), syscall.ESRCH)
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// exitCodeOf is what a shell makes of an end.
func exitCodeOf(state *os.ProcessState) int {
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitSignal + int(status.Signal())
	}
	return state.ExitCode()
}

func openTerminal() (*os.File, error) {
	return os.OpenFile("/dev/tty", os.O_RDWR|syscall.O_NOCTTY, 0)
}

func hasTerminal() bool {
	tty, err := openTerminal()
	if err != nil {
		return false
	}
	defer tty.Close()
	return true
}

// inForeground: the terminal sends its signals to this process's group.
func inForeground() bool {
	tty, err := openTerminal()
	if err != nil {
		return false
	}
	defer tty.Close()
	var group int32
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, tty.Fd(), syscall.TIOCGPGRP, uintptr(unsafe.Pointer(&group)))
	return errno == 0 && int(group) == syscall.Getpgrp()
}
