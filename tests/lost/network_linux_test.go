package lost

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock/tests/program"
	"github.com/dblock-go/dblock/tests/servers"
)

// network is a machine of a holder's own, behind a router: network namespaces,
// which the kernel removes with the test at the latest.
type network struct {
	host, guest     string // addresses
	machine, router string // namespaces
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	if os.Geteuid() != 0 {
		servers.SkipWithout(t, "network", "network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		servers.SkipWithout(t, "network", "network namespaces need the command ip: install iproute2")
	}
	id := rand.IntN(1 << 14) // of a network of eight addresses out of 10.213.0.0/16 or 10.214.0.0/16
	address := func(n int) string {
		n += id * 8
		return fmt.Sprintf("10.%d.%d.%d", 213+n>>16, n>>8&255, n&255)
	}
	n := &network{host: address(1), guest: address(6), machine: fmt.Sprintf("dblock-m%d", id), router: fmt.Sprintf("dblock-r%d", id)}
	for _, name := range []string{n.machine, n.router} {
		ip(t, "netns add "+name)
		t.Cleanup(func() { ip(t, "netns del "+name) })
	}
	link := fmt.Sprintf("dblock%d", id)
	ip(t, "link add "+link+" type veth peer name to-host netns "+n.router)
	ip(t, "-n "+n.router+" link add to-machine type veth peer name to-router netns "+n.machine)
	for _, end := range []struct{ options, link, address string }{
		{"", link, n.host},
		{"-n " + n.router, "to-host", address(2)},
		{"-n " + n.router, "to-machine", address(5)},
		{"-n " + n.machine, "to-router", n.guest},
	} {
		ip(t, end.options+" addr add "+end.address+"/30 dev "+end.link)
		ip(t, end.options+" link set "+end.link+" up")
	}
	ip(t, "-n "+n.machine+" route add default via "+address(5))
	ip(t, "route add "+address(4)+"/30 via "+address(2))
	ip(t, "netns exec "+n.router+" sh -c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
	return n
}

// cut makes the router drop what it gets, in both directions and without a word.
func (n *network) cut(t *testing.T) {
	t.Helper()
	ip(t, "-n "+n.router+" route add blackhole "+n.guest)
	ip(t, "-n "+n.router+" route add blackhole "+n.host)
}

// ip runs the command of that name; more are arguments that contain spaces.
func ip(t *testing.T, args string, more ...string) {
	t.Helper()
	if out, err := exec.Command("ip", append(strings.Fields(args), more...)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", args, err, out)
	}
}

// The order matters most: no holder believes in a lock that the server has given
// to somebody else.
func TestOnADeadNetworkTheHolderHearsFirstAndThenTheServerFreesTheKey(t *testing.T) {
	for _, w := range processes() {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel() // it waits most of the time
			n := newNetwork(t)
			listen := "bind-address="
			if w.kind == servers.KindPostgres {
				listen = "listen_addresses="
			}
			d := newDatabase(t, w, servers.Start(t, w.kind, listen+"127.0.0.1,"+n.host))
			dsn := d.worker(t, n.host)
			h := hold(t, d, func(args ...string) *program.Process {
				args[2] = dsn
				time.Sleep(w.keepAlive / holders) // at different times since their last heartbeats
				worker := program.Build(t, "tests/worker")
				return program.Start(t, exec.Command("ip", append([]string{"netns", "exec", n.machine, worker}, args...)...))
			})
			cut := time.Now()
			n.cut(t)
			freed := h.freed(t, cut)
			var heard, ahead figures
			for i := range h.processes {
				at := h.lost(t, i)
				heard.add(at.Sub(cut))
				ahead.add(h.at[i].Sub(at))
				if !at.Before(h.at[i]) {
					t.Errorf("holder %d: the server freed the key %v before the holder heard", i, at.Sub(h.at[i]))
				}
			}
			heard.within(t, "network cut, heard", w.keepAlive+answerWithin)
			freed.within(t, "network cut, freed", w.silence())
			ahead.within(t, "heard before it was freed by", w.silence())
		})
	}
}
