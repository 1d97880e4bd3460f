//go:build linux

package bench

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// peers are the modules whose versions matter to the figures.
var peers = []string{
	"github.com/go-sql-driver/mysql",
	"github.com/golang-migrate/migrate/v4",
	"github.com/jackc/pgx/v5",
	"github.com/pressly/goose/v3",
	"github.com/redis/go-redis/v9",
	"go.etcd.io/etcd/server/v3",
}

// machine describes, in Markdown, what the figures were measured on.
func machine() string {
	var b strings.Builder
	line := func(what, value string) {
		if value != "" {
			fmt.Fprintf(&b, "| %s | %s |\n", what, value)
		}
	}
	b.WriteString("| | |\n|---|---|\n")
	line("date", time.Now().UTC().Format(time.DateOnly))
	line("dblock", output("git", "describe", "--always", "--dirty", "--exclude=*"))
	line("processor", fmt.Sprintf("%s, %d of its cores", field("/proc/cpuinfo", "model name"), runtime.NumCPU()))
	line("memory", field("/proc/meminfo", "MemTotal"))
	line("kernel", firstLine("/proc/sys/kernel/osrelease"))
	line("load average at the end", firstLine("/proc/loadavg"))
	line("Go", fmt.Sprintf("%s %s/%s", runtime.Version(), runtime.GOOS, runtime.GOARCH))
	list := append([]string{"list", "-m", "-f", "{{.Path}} {{.Version}}"}, peers...)
	for module := range strings.Lines(output("go", list...)) {
		path, version, _ := strings.Cut(strings.TrimSpace(module), " ")
		line(path, version)
	}
	line("Redis", output("redis-server", "--version"))
	return b.String()
}

// output, and what is below, is empty where it is not to be had: a figure is worth
// something without it.
func output(name string, args ...string) string {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func firstLine(file string) string {
	content, _ := os.ReadFile(file)
	line, _, _ := strings.Cut(string(content), "\n")
	return line
}

func field(file, name string) string {
	content, _ := os.ReadFile(file)
	for line := range strings.Lines(string(content)) {
		if key, value, _ := strings.Cut(line, ":"); strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
