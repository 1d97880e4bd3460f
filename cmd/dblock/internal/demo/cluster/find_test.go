package cluster

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"strings"
	"testing"
	"testing/fstest"
)

// fakeMachine has the programs in the folders given, whose modes can be changed,
// and the links.
func fakeMachine(folders []string, links map[string]string, path ...string) (machine, fstest.MapFS) {
	files := fstest.MapFS{".": {Mode: fs.ModeDir | 0o755}}
	for _, folder := range folders {
		for _, program := range needed {
			addFile(files, folder+"/"+program)
		}
	}
	relative := func(name string) string {
		if name == "/" {
			return "."
		}
		return strings.TrimPrefix(name, "/")
	}
	return machine{
		goos: "linux",
		path: path,
		glob: func(pattern string) ([]string, error) {
			found, err := fs.Glob(files, relative(pattern))
			for i := range found {
				found[i] = "/" + found[i]
			}
			return found, err
		},
		stat: func(name string) (fs.FileInfo, error) { return files.Stat(relative(name)) },
		resolve: func(name string) (string, error) {
			if target, ok := links[name]; ok {
				return target, nil
			}
			_, err := files.Stat(relative(name))
			return name, err
		},
	}, files
}

func addFile(files fstest.MapFS, name string) {
	name = strings.TrimPrefix(name, "/")
	files[name] = &fstest.MapFile{Mode: 0o755}
	for folder := path.Dir(name); folder != "."; folder = path.Dir(folder) {
		files[folder] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
	}
}

func TestFind(t *testing.T) {
	const debian9, debian15, debian17 = "/usr/lib/postgresql/9.6/bin", "/usr/lib/postgresql/15/bin", "/usr/lib/postgresql/17/bin"
	for _, test := range []struct {
		name    string
		folders []string
		links   map[string]string
		path    []string
		change  func(files fstest.MapFS)
		foreign bool
		want    string
	}{
		{name: "nothing"},
		{name: "PATH without PostgreSQL", path: []string{"/usr/bin", "", "/nowhere"}},
		{name: "in PATH", folders: []string{"/opt/pg/bin", debian17}, path: []string{"/usr/bin", "/opt/pg/bin"}, want: "/opt/pg/bin"},
		{name: "linked from PATH", folders: []string{debian15, debian17}, path: []string{"/usr/local/bin"},
			links: map[string]string{"/usr/local/bin/initdb": debian15 + "/initdb"}, want: debian15},
		{name: "newest by number", folders: []string{debian9, debian15, debian17}, want: debian17},
		{name: "client only", folders: []string{debian15, debian17},
			change: func(files fstest.MapFS) { delete(files, "usr/lib/postgresql/17/bin/postgres") }, want: debian15},
		{name: "not executable", folders: []string{debian15, debian17},
			change: func(files fstest.MapFS) { files["usr/lib/postgresql/17/bin/pg_ctl"].Mode = 0o644 }, want: debian15},
		{name: "root's own, for root", folders: []string{"/root/pg/bin", debian15}, path: []string{"/root/pg/bin"}, foreign: true,
			change: func(files fstest.MapFS) { files["root"].Mode = fs.ModeDir | 0o700 }, want: debian15},
	} {
		t.Run(test.name, func(t *testing.T) {
			m, files := fakeMachine(test.folders, test.links, test.path...)
			m.foreign = test.foreign
			if test.change != nil {
				test.change(files)
			}
			bin, ok := m.find()
			if bin != test.want || ok != (test.want != "") {
				t.Errorf("found %q, %v; want %q", bin, ok, test.want)
			}
		})
	}
}

func TestProvide(t *testing.T) {
	noNetwork := errors.New("unable to connect")
	fails := func(context.Context) (string, error) { return "", noNetwork }
	var said []string
	say := func(text string) { said = append(said, text) }

	t.Run("says what to install", func(t *testing.T) {
		m, _ := fakeMachine(nil, nil)
		_, err := provide(t.Context(), m, ways{download: fails}, say)
		if !errors.Is(err, noNetwork) {
			t.Fatalf("%v", err)
		}
		for _, way := range []string{"apt-get install postgresql", "brew install postgresql", "--dsn"} {
			if !strings.Contains(err.Error(), way) {
				t.Errorf("%q does not name %q", err, way)
			}
		}
	})
	t.Run("installed beats downloaded", func(t *testing.T) {
		m, _ := fakeMachine([]string{"/usr/lib/postgresql/17/bin"}, nil)
		bin, err := provide(t.Context(), m, ways{}, say)
		if bin != "/usr/lib/postgresql/17/bin" || err != nil {
			t.Errorf("%q, %v", bin, err)
		}
	})
	t.Run("installs where nothing can be downloaded", func(t *testing.T) {
		m, files := fakeMachine(nil, nil)
		said = nil
		bin, err := provide(t.Context(), m, ways{download: fails, install: func(context.Context) error {
			for _, program := range needed {
				addFile(files, "/usr/lib/postgresql/15/bin/"+program)
			}
			return nil
		}}, say)
		if bin != "/usr/lib/postgresql/15/bin" || err != nil {
			t.Errorf("%q, %v", bin, err)
		}
		if !strings.Contains(strings.Join(said, "\n"), "apt-get") {
			t.Errorf("installed without saying so: %q", said)
		}
	})
	t.Run("a failed installation is told", func(t *testing.T) {
		m, _ := fakeMachine(nil, nil)
		broken := errors.New("dpkg is locked")
		_, err := provide(t.Context(), m, ways{download: fails, install: func(context.Context) error { return broken }}, say)
		if !errors.Is(err, broken) || !errors.Is(err, noNetwork) || !strings.Contains(err.Error(), "--dsn") {
			t.Errorf("%v", err)
		}
	})
	t.Run("a cancelled download installs nothing", func(t *testing.T) {
		m, _ := fakeMachine(nil, nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := provide(ctx, m, ways{download: fails, install: func(context.Context) error {
			t.Error("installed")
			return nil
		}}, say)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
}
