package mysql

import (
	"context"
	sqldriver "database/sql/driver"
	"fmt"
	"time"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/tcp"
)

// connectWithin bounds the dialling of a connection and its handshake: what
// accepts connections and then stays silent would hold up the caller for ever.
const connectWithin = 30 * time.Second

// connector makes the connections of [Open].
type connector struct {
	sqldriver.Connector
	address string
	within  time.Duration
}

func newConnector(config *driver.Config) (*connector, error) {
	if config.Net == "tcp" {
		config.DialFunc = (&tcp.Dialer{}).DialContext
	}
	c, err := driver.NewConnector(config)
	if err != nil {
		return nil, err
	}
	return &connector{Connector: c, address: config.Addr, within: max(connectWithin, config.Timeout)}, nil
}

// Connect names the server that did not answer, which the driver does not.
func (c *connector) Connect(ctx context.Context) (sqldriver.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, c.within)
	defer cancel()
	conn, err := c.Connector.Connect(bounded)
	switch {
	case err == nil || bounded.Err() == nil:
		return conn, err
	case ctx.Err() != nil:
		return nil, fmt.Errorf("connect to %s: %w", c.address, ctx.Err())
	}
	return nil, &dialect.Error{Class: dialect.Unavailable, Err: fmt.Errorf("%s did not answer within %v", c.address, c.within),
		Hint: "check the host and the port, and that the server runs"}
}
