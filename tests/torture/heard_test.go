//go:build linux

package torture

import (
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/tests/torture/history"
)

func TestALossThatIsHeardLateIsFound(t *testing.T) {
	const s = int64(time.Second)
	unaware := line{op: "a-0-1", asked: 1, granted: 2, lost: 10 * s, token: 1}
	soon := unaware
	soon.lost = 3 * s
	next := line{op: "b-0-1", asked: 3, granted: 2 * s, token: 2}
	inTx := unaware
	inTx.call = history.InTx
	silent := []fault{{Kind: silence, Process: "a", From: s, To: 9 * s}}
	released := unaware
	released.lost, released.releasing, released.released, released.releaseWith = 0, 3*s, 10*s, dblock.ErrLost
	paused := []fault{{Kind: pauseProcess, Process: "a", From: s, To: 9 * s}}
	for name, c := range map[string]struct {
		lines  []line
		faults []fault
		want   string
	}{
		"heard after 1 s":              {[]line{soon, next}, nil, ""},
		"heard after 8 s":              {[]line{unaware, next}, nil, "a-0-1 did not know for 8s"},
		"while it was paused":          {[]line{unaware, next}, paused, ""},
		"with its work on the session": {[]line{inTx, next}, nil, ""},
		"while its network was silent": {[]line{unaware, next}, silent, ""},
		"it gave back before":          {[]line{released, next}, nil, ""},
		"nobody else had the key":      {[]line{unaware}, nil, ""},
	} {
		mustFind(t, name, checkHeard(historyOf(c.lines...), c.faults), c.want)
	}
}
