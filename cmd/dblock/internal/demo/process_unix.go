//go:build unix

package demo

import "syscall"

// ownGroup keeps the terminal's Ctrl-C from the processes: it is for the
// director, who then ends them.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
