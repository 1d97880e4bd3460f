package dialect

import (
	"math"
	"testing"
	"time"
)

func TestTheServerIsSilentLongerThanTheOwnerBelievesInItsLocks(t *testing.T) {
	for _, keepAlive := range []time.Duration{1, time.Second, time.Hour, math.MaxInt64/2 + 1, math.MaxInt64} {
		for _, answer := range []time.Duration{0, 1, time.Second, time.Hour, math.MaxInt64/2 + 1, math.MaxInt64} {
			o := SessionOptions{KeepAlive: keepAlive, AnswerWithin: answer}
			if within := o.LostWithin(); within < keepAlive || within < answer {
				t.Errorf("%+v: lost within %v", o, within)
			}
			if o.Silence() < o.LostWithin() {
				t.Errorf("%+v: silence of %v, lost within %v", o, o.Silence(), o.LostWithin())
			}
		}
	}
	if silence := (SessionOptions{KeepAlive: 5 * time.Second, AnswerWithin: 4 * time.Second}).Silence(); silence != 15*time.Second {
		t.Errorf("silence of %v by default", silence)
	}
	if silence := (SessionOptions{AnswerWithin: time.Second}).Silence(); silence != 0 {
		t.Errorf("silence of %v without a promise", silence)
	}
}
