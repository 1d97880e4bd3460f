package cluster

import (
	"os"
	"syscall"
)

// account is who runs the server's programs: who we are.
type account struct{}

func serverAccount() (account, error) { return account{}, nil }

func (account) foreign() bool                    { return false }
func (account) newFolder() (string, error)       { return os.MkdirTemp("", "dblock-demo-") }
func (account) handOver(string) error            { return nil }
func (account) attributes() *syscall.SysProcAttr { return nil }
func interrupt(p *os.Process) error              { return p.Kill() }
