//go:build unix && !linux

package cluster

import "syscall"

// endWithParent has no counterpart here.
func endWithParent(*syscall.SysProcAttr) {}
