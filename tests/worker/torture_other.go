//go:build !linux

package main

import "errors"

// torture needs a clock that processes share.
func torture([]string) error { return errors.New("the torture test runs on Linux only") }
