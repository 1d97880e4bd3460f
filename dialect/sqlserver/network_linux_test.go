package sqlserver

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect/internal/tcp"
)

func TestConnectionsOfOpenNoticeADeadNetwork(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	c, err := newConnector("sqlserver://app@" + listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := c.Dialer.DialContext(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		idle, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE)
		if want := int(tcp.Idle / time.Second); err != nil || idle != want {
			t.Errorf("probes after %d s, %v; want %d s", idle, err, want)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}
