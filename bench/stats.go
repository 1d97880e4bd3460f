//go:build linux

package bench

import (
	"cmp"
	"slices"
)

// median of an even number of values is the lower one of the middle. It is 0 of
// none.
func median[T cmp.Ordered](values []T) T { return quantile(values, 0.5) }

// quantile is the smallest value that is not below the share q of them.
func quantile[T cmp.Ordered](values []T, q float64) T {
	var none T
	if len(values) == 0 {
		return none
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[int(q*float64(len(sorted)-1))]
}

// jain is Jain's index of fairness: 1 when all got the same, 1/n when one of n got
// everything.
func jain(shares []int) float64 {
	var sum, squares float64
	for _, s := range shares {
		sum += float64(s)
		squares += float64(s) * float64(s)
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(shares)) * squares)
}
