//go:build linux

package torture

import (
	"testing"
	"time"

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
		"nobody else had the key":      {[]line{unaware}, nil, ""},
	} {
		mustFind(t, name, checkHeard(historyOf(c.lines...), c.faults), c.want)
	}
}
