//go:build unix

package cluster

import (
	"archive/zip"
	_ "embed"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

// archive is what the library unpacks: bin/initdb, bin/postgres and bin/pg_ctl,
// each a shell script that fails.
//
//go:embed testdata/postgresql.txz
var archive []byte

func TestDownload(t *testing.T) {
	t.Setenv("HOME", "") // so that the archive goes into the folder, too
	t.Setenv("XDG_CACHE_HOME", "")
	repository := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, ".jar") {
			http.NotFound(w, r)
			return
		}
		jar := zip.NewWriter(w)
		file, err := jar.Create("postgres.txz")
		if err == nil {
			_, err = file.Write(archive)
		}
		if err != nil || jar.Close() != nil {
			t.Error("cannot write the archive")
		}
	}))
	defer repository.Close()
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	folder := t.TempDir()
	bin, err := download(t.Context(), repository.URL, folder, account{})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(bin, folder) || !thisMachine(account{}).complete(bin) {
		t.Errorf("%s is not complete", bin)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 || os.TempDir() != temp {
		t.Errorf("in %s: %v, %v", os.TempDir(), left, err)
	}
}

func TestDownloadFails(t *testing.T) {
	t.Setenv("HOME", "")
	t.Setenv("XDG_CACHE_HOME", "")
	repository := httptest.NewServer(http.NotFoundHandler())
	defer repository.Close()
	if bin, err := download(t.Context(), repository.URL, t.TempDir(), account{}); err == nil {
		t.Errorf("got %q from nowhere", bin)
	}
}
