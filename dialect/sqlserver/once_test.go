package sqlserver

import (
	"slices"
	"strings"
	"testing"

	"github.com/dblock-go/dblock/dialect"
)

func marks(s string) answer { return answer{outs: map[string]any{"first": s}} }

func TestMarkRows(t *testing.T) {
	stub, d := openDB(t, rows("", "0,0,"), marks("10"))
	first, err := d.MarkRows(t.Context(), begin(t, d), dialect.MarkRequest{Table: dialect.Table{Name: "once"}, Keys: rowKeys})
	if err != nil || !slices.Equal(first, []bool{true, false}) {
		t.Errorf("got %v, %v", first, err)
	}
	sent := stub.sent("")
	if len(sent) != 2 || sent[0].session != sent[1].session {
		t.Fatalf("sent %v", sent)
	}
	if q := sent[1].query; !strings.Contains(q, "FROM [once] WITH (UPDLOCK, HOLDLOCK, ROWLOCK) WHERE id = @id") ||
		!strings.Contains(q, "UPDATE [once] WITH (UPDLOCK, HOLDLOCK, ROWLOCK) SET fence = @clock") {
		t.Errorf("marked with %s", q)
	}
	if sent[1].args["count"] != int32(2) || sent[1].args["ids"] != sent[0].args["ids"] {
		t.Errorf("sent %v", sent[1].args)
	}
}

// What is no clear answer says neither "first" nor "done before".
func TestMarkRowsThatAreNoAnswer(t *testing.T) {
	for answered, class := range map[string]dialect.Class{"1x": dialect.InvalidKey, "?0": dialect.Serialization, "1": ""} {
		_, d := openDB(t, rows("", "0,0,"), marks(answered))
		first, err := d.MarkRows(t.Context(), begin(t, d), dialect.MarkRequest{Keys: rowKeys})
		if err == nil || first != nil || dialect.ClassOf(err) != class {
			t.Errorf("%q: %v, %v, want %v", answered, first, err, class)
		}
	}
	_, d := openDB(t, rows("", "0,0,"), answer{err: serverError(3960)})
	_, err := d.MarkRows(t.Context(), begin(t, d), dialect.MarkRequest{Keys: rowKeys})
	wantError(t, err, dialect.Serialization, "3960")
}
