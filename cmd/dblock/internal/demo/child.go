package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/dblock-go/dblock"
)

// child is one of the demo's processes, on its own side. It lives as long as its
// stdin is open: so it ends with the director, however that ends.
type child struct {
	name string
	args []string
	open func(ctx context.Context) (dblock.DB, error)
	cued <-chan struct{}

	mu  sync.Mutex
	out *json.Encoder
}

var roles = map[string]func(c *child, ctx context.Context) error{
	"server":    (*child).server,
	"replica":   (*child).replica,
	"teller":    (*child).teller,
	"projector": (*child).projector,
}

// errStopped is the cause of a child's context when the director wants its end.
var errStopped = errors.New("stopped by the demo")

// RunChild is what [Command] runs.
func RunChild(ctx context.Context, c Config, role, name string, args []string) error {
	play, ok := roles[role]
	if !ok {
		return fmt.Errorf("no such role: %q; dblock demo starts these processes itself", role)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	cued := make(chan struct{})
	// Ends with the process: nothing else ends a read from stdin.
	go func() {
		in := bufio.NewReader(c.Stdin)
		if _, err := in.ReadString('\n'); err == nil {
			close(cued)
			_, _ = io.Copy(io.Discard, in)
		}
		stop(errStopped)
	}()
	err := play(&child{
		name: name, args: args, cued: cued, out: json.NewEncoder(c.Stdout),
		open: func(ctx context.Context) (dblock.DB, error) { return c.Open(ctx, dsnOf(c.Env)) },
	}, ctx)
	if errors.Is(context.Cause(ctx), errStopped) && errors.Is(err, context.Canceled) || errors.Is(err, errStopped) {
		return nil
	}
	return err
}

func dsnOf(env []string) string {
	for _, variable := range env {
		if dsn, ok := strings.CutPrefix(variable, dsnVariable+"="); ok {
			return dsn
		}
	}
	return ""
}

// tell tells the director.
func (c *child) tell(e Event) { c.tellAll(message{Event: e}) }

func (c *child) tellAll(m message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	// If the director does not hear any more, our stdin has ended, too.
	_ = c.out.Encode(m)
}

// withDB opens the database, waits for the cue, and runs what the role is.
func (c *child) withDB(ctx context.Context, run func(db dblock.DB) error) error {
	db, err := c.open(ctx)
	if err != nil {
		return err
	}
	c.tell(Event{Kind: kindReady})
	select {
	case <-c.cued:
		err = run(db)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	return errors.Join(err, db.Close())
}

// tellWaiting is an observer that tells for whom this process waits.
func (c *child) tellWaiting(_ context.Context, e dblock.Event) {
	if e.Kind != dblock.EventWaiting {
		return
	}
	waiting := Event{Kind: kindWaiting}
	if e.Blocker != nil {
		waiting.Session = e.Blocker.Session
	}
	c.tell(waiting)
}

// holder is the session that holds a key, 0 if the server does not tell.
func holder(ctx context.Context, db dblock.DB, key dblock.Key) int64 {
	holdings, err := db.Inspect(ctx, key.Resolve(db.Features().Scope))
	if err != nil {
		return 0 // it would be a name on the timeline, no more
	}
	for _, h := range holdings {
		if !h.Waiting {
			return h.Session
		}
	}
	return 0
}

// work takes a while, as work does.
func work(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
