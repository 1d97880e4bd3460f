//go:build unix

package tcp

import (
	"errors"
	"net"
	"syscall"
)

// Quiet reports that the connection is open as far as the operating system knows
// and that nothing has arrived which was not read, without waiting. It is false
// where that cannot be told.
func Quiet(c net.Conn) bool {
	if wrapped, ok := c.(interface{ NetConn() net.Conn }); ok { // *tls.Conn
		c = wrapped.NetConn()
	}
	s, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		quiet = errors.Is(err, syscall.EAGAIN)
	})
	return err == nil && quiet
}
