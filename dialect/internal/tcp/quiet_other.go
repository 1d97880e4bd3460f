//go:build !unix

package tcp

import "net"

// Quiet is false: this platform does not tell.
func Quiet(net.Conn) bool { return false }
