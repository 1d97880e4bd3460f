package main

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dblock-go/dblock"
)

// longWait is the wait that a command started by cron may have without being
// told about it in a mail.
const longWait = 2 * time.Second

// announce is an observer that says on stderr who is waited for.
func (a *app) announce() dblock.Observer {
	return dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		if e.Kind == dblock.EventWaiting {
			a.sayWaiting(e)
		}
	})
}

// announceLate is one that says so once, after a long wait. It ends with stop.
func (a *app) announceLate() (observer dblock.Observer, stop func() bool) {
	var waiting atomic.Pointer[dblock.Event]
	timer := time.AfterFunc(longWait, func() {
		if e := waiting.Load(); e != nil {
			a.sayWaiting(*e)
		}
	})
	return dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		if e.Kind == dblock.EventWaiting {
			waiting.Store(&e)
		}
	}), timer.Stop
}

func (a *app) sayWaiting(e dblock.Event) {
	names := make([]string, len(e.Keys))
	for i, k := range e.Keys {
		names[i] = k.String()
	}
	text := "waiting for " + strings.Join(names, ", ")
	switch {
	case e.Blocker != nil:
		text += ", " + dblock.DescribeBlocker(*e.Blocker)
	case e.Err != nil:
		text += "; who holds it is unknown: " + errorText(e.Err)
	}
	a.say("%s", text)
}
