package postgres

import (
	"math"
	"testing"
	"time"

	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/dialect/internal/tcp"
)

func TestTheServersProbesTakeLongerThanTheClients(t *testing.T) {
	for _, o := range []dialect.SessionOptions{
		{},
		{KeepAlive: 10 * time.Millisecond, AnswerWithin: 100 * time.Millisecond},
		{KeepAlive: 5 * time.Second, AnswerWithin: 4 * time.Second},
		{KeepAlive: time.Hour, AnswerWithin: time.Minute},
		{KeepAlive: math.MaxInt64, AnswerWithin: math.MaxInt64},
	} {
		unreachable := unreachableFor(o)
		if unreachable < maxTimeout && (unreachable <= o.LostWithin() || unreachable <= tcp.Unanswered+tcp.Idle) {
			t.Errorf("%+v: unreachable after %v", o, unreachable)
		}
		interval, count := probes(unreachable - tcp.Idle)
		took := time.Duration(interval*count) * time.Second
		if rest := unreachable - tcp.Idle; took < rest || took >= rest+time.Duration(interval+1)*time.Second || interval < 1 || count > 127 || interval > 32767 {
			t.Errorf("%+v: %d probes every %d s for %v", o, count, interval, rest)
		}
	}
}
