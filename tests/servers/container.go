package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	containertypes "github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/mariadb"
	"github.com/testcontainers/testcontainers-go/modules/mssql"
	"github.com/testcontainers/testcontainers-go/modules/mysql"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

const (
	pullTimeout   = 5 * time.Minute
	dockerTimeout = 3 * time.Second
)

// dockerAnswers says whether there is a Docker engine.
var dockerAnswers = sync.OnceValue(func() bool {
	ctx, cancel := context.WithTimeout(context.Background(), dockerTimeout)
	defer cancel()
	healthy := make(chan bool, 1)
	go func() {
		// testcontainers panics if it finds no engine.
		defer func() {
			if recover() != nil {
				healthy <- false
			}
		}()
		provider, err := testcontainers.NewDockerProvider()
		healthy <- err == nil && provider.Health(ctx) == nil
	}()
	select {
	case ok := <-healthy:
		return ok
	case <-ctx.Done():
		return false
	}
})

// container is the engine of a server that runs in Docker.
type container struct {
	testcontainers.Container
}

// launchContainer starts a server in a container. testcontainers removes the containers of a test
// binary that was killed.
func launchContainer(kind Kind, settings []string) (*Server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), pullTimeout)
	defer cancel()
	c, dsn, err := runContainer(ctx, kind, settings)
	if err != nil {
		return nil, fmt.Errorf("start %s in Docker: %w", kind, errors.Join(err, testcontainers.TerminateContainer(c)))
	}
	s := &Server{Kind: kind, dsn: dsn, engine: &container{c}}
	if err := s.awaitReady(ctx); err != nil {
		s.engine.remove()
		return nil, err
	}
	return s, nil
}

func runContainer(ctx context.Context, kind Kind, settings []string) (testcontainers.Container, *url.URL, error) {
	port, err := freePort()
	if err != nil {
		return nil, nil, err
	}
	password := "Pw1-" + random() // SQL Server wants characters of several kinds
	dsn := &url.URL{Scheme: string(kind), Host: fmt.Sprintf("127.0.0.1:%d", port)}
	var c testcontainers.Container
	switch kind {
	case KindPostgres:
		dsn.User, dsn.Path, dsn.RawQuery = url.UserPassword("postgres", password), "/postgres", "sslmode=disable"
		c, err = postgres.Run(ctx, "postgres:18", postgres.WithPassword(password), publish(5432, port),
			testcontainers.WithCmdArgs(postgresArgs(append([]string{"max_connections=300"}, settings...))...))
	case KindMySQL:
		dsn.User, dsn.Path = url.UserPassword("root", password), "/mysql"
		c, err = mysql.Run(ctx, "mysql:9", mysql.WithUsername("root"), mysql.WithPassword(password), publish(3306, port),
			testcontainers.WithCmdArgs(mysqlArgs(append([]string{"max-connections=300"}, settings...))...))
	case KindMariaDB:
		dsn.User, dsn.Path = url.UserPassword("root", password), "/mysql"
		c, err = mariadb.Run(ctx, "mariadb:11.8", mariadb.WithUsername("root"), mariadb.WithPassword(password), publish(3306, port),
			testcontainers.WithCmdArgs(mysqlArgs(append([]string{"max-connections=300", "plugin-load-add=metadata_lock_info"}, settings...))...))
	case KindSQLServer:
		if len(settings) > 0 {
			return nil, nil, fmt.Errorf("SQL Server takes no settings here: %q", settings)
		}
		dsn.User, dsn.RawQuery = url.UserPassword("sa", password), "database=master"
		c, err = mssql.Run(ctx, "mcr.microsoft.com/mssql/server:2022-latest", mssql.WithAcceptEULA(), mssql.WithPassword(password), publish(1433, port))
	default:
		return nil, nil, missingError{kind}
	}
	return c, dsn, err
}

// publish binds the server's port to one of the host that stays the same over restarts.
func publish(port uint16, hostPort int) testcontainers.ContainerCustomizer {
	return testcontainers.WithHostConfigModifier(func(c *containertypes.HostConfig) {
		inner, _ := network.PortFrom(port, network.TCP)
		c.PortBindings = network.PortMap{inner: {{
			HostIP:   netip.MustParseAddr("127.0.0.1"),
			HostPort: strconv.Itoa(hostPort),
		}}}
	})
}

func (c *container) start(ctx context.Context) error { return c.Start(ctx) }

func (c *container) running() bool { return c.IsRunning() }

// pid is 0: the process is not in our namespace.
func (c *container) pid() int { return 0 }

func (c *container) signal(sig os.Signal) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	docker, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return err
	}
	defer docker.Close()
	number, ok := sig.(syscall.Signal)
	if !ok {
		return fmt.Errorf("a container gets no signal %v", sig)
	}
	_, err = docker.ContainerKill(ctx, c.GetContainerID(), client.ContainerKillOptions{Signal: strconv.Itoa(int(number))})
	return err
}

func (c *container) kill() error {
	if err := c.signal(syscall.SIGKILL); err != nil {
		return err
	}
	return c.stop() // waits until it has ended
}

func (c *container) stop() error {
	timeout := stopTimeout
	return c.Stop(context.Background(), &timeout)
}

func (c *container) remove() {
	if err := testcontainers.TerminateContainer(c.Container, testcontainers.StopTimeout(0)); err != nil {
		fmt.Fprintf(os.Stderr, "servers: %v\n", err)
	}
}

func (c *container) logTail() string {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	logs, err := c.Logs(ctx)
	if err != nil {
		return err.Error()
	}
	defer logs.Close()
	text, err := io.ReadAll(logs)
	if err != nil {
		return err.Error()
	}
	return tail(string(text))
}
