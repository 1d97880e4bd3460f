//go:build unix && !linux

package main

import "syscall"

// dieWithParent has no counterpart here; see dblock exec --help.
func dieWithParent(*syscall.SysProcAttr) {}
