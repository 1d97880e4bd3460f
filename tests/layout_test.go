package tests

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/dblock-go/dblock"

// allowed says what the packages may import besides the standard library: a
// program links only the drivers that it uses, and a database's peculiarities
// stay in its own folder.
var allowed = map[string][]string{
	"":                         {"/dialect", "github.com/cespare/xxhash"},
	"/dialect":                 {},
	"/dialect/internal/kept":   {"/dialect"},
	"/dialect/internal/pinned": {"/dialect"},
	"/dialect/internal/tcp":    {},
	"/dialect/postgres":        {"/dialect", "/dialect/internal/kept", "/dialect/internal/pinned", "/dialect/internal/tcp", "github.com/jackc/pgx"},
	"/dialect/mysql":           {"/dialect", "/dialect/internal/pinned", "/dialect/internal/tcp", "github.com/go-sql-driver/mysql"},
	"/dialect/sqlserver":       {"/dialect", "/dialect/internal/kept", "/dialect/internal/pinned", "/dialect/internal/tcp", "github.com/microsoft/go-mssqldb"},
	"/deadlock":                {"", "/dialect", "github.com/sethvargo/go-retry"},
	"/internal/transaction":    {"", "/dialect", "/deadlock"},
	"/advisory":                {"", "/dialect", "/deadlock", "/internal/transaction", "github.com/sethvargo/go-retry"},
	"/rowlock":                 {"", "/dialect", "/deadlock", "/internal/transaction"},
	"/migrations":              {"", "/dialect", "/deadlock", "github.com/pressly/goose", "github.com/sethvargo/go-retry"},
}

type listed struct {
	ImportPath string
	Imports    []string
}

func TestImportsFollowTheLayout(t *testing.T) {
	list := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	list.Dir = ".."
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	packages := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p listed
		if err := packages.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, module)
		if strings.HasPrefix(name, "/cmd/") {
			continue // an application: it imports what it likes
		}
		may, ok := allowed[name]
		if !ok {
			t.Errorf("package %s has no rule", p.ImportPath)
			continue
		}
		seen++
		for _, imported := range p.Imports {
			if !mayImport(may, imported) {
				t.Errorf("%s must not import %s", p.ImportPath, imported)
			}
		}
	}
	if seen != len(allowed) {
		t.Errorf("%d packages seen, %d rules", seen, len(allowed))
	}
}

func mayImport(may []string, imported string) bool {
	own, isOwn := strings.CutPrefix(imported, module)
	if isOwn {
		return slices.Contains(may, own)
	}
	first, _, _ := strings.Cut(imported, "/")
	if !strings.Contains(first, ".") {
		return true // the standard library
	}
	return slices.ContainsFunc(may, func(prefix string) bool {
		return prefix != "" && strings.HasPrefix(imported, prefix)
	})
}
