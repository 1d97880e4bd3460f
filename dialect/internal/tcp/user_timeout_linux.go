package tcp

import (
	"net"
	"syscall"
	"time"
)

// userTimeout is TCP_USER_TIMEOUT of linux/tcp.h, which package syscall lacks.
const userTimeout = 18

// setUserTimeout bounds how long what was sent may stay unacknowledged. Without
// it the kernel sends again for about 15 minutes, and keep-alive waits for that:
// https://man7.org/linux/man-pages/man7/tcp.7.html
func setUserTimeout(c *net.TCPConn, timeout time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var setErr error
	err = raw.Control(func(fd uintptr) {
		setErr = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, userTimeout, int(timeout.Milliseconds()))
	})
	if err != nil {
		return err
	}
	return setErr
}
