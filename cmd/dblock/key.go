package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/dblock-go/dblock"
)

// rawPrefix marks a key that other software uses.
const rawPrefix = "raw:"

// keyHelp says how a key is written on the command line.
const keyHelp = `A key is written as its parts with slashes between them: account/42 is what a Go program calls NewKey("account", "42"). raw:4097083626 is a number that other software locks, RawKey(4097083626).`

// keyArg is a key on the command line.
type keyArg struct {
	dblock.Key
	raw bool
}

// UnmarshalText reads a key. See keyHelp.
func (k *keyArg) UnmarshalText(text []byte) error {
	if digits, ok := strings.CutPrefix(string(text), rawPrefix); ok {
		id, err := strconv.ParseInt(digits, 10, 64)
		if err != nil {
			return fmt.Errorf("raw: takes a signed 64-bit integer, not %q", digits)
		}
		k.Key, k.raw = dblock.RawKey(id), true
		return nil
	}
	k.Key = dblock.NewKey(strings.Split(string(text), "/")...)
	if !k.Valid() {
		return errors.New("a key must not be empty")
	}
	return nil
}
