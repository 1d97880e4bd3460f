package demo

import (
	"context"
	"errors"
	"runtime"

	"github.com/dblock-go/dblock/cmd/dblock/internal/demo/cluster"
)

// server is the throwaway PostgreSQL, on the director's side.
type server struct {
	cast             *cast
	process          *process
	dsn, description string
}

// startServer starts the process that keeps the server.
func startServer(ctx context.Context, c Config, t *timeline) (*server, error) {
	cast, err := newCast(c, t)
	if err != nil {
		return nil, err
	}
	t.say("Starting a PostgreSQL that is thrown away in the end …\n")
	s := &server{cast: cast}
	if err := s.await(ctx); err != nil {
		cast.close()
		return nil, err
	}
	return s, nil
}

func (s *server) await(ctx context.Context) error {
	var err error
	if s.process, err = s.cast.start("server", "server"); err != nil {
		return err
	}
	for s.dsn == "" {
		t, err := s.cast.next(ctx)
		switch {
		case err != nil:
			return err
		case t.ended:
			return errors.New("the process that keeps the server ended")
		}
		s.dsn, s.description = t.DSN, t.Text
	}
	return nil
}

// close ends the server and waits until its files are removed.
func (s *server) close() error {
	defer s.cast.close()
	ctx, cancel := context.WithTimeout(context.Background(), endWithin)
	defer cancel()
	err := s.process.stop()
	for len(s.cast.processes) > 0 && err == nil {
		_, err = s.cast.next(ctx)
	}
	return err
}

// server keeps the throwaway PostgreSQL until the director ends.
func (c *child) server(ctx context.Context) error {
	// The server ends with the thread that starts it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, err := cluster.Start(ctx, func(text string) { c.tell(Event{Kind: kindPreparing, Text: text}) })
	if err != nil {
		return err
	}
	c.tellAll(message{Event: Event{Kind: kindReady, Text: s.Description}, DSN: s.DSN})
	select {
	case <-ctx.Done():
		err = nil
	case <-s.Ended():
		err = errors.New("the PostgreSQL server ended in the middle of the demo")
	}
	return errors.Join(err, s.Close())
}
