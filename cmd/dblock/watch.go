package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/alecthomas/kong"

	"github.com/dblock-go/dblock"
)

// watched are the commands that can look again and again.
type watched struct {
	Watch watch `placeholder:"PERIOD" help:"Look again and again, until a signal comes: with --watch every 2s, with --watch=500ms as often as that."`
}

// watch is a period that need not be given.
type watch time.Duration

const defaultWatch = watch(2 * time.Second)

// IsBool makes --watch good without a value.
func (*watch) IsBool() bool { return true }

// Decode reads a value that is joined to the flag.
func (w *watch) Decode(ctx *kong.DecodeContext) error {
	if ctx.Scan.Peek().Type != kong.FlagValueToken {
		*w = defaultWatch
		return nil
	}
	text := fmt.Sprint(ctx.Scan.Pop().Value)
	period, err := time.ParseDuration(text)
	if err != nil || period <= 0 {
		return fmt.Errorf("takes a time such as 500ms or 2s, not %q", text)
	}
	*w = watch(period)
	return nil
}

// show prints what look finds, once or until a signal comes.
func (w watched) show(ctx context.Context, a *app, look func(ctx context.Context, out io.Writer) error) error {
	err := w.once(ctx, a, look)
	if w.Watch == 0 {
		return err
	}
	tick := time.NewTicker(time.Duration(w.Watch))
	defer tick.Stop()
	for {
		if ctx.Err() == nil && err != nil {
			if !mayPass(err) {
				return err
			}
			a.say("%s", errorText(err))
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
		if ctx.Err() != nil {
			// A signal is the usual end and needs no words.
			var got signalError
			if errors.As(context.Cause(ctx), &got) {
				return &exitError{code: exitSignal + int(got.signal)}
			}
			return context.Cause(ctx)
		}
		err = w.once(ctx, a, look)
	}
}

// mayPass is true of a server that does not answer: it is when something is wrong that
// somebody watches. It is false of an output that is closed.
func mayPass(err error) bool {
	return errors.As(err, new(*dblock.Error)) && !errors.Is(err, dblock.ErrDenied)
}

// once prints all that was found at once, so that a signal never leaves half a line.
func (w watched) once(ctx context.Context, a *app, look func(ctx context.Context, out io.Writer) error) error {
	bounded, cancel := context.WithTimeout(ctx, longestConnect)
	defer cancel()
	var found bytes.Buffer
	if w.Watch > 0 && isTerminal(a.stdout) {
		found.WriteString("\x1b[H\x1b[2J") // clears it
	}
	if err := look(bounded, &found); err != nil {
		return err
	}
	return a.print(ctx, found.Bytes())
}

// lastLines is how long a reader has, after a signal, to take what is being printed.
const lastLines = time.Second

// print gives up after a signal where nobody reads, as of a full pipe. What it was
// about to print then ends with the process.
func (a *app) print(ctx context.Context, text []byte) error {
	printed := make(chan error, 1)
	go func() {
		_, err := a.stdout.Write(text)
		printed <- err
	}()
	select {
	case err := <-printed:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-printed:
		return err
	case <-time.After(lastLines):
		return context.Cause(ctx)
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
