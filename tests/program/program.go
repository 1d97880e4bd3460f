// Package program builds programs that tests run as processes of their own, to
// be killed where a function call could not be.
package program

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
)

// built holds what a test binary has built. Nothing of it is shared with other
// test binaries: they may belong to another version of the code.
var built struct {
	mu       sync.Mutex
	folder   string
	programs map[string]string // paths by name
}

// Build builds a main package of dblock, named by its path below the root of the
// repository, once for all tests of the binary, with the race detector if they
// have it, and with build tags if there are any. Any account may run the result.
func Build(t testing.TB, pkg string, tags ...string) string {
	t.Helper()
	built.mu.Lock()
	defer built.mu.Unlock()
	name := strings.Join(append([]string{filepath.Base(pkg)}, tags...), "-")
	if path, ok := built.programs[name]; ok {
		return path
	}
	if built.folder == "" {
		folder, err := os.MkdirTemp("", "dblock-programs-")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		built.folder, built.programs = folder, map[string]string{}
	}
	path := filepath.Join(built.folder, name+".exe") // Windows wants the ending
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/dblock-go/dblock").Output()
	if err != nil {
		t.Fatalf("find the root of the repository: %v", err)
	}
	build := exec.Command("go", "build", "-C", filepath.Join(strings.TrimSpace(string(root)), pkg), "-tags", strings.Join(tags, ","), "-o", path)
	if raceEnabled() {
		build.Args = append(build.Args, "-race")
	}
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
	built.programs[name] = path
	return path
}

// Remove removes what was built; it is for servers.Main.
func Remove() {
	built.mu.Lock()
	defer built.mu.Unlock()
	if err := os.RemoveAll(built.folder); err != nil {
		fmt.Fprintf(os.Stderr, "remove programs: %v\n", err)
	}
}

func raceEnabled() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
