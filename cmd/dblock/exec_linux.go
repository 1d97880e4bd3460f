package main

import "syscall"

// dieWithParent lets the kernel kill the command when dblock dies without
// ending it: the server then frees the lock, and the command would go on
// unguarded. See prctl(2), PR_SET_PDEATHSIG.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
