//go:build linux

package bench

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/dblock-go/dblock/tests/servers"
)

// poolSize is that of every pool of a peer.
const poolSize = 64

// throughput: goroutines take and give back keys, each its own.
func throughput(t *testing.T, d *database, p plan) {
	const chunk = 250 * time.Millisecond
	p.chunks = min(p.chunks, 4)
	for _, load := range []struct {
		goroutines int
		target     targets
	}{
		{64, mostly(atLeast(5), atLeast(3))},
		{4, everywhere(atLeast(0.95))},
		{1, everywhere(atLeast(0.95))},
	} {
		comparison{
			name:       fmt.Sprintf("pool-%d", load.goroutines),
			what:       fmt.Sprintf("distinct keys, goroutines: %d; throughput against a pool of %d, one connection per lock", load.goroutines, poolSize),
			goroutines: load.goroutines, chunk: chunk, target: load.target,
			ours: lockerPair("throughput", load.goroutines), theirs: poolPairs(load.goroutines),
		}.run(t, d, p)
	}
	for _, c := range []comparison{
		{
			name: "goose", what: fmt.Sprintf("the same at 64, against goose's session locker with a pool of %d", poolSize),
			target: everywhere(target{least: true}), only: servers.KindPostgres, theirs: goosePairs(poolSize),
		},
		{
			name: "redis", what: fmt.Sprintf("the same at 64, against Redis with a pool of %d", poolSize),
			target: mostly(atLeast(4), atLeast(2.5)), need: needRedis, theirs: redisPairs(poolSize),
		},
		{
			name: "etcd", what: "the same at 64, against etcd's Mutex",
			target: mostly(atLeast(20), atLeast(12)), theirs: etcdPairs(poolSize),
		},
	} {
		c.goroutines, c.chunk, c.ours = poolSize, chunk, lockerPair("throughput", poolSize)
		c.run(t, d, p)
	}
}

// poolPairs lock each on a connection that the pool gives them for it.
func poolPairs(goroutines int) func(testing.TB, *database) op {
	return func(t testing.TB, d *database) op {
		take, ids := d.pool(t, poolSize), rawKeys("throughput", goroutines)
		return func(ctx context.Context, goroutine int) error {
			conn, err := take(ctx)
			if err != nil {
				return err
			}
			err = conn.lock(ctx, ids[goroutine])
			if err == nil {
				err = conn.unlock(ctx, ids[goroutine])
			}
			return errors.Join(err, conn.done())
		}
	}
}
