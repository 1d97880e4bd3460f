package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// signals hears what is sent to dblock. A signal ends the context, unless a
// command runs (exec): then the signal is the command's.
type signals struct {
	heard  chan os.Signal
	cancel context.CancelCauseFunc
	loop   sync.WaitGroup

	mu     sync.Mutex
	passOn func(os.Signal)
}

// signalError is the cause of a context that a signal ended.
type signalError struct{ signal syscall.Signal }

func (e signalError) Error() string { return fmt.Sprintf("stopped by signal: %v", e.signal) }

func hearSignals(ctx context.Context) (context.Context, *signals) {
	s := &signals{heard: make(chan os.Signal, 16)}
	ctx, s.cancel = context.WithCancelCause(ctx)
	for _, sig := range passedOn {
		// Who starts dblock under nohup wants SIGHUP ignored.
		if !signal.Ignored(sig) {
			signal.Notify(s.heard, sig)
		}
	}
	s.loop.Go(func() {
		for sig := range s.heard {
			s.deliver(sig)
		}
	})
	return ctx, s
}

func (s *signals) stop() {
	signal.Stop(s.heard)
	close(s.heard)
	s.loop.Wait()
	s.cancel(context.Canceled)
}

func (s *signals) deliver(sig os.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.passOn != nil {
		s.passOn(sig)
	}
	switch {
	case isJobControl(sig):
		suspend(sig)
	case s.passOn == nil:
		s.cancel(signalError{sig.(syscall.Signal)})
	}
}

// handOver starts what gets the signals from now on. It does not start it if a
// signal was first, and returns the cause.
func (s *signals) handOver(ctx context.Context, start func() (passOn func(os.Signal), err error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	passOn, err := start()
	s.passOn = passOn
	return err
}
