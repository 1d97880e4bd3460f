package cluster

import "syscall"

// endWithParent lets the kernel end the server when our process dies without
// doing it: by an immediate shutdown, after which nothing is left in memory. See
// prctl(2), PR_SET_PDEATHSIG, and the signals of
// https://www.postgresql.org/docs/current/server-shutdown.html.
func endWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGQUIT }
