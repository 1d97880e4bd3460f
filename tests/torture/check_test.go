package torture

import (
	"strings"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/torture/history"
)

// line is the history of one hold of the key k, exclusive unless shared. A time of
// 0 leaves its step out.
type line struct {
	op                       string
	shared                   bool
	asked, granted, held     int64
	releasing, released      int64
	token                    int64
	lost, stale              int64
	call                     history.Call
	refusedWith, releaseWith dialect.Class
}

func (l line) records() []history.Record {
	keys := []history.Key{{Name: "k", Shared: l.shared}}
	granted := []history.Key{{Name: "k", Shared: l.shared, Token: l.token}}
	all := []history.Record{
		{At: l.asked, What: history.Ask, Call: l.call, Keys: keys},
		{At: l.granted, What: history.Granted, Keys: granted},
		{At: l.held, What: history.Held},
		{At: l.stale, What: history.Stale, Row: "k", Way: history.Fenced},
		{At: l.lost, What: history.Lost},
		{At: l.releasing, What: history.Releasing},
		{At: l.released, What: history.Released, Class: string(l.releaseWith)},
	}
	if l.refusedWith != "" {
		all = append(all, history.Record{At: l.asked + 1, What: history.Refused, Class: string(l.refusedWith), Error: "it failed"})
	}
	var records []history.Record
	for _, r := range all {
		if r.At != 0 {
			r.Op = l.op
			records = append(records, r)
		}
	}
	return records
}

func historyOf(lines ...line) []*attempt {
	var records []history.Record
	for _, l := range lines {
		if l.call == "" {
			l.call = history.Wait
		}
		records = append(records, l.records()...)
	}
	return attempts(records)
}

// mustFind compares what a check found with a part of what it should say, empty if
// it should find nothing.
func mustFind(t *testing.T, name string, found []violation, want string) {
	t.Helper()
	switch {
	case want == "" && len(found) > 0:
		t.Errorf("%s: %v", name, found)
	case want != "" && (len(found) == 0 || !strings.Contains(found[0].text, want)):
		t.Errorf("%s: found %v, not %q", name, found, want)
	}
}

var (
	first  = line{op: "a-0-1", asked: 10, granted: 20, held: 30, releasing: 40, released: 50, token: 1}
	second = line{op: "b-0-1", asked: 15, granted: 60, held: 70, releasing: 80, released: 90, token: 2}
)

func TestOverlapIsFound(t *testing.T) {
	early := second
	early.granted = 35
	unproven := line{op: "c-0-1", asked: 25, granted: 35, token: 2}
	shared := func(l line) line { l.shared = true; return l }
	lost := line{op: "a-0-1", asked: 10, granted: 20, held: 30, lost: 100, token: 1}
	whole := line{op: "w-0-1", asked: 1, granted: 2, releasing: 99, released: 100, token: 1}

	for name, c := range map[string]struct {
		lines []line
		want  string
	}{
		"one after the other":                        {[]line{first, second}, ""},
		"both held at once":                          {[]line{first, early}, "a-0-1 (exclusive) was held until 40"},
		"a shared hold in an exclusive one":          {[]line{first, shared(early)}, "b-0-1 (shared)"},
		"an exclusive hold in a shared one":          {[]line{shared(first), early}, "a-0-1 (shared)"},
		"shared holds":                               {[]line{shared(first), shared(early)}, ""},
		"granted while another was certain":          {[]line{first, unproven}, "c-0-1 (exclusive) was granted between 25 and 35"},
		"the holder is lost and has not heard of it": {[]line{lost, early}, ""},
		"a short hold between":                       {[]line{whole, first}, "w-0-1 (exclusive) was held until 99"},
		"behind a short shared hold":                 {[]line{whole, shared(first), shared(second)}, "w-0-1"},
	} {
		mustFind(t, name, checkOverlap(historyOf(c.lines...)), c.want)
	}
}

func TestBadFencingNumbersAreFound(t *testing.T) {
	with := func(l line, token int64) line { l.token = token; return l }
	late := second
	late.asked = 25
	for name, c := range map[string]struct {
		lines []line
		want  string
	}{
		"growing":                           {[]line{first, second}, ""},
		"given twice":                       {[]line{first, with(second, 1)}, "same number 1"},
		"none":                              {[]line{with(first, 0)}, "the number 0"},
		"smaller, of calls that overlapped": {[]line{with(first, 2), with(second, 1)}, ""},
		"smaller, of a later call":          {[]line{with(first, 2), with(late, 1)}, "a-0-1 has 2"},
	} {
		mustFind(t, name, checkFencing(historyOf(c.lines...)), c.want)
	}
}

func TestHoldAfterARefusedWriteIsFound(t *testing.T) {
	stale := first
	stale.stale = 45
	mustFind(t, "refused after the last evidence", checkStale(historyOf(stale)), "")
	stale.stale = 25
	mustFind(t, "refused before it", checkStale(historyOf(stale)), "a-0-1 was refused for a newer holder at 25, and held until 40")
}

func TestLostUpdatesAreFound(t *testing.T) {
	row := func(n, token int64, op string) logged {
		return logged{Key: "k", Way: history.OnSession, N: n, Token: token, Op: op}
	}
	acknowledged := func(n int64, op string) *attempt {
		return &attempt{op: op, writes: []history.Record{{Row: "k", Way: history.OnSession, N: n, Op: op}}}
	}
	good := []logged{row(1, 1, "a"), row(2, 1, "a"), row(3, 4, "b")}
	for name, c := range map[string]struct {
		log  []logged
		says int64
		all  []*attempt
		want string
	}{
		"as it should be":                  {good, 3, []*attempt{acknowledged(2, "a")}, ""},
		"an update lost":                   {[]logged{row(1, 1, "a"), row(1, 2, "b")}, 2, nil, "both wrote 1"},
		"a number missing":                 {[]logged{row(1, 1, "a"), row(3, 2, "b")}, 2, nil, "b wrote 3 after 1"},
		"the row says less":                {good, 2, nil, "says 2 after 3"},
		"an older holder after a newer":    {[]logged{row(1, 5, "a"), row(2, 4, "b")}, 2, nil, "with the number 4 after a with 5"},
		"an acknowledged write is missing": {good, 3, []*attempt{acknowledged(4, "c")}, "c wrote 4"},
	} {
		w := witness{log: c.log, rows: map[string]int64{witnessRow("k", history.OnSession): c.says}}
		mustFind(t, name, checkWitness(c.all, w), c.want)
	}
}

func TestErrorsThatMustNotBeAreFound(t *testing.T) {
	refused := func(call history.Call, class dialect.Class) line {
		return line{op: "a-0-1", asked: 10, call: call, refusedWith: class}
	}
	released := func(call history.Call, class dialect.Class) line {
		l := first
		l.call, l.releaseWith = call, class
		return l
	}
	for name, c := range map[string]struct {
		line line
		want string
	}{
		"a try that met a holder":        {refused(history.Try, dblock.ErrNotAcquired), ""},
		"a wait that met a holder":       {refused(history.Wait, dblock.ErrNotAcquired), "class"},
		"a deadlock":                     {refused(history.Wait, dblock.ErrDeadlock), "deadlock"},
		"a timeout":                      {refused(history.Wait, dblock.ErrTimeout), ""},
		"unclassified":                   {refused(history.Wait, "?"), "it failed"},
		"lost before its release":        {released(history.Wait, dblock.ErrLost), ""},
		"not held at its release":        {released(history.Wait, dblock.ErrNotHeld), "released"},
		"a timeout in a transaction":     {released(history.InTx, dblock.ErrTimeout), ""},
		"not held after its transaction": {released(history.InTx, dblock.ErrNotHeld), "not held"},
	} {
		mustFind(t, name, checkErrors(historyOf(c.line)), c.want)
	}
}

func TestAKeyThatIsNotGrantedAnyMoreIsFound(t *testing.T) {
	keys := []dblock.Key{dblock.NewKey("k")}
	mustFind(t, "asked and granted after the last fault", checkLiveness(historyOf(first), keys, 5), "")
	mustFind(t, "asked before it", checkLiveness(historyOf(first), keys, 15), "k was never granted")
}

func TestHistoriesWithoutAnOrderAreFound(t *testing.T) {
	lost := line{op: "a-0-1", asked: 10, granted: 20, held: 30, lost: 100, token: 1}
	killed := line{op: "a-0-1", asked: 10, granted: 20, held: 30, token: 1}
	early := second
	early.granted, early.held, early.releasing, early.released = 35, 0, 0, 0
	shared := func(l line) line { l.shared = true; return l }
	smaller := func(l line) line { l.token = 1; return l }
	larger := func(l line) line { l.token = 2; return l }
	late := second
	late.asked = 55
	for name, c := range map[string]struct {
		lines []line
		want  string
	}{
		"one after the other":                    {[]line{first, second}, ""},
		"granted while another held":             {[]line{first, early}, "no order"},
		"shared holds":                           {[]line{shared(first), shared(early)}, ""},
		"exclusive beside shared":                {[]line{shared(first), early}, "no order"},
		"the lost hold ended after its evidence": {[]line{lost, early}, ""},
		"so did that of a killed process":        {[]line{killed, early}, ""},
		"a smaller number later":                 {[]line{larger(first), smaller(late)}, "no order"},
		"a number twice":                         {[]line{first, smaller(second)}, "no order"},
	} {
		mustFind(t, name, checkModel(historyOf(c.lines...), t.TempDir(), time.Minute), c.want)
	}
}

func TestAnUndecidedHistoryIsNoGoodOne(t *testing.T) {
	mustFind(t, "no time", checkModel(historyOf(first, second), t.TempDir(), time.Nanosecond), "undecided")
}
