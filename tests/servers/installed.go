package servers

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
)

const admin = "dblock" // the administrator's name on servers that we set up

// installation is an installed server and how to run an instance of it.
type installation struct {
	kind    Kind
	program program
	version string
	// initialize makes the data folder folder/data; its arguments, free of paths, are part of the
	// key under which the result is cached. nil if the server has no data.
	initialize     func(folder, password string, args []string) (*exec.Cmd, error)
	initializeArgs []string
	// configure writes the files that an instance needs and returns its arguments.
	configure        func(folder, password string, port int, settings []string) ([]string, error)
	orderly, discard os.Signal
	dsn              func(password string, port int) *url.URL
}

// findInstallation returns nil if the server is not installed.
func findInstallation(kind Kind) (*installation, error) {
	var in *installation
	switch kind {
	case KindPostgres:
		in = findPostgres()
	case KindMySQL:
		in = findMySQL()
	case KindMariaDB:
		in = findMariaDB()
	}
	if in == nil {
		return nil, nil
	}
	var err error
	in.version, err = in.program.version()
	return in, err
}

func (p program) version() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	return run(ctx, p.command("--version"))
}

func findPostgres() *installation {
	folders, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	folders = slices.DeleteFunc(folders, func(folder string) bool {
		_, err := os.Stat(filepath.Join(folder, "postgres"))
		return err != nil
	})
	var bin string
	if len(folders) > 0 {
		version := func(folder string) int {
			n, _ := strconv.Atoi(filepath.Base(filepath.Dir(folder)))
			return n
		}
		bin = slices.MaxFunc(folders, func(a, b string) int { return cmp.Compare(version(a), version(b)) })
	} else if path, ok := lookPath("postgres"); ok {
		bin = filepath.Dir(path)
	} else {
		return nil
	}
	return &installation{
		kind:           KindPostgres,
		program:        program{path: filepath.Join(bin, "postgres")},
		initializeArgs: []string{"--no-sync", "--username=" + admin, "--auth=scram-sha-256", "--locale=C", "--encoding=UTF8"},
		initialize: func(folder, password string, args []string) (*exec.Cmd, error) {
			file := filepath.Join(folder, "password")
			if err := writeFile(file, password); err != nil {
				return nil, err
			}
			initdb := program{path: filepath.Join(bin, "initdb")}
			return initdb.command(append(args, "--pgdata="+filepath.Join(folder, "data"), "--pwfile="+file)...), nil
		},
		configure: func(folder, _ string, port int, settings []string) ([]string, error) {
			clients := filepath.Join(folder, "clients") // from wherever a setting makes it listen
			if err := writeFile(clients, "host all,replication all all scram-sha-256\n"); err != nil {
				return nil, err
			}
			return append([]string{"-D", filepath.Join(folder, "data")}, postgresArgs(append([]string{
				"hba_file=" + clients,
				"listen_addresses=127.0.0.1",
				"port=" + strconv.Itoa(port),
				"unix_socket_directories=",
				"max_connections=300",
				"shared_buffers=64MB",
				// The data has to survive a crash of the server, not of the machine.
				"fsync=off",
				"full_page_writes=off",
				// In the data folder, so that nothing is left in /dev/shm after a kill.
				"dynamic_shared_memory_type=mmap",
				"log_line_prefix=%m [%p] %u@%d ",
			}, settings...))...), nil
		},
		orderly: syscall.SIGINT,
		discard: syscall.SIGQUIT, // not SIGKILL, which would leave a shared memory segment
		dsn: func(password string, port int) *url.URL {
			return localURL("postgres", password, port, "postgres", "sslmode=disable")
		},
	}
}

func findMySQL() *installation {
	var p program
	if path, ok := lookPath("mysqld"); ok {
		p = program{path: path}
		// MariaDB installs an alias of this name.
		if version, err := p.version(); err != nil || strings.Contains(version, "MariaDB") {
			p = program{}
		}
	}
	if p.path == "" {
		p = program{root: cmp.Or(os.Getenv("DBLOCK_MYSQL_ROOT"), "/opt/dblock-mysql"), path: "/usr/sbin/mysqld"}
		if _, err := os.Stat(filepath.Join(p.root, p.path)); err != nil || !isRoot() {
			return nil
		}
	}
	return &installation{
		kind:    KindMySQL,
		program: p,
		// Not --initialize-insecure: that leaves a root without a password.
		initializeArgs: []string{"--no-defaults", "--initialize", "--mysqlx=OFF", "--secure-file-priv=NULL", "--innodb-redo-log-capacity=32M"},
		initialize: func(folder, _ string, args []string) (*exec.Cmd, error) {
			return p.command(append(args, "--datadir="+p.inside(filepath.Join(folder, "data")))...), nil
		},
		configure: func(folder, password string, port int, settings []string) ([]string, error) {
			return configureMySQL(p, folder, password, port, append([]string{
				"mysqlx=OFF",
				"secure-file-priv=NULL",
				"innodb-redo-log-capacity=32M",
			}, settings...))
		},
		orderly: syscall.SIGTERM,
		discard: os.Kill,
		dsn: func(password string, port int) *url.URL {
			return localURL("mysql", password, port, "mysql", "")
		},
	}
}

func findMariaDB() *installation {
	path, ok := lookPath("mariadbd")
	if !ok {
		return nil
	}
	p := program{path: path}
	return &installation{
		kind:           KindMariaDB,
		program:        p,
		initializeArgs: []string{"--no-defaults", "--skip-test-db", "--skip-name-resolve", "--innodb-log-file-size=32M"},
		initialize: func(folder, _ string, args []string) (*exec.Cmd, error) {
			script, ok := lookPath("mariadb-install-db")
			if !ok {
				return nil, errors.New("mariadbd is installed without mariadb-install-db")
			}
			temporary, err := temporaryFolder(folder)
			if err != nil {
				return nil, err
			}
			return program{path: script}.command(append(args, "--datadir="+filepath.Join(folder, "data"), "--tmpdir="+temporary)...), nil
		},
		configure: func(folder, password string, port int, settings []string) ([]string, error) {
			return configureMySQL(p, folder, password, port, append([]string{
				"innodb-log-file-size=32M",
				"plugin-load-add=metadata_lock_info", // a warning if it is not installed
			}, settings...))
		},
		orderly: syscall.SIGTERM,
		discard: os.Kill,
		dsn: func(password string, port int) *url.URL {
			return localURL("mariadb", password, port, "mysql", "")
		},
	}
}

// configureMySQL has what MySQL and MariaDB share.
func configureMySQL(p program, folder, password string, port int, settings []string) ([]string, error) {
	file := filepath.Join(folder, "admin.sql")
	err := writeFile(file, fmt.Sprintf("CREATE USER IF NOT EXISTS '%s'@'%%' IDENTIFIED BY '%s';\nGRANT ALL PRIVILEGES ON *.* TO '%[1]s'@'%%' WITH GRANT OPTION;\n", admin, password))
	if err != nil {
		return nil, err
	}
	temporary, err := temporaryFolder(folder)
	if err != nil {
		return nil, err
	}
	return append([]string{"--no-defaults"}, mysqlArgs(append([]string{
		"datadir=" + p.inside(filepath.Join(folder, "data")),
		"tmpdir=" + p.inside(temporary),
		"init-file=" + p.inside(file),
		"bind-address=127.0.0.1",
		"port=" + strconv.Itoa(port),
		"skip-name-resolve",
		// In the data folder.
		"socket=mysqld.sock",
		"pid-file=mysqld.pid",
		"max-connections=300",
		"innodb-buffer-pool-size=64M",
		// The data has to survive a crash of the server, not of the machine.
		"innodb-flush-log-at-trx-commit=2",
		"innodb-doublewrite=0",
		"skip-log-bin",
	}, settings...))...), nil
}

// temporaryFolder is a server's own: a starting server removes the temporary tables that it finds,
// those of another server too.
func temporaryFolder(folder string) (string, error) {
	temporary := filepath.Join(folder, "tmp")
	return temporary, os.MkdirAll(temporary, 0o700)
}

// postgresArgs makes command line arguments of settings.
func postgresArgs(settings []string) []string {
	var args []string
	for _, setting := range settings {
		args = append(args, "-c", strings.TrimLeft(setting, "-"))
	}
	return args
}

// mysqlArgs makes command line arguments of settings, for MariaDB too.
func mysqlArgs(settings []string) []string {
	var args []string
	for _, setting := range settings {
		args = append(args, "--"+strings.TrimLeft(setting, "-"))
	}
	return args
}

// launch starts an instance.
func (in *installation) launch(ctx context.Context, settings []string) (*Server, error) {
	parent := os.TempDir()
	if in.program.root != "" {
		parent = filepath.Join(in.program.root, "data")
	}
	folder, err := shared.newFolder(parent, string(in.kind))
	if err != nil {
		return nil, err
	}
	s, err := in.launchIn(ctx, folder, settings)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", in.kind, err), os.RemoveAll(folder))
	}
	return s, nil
}

func (in *installation) launchIn(ctx context.Context, folder string, settings []string) (*Server, error) {
	password := random()
	if in.initialize != nil {
		var err error
		if password, err = in.makeData(ctx, folder); err != nil {
			return nil, err
		}
	}
	for {
		port, err := freePort()
		if err != nil {
			return nil, err
		}
		args, err := in.configure(folder, password, port, settings)
		if err != nil {
			return nil, err
		}
		if err := handOver(folder); err != nil {
			return nil, err
		}
		p := &process{
			command: func() *exec.Cmd { return in.program.command(args...) },
			folder:  folder,
			orderly: in.orderly,
			discard: in.discard,
		}
		s := &Server{Kind: in.kind, dsn: in.dsn(password, port), engine: p}
		if err := p.start(ctx); err != nil {
			return nil, err
		}
		err = s.awaitReady(ctx)
		if err == nil {
			return s, nil
		}
		taken := !p.running() && strings.Contains(strings.ToLower(p.logTail()), "address already in use")
		if err := errors.Join(err, p.end(in.discard)); !taken {
			return nil, err
		}
		if err := os.Remove(p.log()); err != nil {
			return nil, err
		}
	}
}

// makeData makes folder/data, from a copy that was initialised once for this version of the
// server: initialising takes MySQL seconds. It returns the administrator's password there.
func (in *installation) makeData(ctx context.Context, folder string) (string, error) {
	data := filepath.Join(folder, "data")
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = filepath.Dir(folder) // without a home, for this test binary only
	}
	cache = filepath.Join(cache, "dblock-tests")
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return "", err
	}
	key := sha256.Sum256([]byte(fmt.Sprint(in.version, in.program, in.initializeArgs)))
	template := filepath.Join(cache, fmt.Sprintf("%s-%x", in.kind, key[:8]))

	// One test binary initialises, others wait for it.
	lock := flock.New(template + ".lock")
	if _, err := lock.TryLockContext(ctx, 50*time.Millisecond); err != nil {
		return "", fmt.Errorf("wait for another process to initialise %s: %w", template, err)
	}
	defer lock.Close()

	password, err := os.ReadFile(filepath.Join(template, "password"))
	if err == nil {
		if err := os.CopyFS(data, os.DirFS(filepath.Join(template, "data"))); err != nil {
			return "", err
		}
		return string(password), os.Chmod(data, 0o700)
	}

	fresh := random()
	cmd, err := in.initialize(folder, fresh, in.initializeArgs)
	if err != nil {
		return "", err
	}
	if err := handOver(folder); err != nil {
		return "", err
	}
	if _, err := run(ctx, cmd); err != nil {
		return "", fmt.Errorf("initialise the data folder: %w", err)
	}
	// Moved into place whole: a run that is cut short leaves no half template.
	building := template + ".building"
	if err := os.RemoveAll(building); err != nil {
		return "", err
	}
	if err := os.CopyFS(filepath.Join(building, "data"), os.DirFS(data)); err != nil {
		return "", err
	}
	if err := writeFile(filepath.Join(building, "password"), fresh); err != nil {
		return "", err
	}
	return fresh, os.Rename(building, template)
}

func localURL(scheme, password string, port int, database, query string) *url.URL {
	return &url.URL{
		Scheme:   scheme,
		User:     url.UserPassword(admin, password),
		Host:     fmt.Sprintf("127.0.0.1:%d", port),
		Path:     "/" + database,
		RawQuery: query,
	}
}

func writeFile(path, content string) error { return os.WriteFile(path, []byte(content), 0o600) }

// lookPath finds a binary, also where only root's PATH leads.
func lookPath(name string) (string, bool) {
	for _, candidate := range []string{name, "/usr/sbin/" + name, "/usr/local/sbin/" + name} {
		if path, err := exec.LookPath(candidate); err == nil {
			if resolved, err := filepath.EvalSymlinks(path); err == nil {
				return resolved, true
			}
		}
	}
	return "", false
}
