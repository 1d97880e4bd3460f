package history

import (
	"bytes"
	"slices"
	"testing"
)

func TestARecordThatAKillCutShortIsLeftOut(t *testing.T) {
	var written bytes.Buffer
	w := NewWriter(&written)
	for _, op := range []string{"a", "b"} {
		if err := w.Write(Record{At: 1, What: Ask, Op: op}); err != nil {
			t.Fatal(err)
		}
	}
	read := func(text []byte) (ops []string, err error) {
		err = Read(bytes.NewReader(text), func(r Record) { ops = append(ops, r.Op) })
		return ops, err
	}
	if ops, err := read(written.Bytes()); err != nil || !slices.Equal(ops, []string{"a", "b"}) {
		t.Errorf("%v, %v", ops, err)
	}
	if ops, err := read(written.Bytes()[:written.Len()-5]); err != nil || !slices.Equal(ops, []string{"a"}) {
		t.Errorf("cut short: %v, %v", ops, err)
	}
	if _, err := read([]byte("no record\n")); err == nil {
		t.Error("what is no record was read")
	}
}
