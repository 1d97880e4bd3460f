// Package tests runs the conformance suite: one harness for each way to use
// each database.
package tests

import (
	"testing"

	"github.com/dblock-go/dblock/tests/program"
	"github.com/dblock-go/dblock/tests/servers"
)

func TestMain(m *testing.M) { servers.Main(m, program.Remove) }
