//go:build unix

package command_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
)

func TestExecExcludesAcrossProcesses(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		folder := t.TempDir()
		busy, log := filepath.Join(folder, "busy"), filepath.Join(folder, "log")
		const critical = `mkdir "$0" || exit 99
			i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done
			echo done >>"$1"; rmdir "$0"`
		const processes = 8
		var all []*process
		for range processes {
			all = append(all, start(t, d.dsn, "exec", "--key", "critical/section", "--", "sh", "-c", critical, busy, log))
		}
		for _, p := range all {
			p.exit(0)
		}
		done, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(done), "done"); n != processes {
			t.Errorf("%d commands ran, want %d", n, processes)
		}
	})
}

func TestExecConflicts(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		holder := hold(t, d.dsn, "job")
		ran := []string{"--", "echo", "ran"}
		for _, test := range []struct {
			code int
			args []string
		}{
			{75, []string{"--key", "job", "--try"}},
			{75, []string{"--key", "job", "--wait", "0"}},
			{75, []string{"--key", "job", "--wait", "100ms"}},
			{75, []string{"--key", "other", "--key", "job", "--try"}},
			{3, []string{"--key", "job", "--try", "--conflict-exit-code", "3"}},
			{0, []string{"--key", "job", "--try", "--conflict-exit-code", "0"}},
		} {
			stdout, stderr := run(t, d.dsn, test.code, append(append([]string{"exec"}, test.args...), ran...)...)
			if stdout != "" || !strings.Contains(stderr, "job") || strings.Contains(stderr, "\n") {
				t.Errorf("%v: stdout %q, stderr %q", test.args, stdout, stderr)
			}
		}
		// What could not be had whole is not held in part.
		if stdout, _ := run(t, d.dsn, 0, "exec", "--key", "other", "--try", "--", "echo", "ran"); stdout != "ran" {
			t.Errorf("stdout %q", stdout)
		}
		holder.release()
		run(t, d.dsn, 0, "exec", "--key", "job", "--try", "--", "true")
	})
}

func TestExecConflictNamesTheHolder(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		holder := hold(t, d.dsn, "job")
		session := fmt.Sprintf("held by session %d", d.session(t, dblock.NewKey("job")))
		for _, wait := range [][]string{{"--try"}, {"--wait", "100ms"}} {
			args := append(append([]string{"exec", "--key", "job"}, wait...), "--", "echo", "ran")
			if _, stderr := run(t, d.dsn, 75, args...); !strings.Contains(stderr, session) {
				t.Errorf("%v: %q does not say %q", wait, stderr, session)
			}
		}
		holder.release()
	})
}

func TestExecWaitIsNeitherRoundedToForEverNorToATry(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		holder := hold(t, d.dsn, "job")
		exec := func(wait string) []string {
			return []string{"exec", "--key", "job", "--wait", wait, "--", "echo", "ran"}
		}
		for _, wait := range []time.Duration{1, 400 * time.Microsecond, 200 * time.Millisecond, 500 * time.Millisecond, 1500 * time.Millisecond} {
			began := time.Now()
			run(t, d.dsn, 75, exec(wait.String())...)
			if waited := time.Since(began); waited < wait {
				t.Errorf("--wait %v: waited for %v", wait, waited)
			}
		}
		run(t, d.dsn, 2, exec("-1ns")...)
		waiter := start(t, d.dsn, exec(time.Duration(math.MaxInt64).String())...)
		waiter.stderr.expect(t, "waiting for job")
		holder.release()
		waiter.stdout.expect(t, "ran")
		waiter.exit(0)
	})
}

func TestExecWaitsAndSaysForWhom(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		holder := hold(t, d.dsn, "job")
		waiter := start(t, d.dsn, "exec", "--key", "job", "--wait", "1m", "--", "echo", "ran")
		line := waiter.stderr.expect(t, "waiting for job")
		if session := strconv.FormatInt(d.session(t, dblock.NewKey("job")), 10); !strings.Contains(line, session) {
			t.Errorf("%q does not name session %s", line, session)
		}
		if out := waiter.stdout.seen(); out != "" {
			t.Errorf("beside the holder: %q", out)
		}
		holder.release()
		waiter.stdout.expect(t, "ran")
		waiter.exit(0)
	})
}

func TestExecShared(t *testing.T) {
	d := onPostgres(t)
	reader := start(t, d.dsn, "exec", "--shared", "--key", "file", "--", "sh", "-c", "echo held; read x; exit 0")
	reader.stdout.expect(t, "held")
	run(t, d.dsn, 0, "exec", "--shared", "--try", "--key", "file", "--", "true")
	run(t, d.dsn, 75, "exec", "--try", "--key", "file", "--", "true")
	reader.release()
	run(t, d.dsn, 0, "exec", "--try", "--key", "file", "--", "true")
}

func TestExecRawKeyMeetsOtherSoftware(t *testing.T) {
	d := onPostgres(t)
	conn, err := d.sql.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), "SELECT pg_advisory_lock(4097083626)"); err != nil {
		t.Fatal(err)
	}
	run(t, d.dsn, 75, "exec", "--try", "--key", "raw:4097083626", "--", "true")
	if _, err := conn.ExecContext(t.Context(), "SELECT pg_advisory_unlock(4097083626)"); err != nil {
		t.Fatal(err)
	}
	run(t, d.dsn, 0, "exec", "--try", "--key", "raw:4097083626", "--", "true")
}

func TestExecExitCodes(t *testing.T) {
	d := onPostgres(t)
	for script, code := range map[string]int{
		"exit 0":         0,
		"exit 7":         7,
		"exit 255":       255,
		"kill -KILL $$":  128 + 9,
		"kill -TERM $$":  128 + 15,
		"exec /dev/null": 126,
	} {
		run(t, d.dsn, code, "exec", "--key", "job", "--", "sh", "-c", script)
	}
	run(t, d.dsn, 127, "exec", "--key", "job", "--", "no-such-command")
	run(t, d.dsn, 126, "exec", "--key", "job", "--", "/dev/null")
}

func TestExecPassesSignalsOn(t *testing.T) {
	d := onPostgres(t)
	for sig, name := range map[syscall.Signal]string{
		syscall.SIGTERM: "TERM", syscall.SIGINT: "INT", syscall.SIGHUP: "HUP",
		syscall.SIGQUIT: "QUIT", syscall.SIGUSR1: "USR1", syscall.SIGUSR2: "USR2",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Not read: the shell runs no trap for a signal that comes just before it.
			p := start(t, d.dsn, "exec", "--key", name, "--", "sh", "-c",
				`trap "echo got $1; exit 7" $1; echo ready; while :; do sleep 0.1; done`, "sh", name)
			p.stdout.expect(t, "ready")
			p.signal(sig)
			p.stdout.expect(t, "got "+name)
			p.exit(7)
		})
	}
	t.Run("untrapped", func(t *testing.T) {
		t.Parallel()
		p := start(t, d.dsn, "exec", "--key", "untrapped", "--", "sh", "-c", "echo ready; read x")
		p.stdout.expect(t, "ready")
		p.signal(syscall.SIGTERM)
		p.exit(128 + 15)
	})
}

func TestExecSignalWhileWaiting(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		holder := hold(t, d.dsn, "job")
		waiter := start(t, d.dsn, "exec", "--key", "job", "--", "echo", "ran")
		eventually(t, "somebody waits", func() bool { return d.waiting(t) == 1 })
		waiter.signal(syscall.SIGTERM)
		waiter.exit(128 + 15)
		if out := waiter.stdout.all(t); out != "" {
			t.Errorf("stdout %q", out)
		}
		eventually(t, "nobody waits", func() bool { return d.waiting(t) == 0 })
		holder.release()
		run(t, d.dsn, 0, "exec", "--try", "--key", "job", "--", "true")
	})
}

func TestExecEndsTheCommandWhenTheLockIsLost(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		p := start(t, d.dsn, "exec", "--key", "job", "--", "sh", "-c",
			`trap "echo got TERM; exit 0" TERM; echo ready; while :; do sleep 0.1; done`)
		p.stdout.expect(t, "ready")
		d.kill(t, d.session(t, dblock.NewKey("job")))
		p.stdout.expect(t, "got TERM")
		p.exit(76)
		if stderr := p.stderr.all(t); !strings.Contains(stderr, "lost the lock") {
			t.Errorf("stderr: %s", stderr)
		}
	})
}

func TestExecKillsWhatIgnoresTheLoss(t *testing.T) {
	d := onPostgres(t)
	for what, script := range map[string]string{
		"command":    `trap "" TERM; echo ready; while read x; do :; done`,
		"grandchild": `(trap "" TERM; echo ready; while read x; do :; done); exit 0`,
		"orphan":     `(trap "" TERM; echo ready; while read x; do :; done) <&3 & exec 3<&-; read x`,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			p := start(t, d.dsn, "exec", "--key", what, "--kill-after", "200ms", "--", "sh", "-c", "exec 3<&0; "+script)
			p.stdout.expect(t, "ready")
			d.kill(t, d.session(t, dblock.NewKey(what)))
			p.exit(76)
			p.stdout.all(t) // ends only when every process has ended
		})
	}
}

// A command left in the background neither keeps the keys nor is waited for.
func TestExecDoesNotWaitForTheBackground(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		p := start(t, d.dsn, "exec", "--key", "job", "--", "sh", "-c",
			`exec 3<&0; (while read x <&3; do :; done) >/dev/null 2>&1 & echo $!`)
		pid, err := strconv.Atoi(p.stdout.expect(t, ""))
		if err != nil {
			t.Fatal(err)
		}
		p.exit(0)
		if !exists(t, pid) {
			t.Error("the background command has ended")
		}
		run(t, d.dsn, 0, "exec", "--try", "--key", "job", "--", "true")
		p.stdin.Close()
		eventually(t, "the background command ends", func() bool { return !exists(t, pid) })
	})
}

func TestExecFencing(t *testing.T) {
	onEach(t, func(t *testing.T, d *database) {
		fenced := []string{"exec", "--fence", "--key", "job", "--", "sh", "-c", "echo $DBLOCK_TOKEN"}
		if _, stderr := run(t, d.dsn, 1, fenced...); !strings.Contains(stderr, "setup") {
			t.Errorf("without a lock table: %s", stderr)
		}
		run(t, d.dsn, 0, "setup")
		run(t, d.dsn, 0, "setup", "--table", "elsewhere")
		last := int64(0)
		for _, more := range [][]string{nil, {"--table", "elsewhere"}, nil} {
			text, _ := run(t, d.dsn, 0, append(append(fenced[:1:1], more...), fenced[1:]...)...)
			token, err := strconv.ParseInt(text, 10, 64)
			if err != nil || token <= last {
				t.Errorf("token %q after %d", text, last)
			}
			last = token
		}
	})
}
