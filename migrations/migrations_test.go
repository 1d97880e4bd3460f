package migrations

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/dialect"
)

func TestBadOptions(t *testing.T) {
	for name, opts := range map[string][]*Options{
		"two values":    {nil, nil},
		"negative wait": {{WaitLimit: -time.Second}},
		"shared key":    {{Key: dblock.NewKey("guard").Shared()}},
		"version table": {{VersionTable: "versions; DROP TABLE accounts"}},
		"table name":    {{Provider: []goose.ProviderOption{goose.WithTableName("elsewhere")}}},
	} {
		t.Run(name, func(t *testing.T) {
			files := fstest.MapFS{"00001_a.sql": {Data: []byte("-- +goose Up\n")}}
			if _, err := Up(t.Context(), &fakeDB{}, files, opts...); !errors.Is(err, dblock.ErrInvalidOption) {
				t.Errorf("Up: %v", err)
			}
			if _, err := Status(t.Context(), &fakeDB{}, files, opts...); !errors.Is(err, dblock.ErrInvalidOption) {
				t.Errorf("Status: %v", err)
			}
		})
	}
	if _, err := SessionLocker(&fakeDB{}, &Options{WaitLimit: -1}); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("SessionLocker: %v", err)
	}
	if _, err := UpTo(t.Context(), &fakeDB{}, fstest.MapFS{"1_a.sql": {}}, 0); !errors.Is(err, dblock.ErrInvalidOption) {
		t.Errorf("UpTo: %v", err)
	}
}

func TestNilDatabase(t *testing.T) {
	_, err := Up(t.Context(), nil, nil)
	_, lockerErr := SessionLocker(nil)
	for _, err := range []error{err, lockerErr, Setup(t.Context(), nil)} {
		if !errors.Is(err, dblock.ErrInvalidOption) || !strings.Contains(err.Error(), "nil") {
			t.Errorf("got %v", err)
		}
	}
}

func TestNoMigrationsSaysWhereItLooked(t *testing.T) {
	empty := t.TempDir()
	missing := filepath.Join(empty, "nowhere")
	above := t.TempDir()
	below := filepath.Join(above, "sql")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(below, "00001_a.sql"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		fsys fs.FS
		says []string
	}{
		{"nil", nil, []string{"neither files nor Go migrations"}},
		{"empty folder", os.DirFS(empty), []string{empty, "00001_name.sql"}},
		{"missing folder", os.DirFS(missing), []string{missing, "cannot be read"}},
		{"subfolder on disk", os.DirFS(above), []string{strconv.Quote(filepath.ToSlash(below)) + ": use that folder)"}},
		{"subfolder", fstest.MapFS{"sql/migrations.txt": {}, "sql/00001_a.sql": {}}, []string{`fs.Sub(fsys, "sql")`}},
		{"misnamed", fstest.MapFS{"accounts.sql": {}}, []string{"00001_name.sql"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Up(t.Context(), &fakeDB{}, c.fsys)
			if !errors.Is(err, dblock.ErrSetup) {
				t.Fatalf("got %v", err)
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q lacks %q", err, want)
				}
			}
		})
	}
}

func TestDuplicateVersionsAreRefused(t *testing.T) {
	_, err := Up(t.Context(), &fakeDB{}, fstest.MapFS{"00001_a.sql": {}, "1_b.sql": {}})
	if !errors.Is(err, dblock.ErrInvalidOption) || !strings.Contains(err.Error(), "1_b.sql") {
		t.Errorf("got %v", err)
	}
}

func TestDefaultGuardFollowsTheVersionTable(t *testing.T) {
	key := func(o *Options) dblock.Key {
		resolved, err := resolve([]*Options{o})
		if err != nil {
			t.Fatal(err)
		}
		return resolved.Key
	}
	standard := key(nil)
	for _, same := range []string{"goose_db_version", "public.goose_db_version", "GOOSE_DB_VERSION"} {
		if key(&Options{VersionTable: same}) != standard {
			t.Errorf("%s may be the same table, but has another guard", same)
		}
	}
	if key(&Options{VersionTable: "billing_version"}) == standard {
		t.Error("another version table has the same guard")
	}
	if own := dblock.RawKey(7); key(&Options{Key: own}) != own {
		t.Error("the key given is not used")
	}
}

func TestSetupNames(t *testing.T) {
	for name, o := range map[string]*SetupOptions{
		"quote":  {Table: `locks"`},
		"dot":    {Table: "public.locks"},
		"schema": {Schema: "a b"},
		"long":   {Table: strings.Repeat("l", maxTable+1)},
	} {
		if err := Setup(t.Context(), &fakeDB{}, o); !errors.Is(err, dblock.ErrInvalidOption) {
			t.Errorf("%s: %v", name, err)
		}
	}
	got, err := setupVersionTable(&fakeDB{}, dialect.Table{Schema: "App", Name: strings.Repeat("l", maxTable)})
	if err != nil || got != `"App"."dblock_`+strings.Repeat("l", maxTable)+`_version"` {
		t.Errorf("got %s, %v", got, err)
	}
}
