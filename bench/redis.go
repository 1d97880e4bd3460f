//go:build linux

package bench

import (
	"cmp"
	"context"
	"crypto/rand"
	"net"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/dblock-go/dblock/tests/servers"
)

func needRedis(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		servers.SkipWithout(t, "redis", "no redis-server: install it, on Debian and Ubuntu with apt-get install redis-server")
	}
}

// compareAndDelete is the release that Redis's documentation asks for:
// https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
var compareAndDelete = redis.NewScript(`if redis.call("get", KEYS[1]) == ARGV[1] then return redis.call("del", KEYS[1]) else return 0 end`)

// redisPairs lock with SET NX PX and a token of their own.
func redisPairs(goroutines int) func(testing.TB, *database) op {
	return func(t testing.TB, _ *database) op {
		client := redis.NewClient(&redis.Options{Addr: startRedis(t), PoolSize: goroutines, MaxRetries: -1})
		t.Cleanup(func() { client.Close() })
		return func(ctx context.Context, goroutine int) error {
			key, token := "bench-"+strconv.Itoa(goroutine), rand.Text()
			const expiry = 29_999 * time.Millisecond // the client sends EX for whole seconds
			got, err := client.SetNX(ctx, key, token, expiry).Result()
			if err != nil || !got {
				return cmp.Or(err, must("SET NX PX", got))
			}
			deleted, err := compareAndDelete.Run(ctx, client, []string{key}, token).Int()
			return cmp.Or(err, must("the script that releases", deleted == 1))
		}
	}
}

// startRedis starts a server without persistence, and returns its address.
func startRedis(t testing.TB) string {
	t.Helper()
	address := freeAddress(t)
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	server := exec.Command("redis-server", "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--dir", t.TempDir())
	startChild(t, server)
	probe := redis.NewClient(&redis.Options{Addr: address, PoolSize: 1})
	defer probe.Close()
	await(t, "redis-server", func() error { return probe.Ping(t.Context()).Err() })
	return address
}
