package main

import (
	"context"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/cmd/dblock/internal/demo"
)

type demoCmd struct{ format }

// Help is shown by dblock demo --help.
func (demoCmd) Help() string {
	return `Several processes use one database in the three ways that dblock is for: replicas that migrate on deploy, transactions that transfer money, and a single leader, which is killed by SIGKILL in the middle of its work. In the end it is checked, and printed with ✓ or ✗, what must hold: each migration was applied once, money was neither made nor lost, one leader at a time, nothing is left locked. The exit code is 1 if something broke. It takes some seconds.

The database is --dsn if that is given (the environment's DBLOCK_DSN does not count here). Otherwise it is a PostgreSQL that is started for this, on a free port of this machine only, in a temporary folder, and removed in the end: from programs that are installed, else downloaded for the occasion, else, as root on Debian, installed by apt-get.

With --dsn the demo works in tables of its own, whose names begin with dblock_demo_, and drops them in the end. It does not touch tables of these names that are not its own.`
}

func (c *demoCmd) Run(ctx context.Context, a *app) error {
	return demo.Run(ctx, c.config(a))
}

func (c *demoCmd) config(a *app) demo.Config {
	open := func(ctx context.Context, dsn string) (dblock.DB, error) {
		return a.connect(ctx, dsn, longestConnect, false)
	}
	return demo.Config{DSN: a.dsn, Open: open, JSON: c.JSON, Stdin: a.stdin, Stdout: a.stdout, Env: a.env}
}

// demoProcessCmd is what the processes of the demo run.
type demoProcessCmd struct {
	Role string   `arg:""`
	Name string   `arg:""`
	Args []string `arg:"" optional:""`
}

func (c *demoProcessCmd) Run(ctx context.Context, a *app) error {
	return demo.RunChild(ctx, (&demoCmd{}).config(a), c.Role, c.Name, c.Args)
}
