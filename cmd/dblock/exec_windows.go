package main

import (
	"errors"
	"os"
	"syscall"
	"time"
)

// passedOn are the signals that exec's command gets, too. The console sends
// them to every process that is attached to it.
var passedOn = []os.Signal{os.Interrupt, syscall.SIGTERM}

func isJobControl(os.Signal) bool { return false }

func suspend(os.Signal) {}

func (p *process) prepare() {}

// signal does nothing: see passedOn.
func (p *process) signal(os.Signal) error { return nil }

// end ends the command at once: there is no signal that asks it to end.
func (p *process) end(time.Duration) error {
	err := p.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

func exitCodeOf(state *os.ProcessState) int { return state.ExitCode() }
