//go:build unix

package demo_test

import (
	"os/exec"
	"syscall"
)

func asNobody(cmd *exec.Cmd) {
	const nobody = 65534
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	cmd.Dir = "/"
}
