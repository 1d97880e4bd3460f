//go:build unix

package lost

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/tests/program"
)

const holders = 5

// held are processes that hold a key each, and who waits for these keys. Both are
// told apart by their fencing numbers.
type held struct {
	processes []*program.Process
	tokens    []int64
	granted   []chan *advisory.Lock
	at        []time.Time // when a successor got the key; read after granted
}

func hold(t *testing.T, d *database, start func(args ...string) *program.Process) *held {
	t.Helper()
	h := &held{at: make([]time.Time, holders)}
	key := func(holder int) dblock.Key { return dblock.NewKey(fmt.Sprint("job ", holder)) }
	for i := range holders {
		h.processes = append(h.processes, start("hold", "-fencing", "", fmt.Sprint("job ", i)))
	}
	for _, p := range h.processes {
		token, err := strconv.ParseInt(p.Expect("token"), 10, 64)
		must(t, err)
		h.tokens = append(h.tokens, token)
		p.Expect("held")
	}
	l, ctx := newLocker(t, d.others, &advisory.Options{Fencing: true}), testContext(t)
	var waiting sync.WaitGroup
	t.Cleanup(waiting.Wait)
	for i := range holders {
		granted := make(chan *advisory.Lock, 1)
		h.granted = append(h.granted, granted)
		waiting.Go(func() {
			lock, err := l.Lock(ctx, key(i))
			h.at[i] = time.Now()
			if err != nil {
				t.Errorf("holder %d: the successor: %v", i, err)
			}
			granted <- lock
		})
	}
	for i := range holders {
		eventually(t, "a waiter", func() bool { return len(d.left(t, key(i))) == 2 })
	}
	return h
}

// freed measures until the successors have the keys, after what was done to the
// holders at the given time.
func (h *held) freed(t *testing.T, since time.Time) *figures {
	t.Helper()
	var freed figures
	for i, granted := range h.granted {
		lock := <-granted
		if lock == nil {
			continue
		}
		freed.add(h.at[i].Sub(since))
		if lock.Token() <= h.tokens[i] {
			t.Errorf("fencing number %d after %d", lock.Token(), h.tokens[i])
		}
	}
	return &freed
}

// lost reads when and why a holder heard of the loss, and what it was told then.
func (h *held) lost(t *testing.T, holder int) time.Time {
	t.Helper()
	p := h.processes[holder]
	nanoseconds, why, _ := strings.Cut(p.Expect("lost"), " ")
	n, err := strconv.ParseInt(nanoseconds, 10, 64)
	must(t, err)
	if holder == 0 {
		t.Log(why)
	}
	for what, answer := range map[string]string{"Err": why, "Check": p.Expect("check"), "Release": p.Expect("release")} {
		if !strings.Contains(answer, dblock.ErrLost.Error()) {
			t.Errorf("%s after the loss: %s", what, answer)
		}
	}
	return time.Unix(0, n)
}

func eachProcess(t *testing.T, test func(t *testing.T, w way, d *database, h *held)) {
	shared(t, processes(), func(t *testing.T, w way, d *database) {
		dsn := d.worker(t, "")
		test(t, w, d, hold(t, d, func(args ...string) *program.Process {
			args[2] = dsn
			return program.Worker(t, args...)
		}))
	})
}

func TestAKilledHoldersKeysAreFreed(t *testing.T) {
	eachProcess(t, func(t *testing.T, w way, d *database, h *held) {
		killed := time.Now()
		for _, p := range h.processes {
			p.Signal(syscall.SIGKILL)
		}
		h.freed(t, killed).within(t, "SIGKILL, freed", time.Second)
	})
}

// The kernel of a stopped process answers for it, so only its silence tells.
func TestAStoppedHolderLosesItsKeysAndHearsOfItWhenItGoesOn(t *testing.T) {
	eachProcess(t, func(t *testing.T, w way, d *database, h *held) {
		stopped := time.Now()
		for _, p := range h.processes {
			p.Signal(syscall.SIGSTOP)
		}
		h.freed(t, stopped).within(t, "SIGSTOP, freed", w.silence())
		goesOn := time.Now()
		for _, p := range h.processes {
			p.Signal(syscall.SIGCONT)
		}
		var heard figures
		for i := range h.processes {
			heard.add(h.lost(t, i).Sub(goesOn))
		}
		heard.within(t, "SIGCONT, heard", w.keepAlive)
	})
}
