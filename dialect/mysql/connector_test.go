package mysql

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// silentServer lets the kernel accept connections, and never says a word.
func silentServer(t *testing.T) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener.Addr().String()
}

func TestSilentServerIsUnavailable(t *testing.T) {
	address := silentServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := Open(ctx, "mysql://app@"+address+"/shop")
	if dialect.ClassOf(err) != dialect.Unavailable || !strings.Contains(err.Error(), address) {
		t.Errorf("within the caller's time: %v", err)
	}
}

func TestConnectingEndsWithoutADeadline(t *testing.T) {
	address := silentServer(t)
	config, err := parseDSN("mysql://app@" + address + "/shop")
	if err != nil {
		t.Fatal(err)
	}
	c, err := newConnector(config)
	if err != nil {
		t.Fatal(err)
	}
	c.within = 50 * time.Millisecond
	_, err = c.Connect(context.Background())
	if dialect.ClassOf(err) != dialect.Unavailable || !strings.Contains(err.Error(), address) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Connect(ctx); dialect.ClassOf((&DB{flavor: &mysqlFlavor}).Classify(err)) != dialect.Canceled {
		t.Errorf("after a cancel: %v", err)
	}
}
