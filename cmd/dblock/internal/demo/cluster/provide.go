package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const (
	downloadWithin = 3 * time.Minute
	installWithin  = 5 * time.Minute
)

// repository is Maven's central one, which has the archives of
// https://github.com/zonkyio/embedded-postgres-binaries.
const repository = "https://repo1.maven.org/maven2"

const wayOut = "install it (Debian, Ubuntu: apt-get install postgresql; macOS: brew install postgresql@17; " +
	"others: https://www.postgresql.org/download), or name a database with --dsn"

// ways are how a machine gets PostgreSQL where none is installed.
type ways struct {
	download func(ctx context.Context) (bin string, err error)
	install  func(ctx context.Context) error // nil: not possible here
}

// provide returns the folder of PostgreSQL's programs.
func provide(ctx context.Context, m machine, w ways, say func(string)) (bin string, err error) {
	if bin, ok := m.find(); ok {
		return bin, nil
	}
	say("No PostgreSQL is installed: downloading one for this run …")
	bin, failure := w.download(ctx)
	if failure == nil {
		return bin, nil
	}
	if w.install != nil && ctx.Err() == nil {
		say(fmt.Sprintf("That failed (%v).\nInstalling Debian's package postgresql by apt-get, without starting its service …", failure))
		err := w.install(ctx)
		bin, ok := m.find()
		switch {
		case err != nil:
			failure = fmt.Errorf("%w; %w", failure, err)
		case ok:
			return bin, nil
		}
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	return "", fmt.Errorf("there is no PostgreSQL for the demo: %s (%w)", wayOut, failure)
}

func waysHere(folder string, account account) ways {
	w := ways{download: func(ctx context.Context) (string, error) {
		return download(ctx, repository, folder, account)
	}}
	_, notDebian := os.Stat("/etc/debian_version")
	_, notFound := exec.LookPath("apt-get")
	if runtime.GOOS == "linux" && os.Geteuid() == 0 && notDebian == nil && notFound == nil {
		w.install = install
	}
	return w
}

// download gets PostgreSQL by embedded-postgres, and keeps what came over the
// network for the next time.
func download(ctx context.Context, repository, folder string, account account) (bin string, err error) {
	unpacked := filepath.Join(folder, "postgresql")
	cache := filepath.Join(folder, "download")
	if caches, err := os.UserCacheDir(); err == nil {
		cache = filepath.Join(caches, "dblock")
	}
	port, err := freePort()
	if err != nil {
		return "", err
	}
	// The library downloads as the first step of starting a server of its own.
	// That server is not wanted: a locale that does not exist keeps it away.
	fetcher := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		BinariesPath(unpacked).
		BinaryRepositoryURL(repository).
		CachePath(cache).
		RuntimePath(filepath.Join(folder, "unused")).
		Port(uint32(port)).
		Locale("dblock-only-downloads").
		Logger(io.Discard))
	restore, err := tempIn(folder)
	if err != nil {
		return "", err
	}
	defer restore()
	ctx, cancel := context.WithTimeoutCause(ctx, downloadWithin, fmt.Errorf("the download took more than %v", downloadWithin))
	defer cancel()
	done := make(chan error, 1)
	go func() { // knows no context; at the latest it ends with the process
		defer func() {
			if r := recover(); r != nil {
				done <- fmt.Errorf("unpack PostgreSQL: %v", r)
			}
		}()
		done <- fetcher.Start()
	}()
	select {
	case err = <-done:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	if err == nil {
		err = fetcher.Stop()
	}
	bin = filepath.Join(unpacked, "bin")
	if handErr := account.handOver(folder); handErr != nil {
		return "", handErr
	}
	if !thisMachine(account).complete(bin) {
		return "", fmt.Errorf("download PostgreSQL: %w", err)
	}
	return bin, nil
}

// tempIn keeps in a folder what the library leaves in the temporary one: its log.
func tempIn(folder string) (restore func(), err error) {
	variable := "TMPDIR"
	if runtime.GOOS == "windows" {
		variable = "TMP"
	}
	before, set := os.LookupEnv(variable)
	return func() {
		if set {
			_ = os.Setenv(variable, before) // it was possible before
		} else {
			_ = os.Unsetenv(variable)
		}
	}, os.Setenv(variable, folder)
}

// install installs Debian's package.
func install(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, installWithin, fmt.Errorf("apt-get took more than %v", installWithin))
	defer cancel()
	// See invoke-rc.d(8): 101 forbids to start the package's service.
	const policy = "/usr/sbin/policy-rc.d"
	file, err := os.OpenFile(policy, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	switch {
	case err == nil:
		defer func() { err = errors.Join(err, os.Remove(policy)) }()
		_, writeErr := file.WriteString("#!/bin/sh\nexit 101\n")
		if err := errors.Join(writeErr, file.Close()); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrExist): // who has a policy already decides
		return err
	}
	for _, args := range [][]string{
		{"update"},
		{"install", "--yes", "--no-install-recommends", "--no-remove", "postgresql"},
	} {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
		if _, err := runToEnd(ctx, cmd); err != nil {
			return err
		}
	}
	return nil
}
