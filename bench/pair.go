//go:build linux

package bench

import (
	"context"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/tests/servers"
)

// pair: a free key is taken and given back, by one goroutine.
func pair(t *testing.T, d *database, p plan) {
	for _, c := range []comparison{
		{
			name: "noise", what: "noise: the raw pair against itself, on another connection",
			ours: rawPair, theirs: rawPair,
		},
		{
			name: "raw", what: "acquire + release of a free key, against the two raw statements",
			target: everywhere(atMost(1.05)),
			ours:   lockerPair("pair", 1), theirs: rawPair,
		},
		{
			name: "golang-migrate", what: "the same against golang-migrate's lock and unlock",
			target: mostly(atMost(1.0), atMost(0.5)),
			ours:   lockerPair("pair", 1), theirs: migratePair,
		},
		{
			name: "bound", what: "what bounds it: the two raw statements, against golang-migrate's lock and unlock",
			ours: rawPair, theirs: migratePair,
		},
		{
			name: "goose", what: "the same against goose's session locker",
			only: servers.KindPostgres,
			ours: lockerPair("pair", 1), theirs: goosePairs(1),
		},
		{
			name: "redis", what: "the same against Redis, SET NX PX and a script that compares and deletes",
			need: needRedis,
			ours: lockerPair("pair", 1), theirs: redisPairs(1),
		},
	} {
		c.run(t, d, p)
	}
}

// lockerPair opens a locker, and locks a key of its own in each goroutine.
func lockerPair(scenario string, goroutines int) func(testing.TB, *database) op {
	return func(t testing.TB, d *database) op { return pairOn(d.locker(t), keys(scenario, goroutines)) }
}

func pairOn(locks *advisory.Locker, keys []dblock.Key) op {
	return func(ctx context.Context, goroutine int) error {
		lock, err := locks.Lock(ctx, keys[goroutine])
		if err != nil {
			return err
		}
		return lock.Release(ctx)
	}
}
