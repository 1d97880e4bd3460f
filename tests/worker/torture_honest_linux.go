//go:build !planted_bug

package main

import (
	"context"
	"errors"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
)

// canPlant: without the build tag planted_bug the worker has no defect.
func canPlant(planted string) error {
	if planted != "" {
		return errors.New("this worker was built without the tag planted_bug")
	}
	return nil
}

func (c *client) plant(lock *advisory.Lock) holder { return lock }

func (w *inTx) plantInTx(context.Context, statements, dblock.Key) error { return nil }
