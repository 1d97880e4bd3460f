package cluster

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
)

// places are where packages put PostgreSQL's server programs, outside PATH.
var places = map[string][]string{
	"linux": {
		"/usr/lib/postgresql/*/bin", // Debian
		"/usr/pgsql-*/bin",          // the PostgreSQL project's RPMs
		"/usr/libexec/postgresql*",  // Alpine
		"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
	},
	"darwin": {
		"/opt/homebrew/opt/postgresql@*/bin",
		"/usr/local/opt/postgresql@*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin",
		"/Library/PostgreSQL/*/bin",
	},
	"windows": {`C:\Program Files\PostgreSQL\*\bin`},
}

// needed are the programs without which a folder is of no use.
var needed = []string{"initdb", "postgres", "pg_ctl"}

// machine is where PostgreSQL may be installed.
type machine struct {
	goos    string
	path    []string // the folders of PATH
	glob    func(pattern string) ([]string, error)
	stat    func(name string) (fs.FileInfo, error)
	resolve func(name string) (string, error) // follows symbolic links
	// foreign: another account will run the programs.
	foreign bool
}

func thisMachine(a account) machine {
	return machine{
		goos:    runtime.GOOS,
		path:    filepath.SplitList(os.Getenv("PATH")),
		glob:    filepath.Glob,
		stat:    os.Stat,
		resolve: filepath.EvalSymlinks,
		foreign: a.foreign(),
	}
}

// find returns the folder of PostgreSQL's programs: the first of PATH, else the
// newest version in the usual places.
func (m machine) find() (bin string, ok bool) {
	for _, folder := range m.path {
		program, err := m.resolve(filepath.Join(folder, m.program(needed[0])))
		if err == nil && m.complete(filepath.Dir(program)) {
			return filepath.Dir(program), true
		}
	}
	for _, place := range places[m.goos] {
		folders, err := m.glob(place)
		if err != nil {
			continue // only a malformed pattern gives an error
		}
		slices.SortStableFunc(folders, func(a, b string) int { return cmp.Compare(versionIn(b), versionIn(a)) })
		if i := slices.IndexFunc(folders, m.complete); i >= 0 {
			return folders[i], true
		}
	}
	return "", false
}

func (m machine) program(name string) string {
	if m.goos == "windows" {
		return name + ".exe"
	}
	return name
}

func (m machine) complete(bin string) bool {
	return !slices.ContainsFunc(needed, func(name string) bool {
		return !m.executable(filepath.Join(bin, m.program(name)))
	})
}

func (m machine) executable(name string) bool {
	info, err := m.stat(name)
	switch {
	case err != nil || !info.Mode().IsRegular():
		return false
	case m.goos == "windows":
		return true
	case m.foreign:
		return openToAll(m.stat, name)
	}
	return info.Mode()&0o111 != 0
}

// openToAll: every account can execute the file, or enter the folder, and get
// there.
func openToAll(stat func(string) (fs.FileInfo, error), name string) bool {
	for {
		info, err := stat(name)
		if err != nil || info.Mode()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(name)
		if parent == name {
			return true
		}
		name = parent
	}
}

var digits = regexp.MustCompile(`\d+(\.\d+)?`)

// versionIn is the version that a folder's name tells, 0 if it tells none.
func versionIn(folder string) float64 {
	version, err := strconv.ParseFloat(digits.FindString(folder), 64)
	if err != nil {
		return 0
	}
	return version
}
