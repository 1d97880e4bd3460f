package tests

import (
	"testing"

	"github.com/dblock-go/dblock/tests/conformance"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMariaDB(t *testing.T) {
	conformance.Run(t, mysqlHarness(servers.MariaDB, servers.KindMariaDB))
}
