package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	link   = regexp.MustCompile(`\[([^\]]+)\]\(\.\./(tests/[^)]+|[a-z]+/[^)]+)\)`)
	clause = regexp.MustCompile(`\{"([^"]+)", (\w+)(\(\w+\))?\}`)
)

// Every line of the page names a test that shows it, where that test is.
func TestEveryGuaranteeNamesItsTest(t *testing.T) {
	page, err := os.ReadFile("../docs/guarantees.md")
	if err != nil {
		t.Fatal(err)
	}
	functions := clauseFunctions(t)
	tables, lines, links := 0, 0, 0
	inTable := false
	for line := range strings.Lines(string(page)) {
		found := link.FindAllStringSubmatch(line, -1)
		links += len(found)
		for _, match := range found {
			name, file := match[1], match[2]
			if clauseFunction, ok := functions[name]; ok {
				name = clauseFunction
			}
			source, err := os.ReadFile(filepath.Join("..", file))
			switch {
			case err != nil:
				t.Error(err)
			case name != file && !strings.Contains(string(source), fmt.Sprintf("func %s(", name)):
				t.Errorf("%s has no test or clause %q", file, match[1])
			}
		}
		switch {
		case strings.HasPrefix(line, "| what | how soon | shown by |"):
			inTable = true
			tables++
		case !strings.HasPrefix(line, "|"):
			inTable = false
		case inTable && !strings.HasPrefix(line, "|---"):
			lines++
			if len(found) == 0 {
				t.Errorf("no test is named: %s", line)
			}
		}
	}
	if tables != 7 || lines < 30 || links < lines {
		t.Errorf("%d tables with %d lines and %d links: the page is not understood", tables, lines, links)
	}
}

// clauseFunctions are the functions of the conformance suite's clauses by name.
func clauseFunctions(t *testing.T) map[string]string {
	files, err := filepath.Glob("conformance/*.go")
	if err != nil {
		t.Fatal(err)
	}
	functions := map[string]string{}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range clause.FindAllStringSubmatch(string(source), -1) {
			functions[match[1]] = match[2]
		}
	}
	return functions
}
