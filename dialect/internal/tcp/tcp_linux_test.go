package tcp

import (
	"net"
	"syscall"
	"testing"
)

func TestDialedConnectionsNoticeADeadNetwork(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	c, err := (&Dialer{}).DialContext(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		for name, option := range map[string]struct{ level, option, want int }{
			"keep-alive":   {syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1},
			"idle":         {syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE, 3},
			"interval":     {syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL, 1},
			"count":        {syscall.IPPROTO_TCP, syscall.TCP_KEEPCNT, 3},
			"user timeout": {syscall.IPPROTO_TCP, userTimeout, 6000},
		} {
			got, err := syscall.GetsockoptInt(int(fd), option.level, option.option)
			if err != nil || got != option.want {
				t.Errorf("%s: %d, %v; want %d", name, got, err, option.want)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestOtherConnectionsAreLeftAlone(t *testing.T) {
	c, other := net.Pipe()
	defer c.Close()
	defer other.Close()
	Watch(c)
}

func TestWhatCannotBeDialedIsAnError(t *testing.T) {
	if c, err := (&Dialer{}).DialContext(t.Context(), "tcp", "127.0.0.1:-1"); err == nil || c != nil {
		t.Errorf("%v, %v", c, err)
	}
}
