//go:build unix

package cluster

import (
	"errors"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is who runs the server's programs: PostgreSQL refuses root. The zero
// account is who we are.
type account struct{ uid, gid int }

func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	for _, name := range []string{"nobody", "postgres"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.Atoi(u.Uid)
		gid, gidErr := strconv.Atoi(u.Gid)
		if err := errors.Join(uidErr, gidErr); err != nil {
			return account{}, err
		}
		return account{uid, gid}, nil
	}
	return account{}, errors.New("PostgreSQL refuses to run as root, and there is neither an account nobody nor postgres: run the demo as an ordinary user, or name a database with --dsn")
}

func (a account) foreign() bool { return a != account{} }

// newFolder makes a temporary folder for the account alone.
func (a account) newFolder() (string, error) {
	parent := os.TempDir()
	for _, other := range []string{"/tmp", "/var/tmp"} {
		if a.foreign() && !openToAll(os.Stat, parent) {
			parent = other // root's own is of no use to others
		}
	}
	folder, err := os.MkdirTemp(parent, "dblock-demo-")
	if err != nil {
		return "", err
	}
	return folder, a.handOver(folder)
}

// handOver gives a file, or a folder with what is in it, to the account.
func (a account) handOver(name string) error {
	if !a.foreign() {
		return nil
	}
	return filepath.WalkDir(name, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, a.uid, a.gid)
	})
}

func (a account) attributes() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{}
	if a.foreign() {
		attr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	endWithParent(attr)
	return attr
}

func interrupt(p *os.Process) error { return p.Signal(syscall.SIGTERM) }
