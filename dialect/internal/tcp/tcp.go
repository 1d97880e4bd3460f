// Package tcp makes the client's end of a connection notice a network that went
// dead without a word.
package tcp

import (
	"context"
	"net"
	"time"
)

// Unanswered is how long the other end may leave something unanswered, data or
// the probes of an idle connection, before the connection counts as dead. A
// server that frees a session's locks because its network is dead must take
// longer: the client has to know first.
const Unanswered = 6 * time.Second

// The probes of an idle connection; together they take Unanswered. A server that
// probes its client in the same way last heard of it when the client last heard
// of the server, give or take Idle.
const (
	Idle     = 3 * time.Second
	Interval = time.Second
	Count    = int((Unanswered - Idle) / Interval)
)

// Watch sets that on a connection of TCP; others it leaves alone. A platform
// that refuses is no error, since the keep-alives of a session's owner notice
// the same, only later.
func Watch(c net.Conn) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: Idle, Interval: Interval, Count: Count})
	_ = setUserTimeout(tcp, Unanswered)
}

// Dialer dials as [net.Dialer] does, and watches.
type Dialer struct{ net.Dialer }

// DialContext is what drivers take as their way to dial.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := d.Dialer.DialContext(ctx, network, address)
	if err == nil {
		Watch(c)
	}
	return c, err
}
