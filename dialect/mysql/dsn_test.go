package mysql

import (
	"context"
	"errors"
	"strings"
	"testing"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
)

func TestParseDSN(t *testing.T) {
	for dsn, want := range map[string]driver.Config{
		"mysql://app:secret@db.example:3307/shop":                       {User: "app", Passwd: "secret", Addr: "db.example:3307", DBName: "shop"},
		"mariadb://app:secret@db.example/shop":                          {User: "app", Passwd: "secret", Addr: "db.example:3306", DBName: "shop"},
		"MySQL://app@db.example/shop":                                   {User: "app", Addr: "db.example:3306", DBName: "shop"},
		"mysql://a%40b:p%2Fw%3A%23%3F@[::1]:3307/my%2Fshop":             {User: "a@b", Passwd: "p/w:#?", Addr: "[::1]:3307", DBName: "my/shop"},
		"mysql://app:p@ss@[fe80::1]/shop":                               {User: "app", Passwd: "p@ss", Addr: "[fe80::1]:3306", DBName: "shop"},
		"mysql://app:secret@/shop":                                      {User: "app", Passwd: "secret", Addr: "127.0.0.1:3306", DBName: "shop"},
		"mysql://app@/shop?socket=/run/mysqld/mysqld.sock":              {User: "app", Net: "unix", Addr: "/run/mysqld/mysqld.sock", DBName: "shop"},
		"mysql://app@h/shop?socket=%2Frun%2Fm.sock&sql_mode=%27ANSI%27": {User: "app", Net: "unix", Addr: "/run/m.sock", DBName: "shop", Params: map[string]string{"sql_mode": "'ANSI'"}},
		"mysql://app@h/shop?loc=Europe/Berlin&charset=utf8mb4,utf8":     {User: "app", Addr: "h:3306", DBName: "shop"},
		"app:p@ss/w:rd@tcp(db.example:3307)/shop?timeout=1s":            {User: "app", Passwd: "p@ss/w:rd", Addr: "db.example:3307", DBName: "shop"},
		"app@unix(/run/m.sock)/shop":                                    {User: "app", Net: "unix", Addr: "/run/m.sock", DBName: "shop"},
		"/shop":                                                         {Addr: "127.0.0.1:3306", DBName: "shop"},
	} {
		config, err := parseDSN(dsn)
		if err != nil {
			t.Errorf("%s: %v", dsn, err)
			continue
		}
		connector, err := driver.NewConnector(config) // completes a copy only
		if err != nil || connector == nil {
			t.Errorf("%s: the driver says %v", dsn, err)
		}
		if want.Net == "" {
			want.Net = "tcp"
		}
		if config.Addr == "" {
			config.Addr = "127.0.0.1:3306"
		}
		if config.User != want.User || config.Passwd != want.Passwd || config.Net != want.Net || config.Addr != want.Addr ||
			config.DBName != want.DBName || config.Params["sql_mode"] != want.Params["sql_mode"] || config.Params["socket"] != "" {
			t.Errorf("%s: got %s", dsn, config.FormatDSN())
		}
		if !config.InterpolateParams || !config.ParseTime || config.ConnectionAttributes != "program_name:dblock" {
			t.Errorf("%s: without dblock's own settings: %s", dsn, config.FormatDSN())
		}
	}
}

func TestParseDSNDerivesTLSFromItsOwnHost(t *testing.T) {
	config, err := parseDSN("mysql://app@db.example/shop?tls=true")
	if err != nil {
		t.Fatal(err)
	}
	// The driver takes the name that the certificate must have from the address.
	if config.TLS != nil || config.TLSConfig != "true" {
		t.Errorf("TLS is %+v, %q", config.TLS, config.TLSConfig)
	}
}

func TestParseDSNRefuses(t *testing.T) {
	for dsn, names := range map[string]string{
		"":                                            "names no database",
		"mysql://app:hunter2@h/":                      "names no database",
		"mysql://app:hunter2@h":                       "names no database",
		"app:hunter2@tcp(h:3306)/":                    "names no database",
		"mysql://app:hunt/er2@h/shop":                 "percent-encode",
		"mysql://app:12/hunter2@h/shop":               "percent-encode",
		"mysql://app:hunt#er2@h/shop":                 "percent-encode",
		"mysql://app:hunter2%zz@h/shop":               "percent-encode",
		"mysql://app:hunter2@h:port/shop":             "percent-encode",
		"app:hunter2":                                 "write it as",
		"app:hunter2/shop":                            "write it as",
		"postgres://app:hunter2@h/shop":               "write it as",
		"mysql://app:hunter2@h/shop?parseTime=maybe":  "maybe",
		"app:hunter2@tcp(h)/shop?loc=Nowhere":         "Nowhere",
		"mysql://app:hunter2@h/shop?strict=true":      "strict",
		"app:hunter2@tcp(h)/shop?strict=true":         "strict",
		"mysql://app:hunter2@h/shop?tls=unregistered": "unregistered",
	} {
		_, err := parseDSN(dsn)
		if !errors.Is(err, dialect.InvalidOption) || !strings.Contains(err.Error(), names) || strings.Contains(err.Error(), "er2") {
			t.Errorf("%s: %v", dsn, err)
		}
	}
}

func FuzzParseDSN(f *testing.F) {
	const password = "hunter2hunter2"
	f.Add("mysql://app:", "@db.example:3306/shop?tls=true")
	f.Add("app:", "@tcp(db.example:3306)/shop?strict=true")
	f.Add("mysql://app:", "/@h/shop")
	f.Add("", "")
	f.Fuzz(func(t *testing.T, before, after string) {
		config, err := parseDSN(before + password + after)
		if err == nil {
			if config.DBName == "" {
				t.Error("no database, and no error")
			}
			return
		}
		// Parameters are quoted, so that the wrong one can be found.
		if !strings.ContainsAny(before, "?") && strings.Contains(err.Error(), password) {
			t.Errorf("the password is in the text: %v", err)
		}
	})
}

func TestNewRefusesItsArguments(t *testing.T) {
	for name, open := range map[string]func() (*DB, error){
		"a nil pool":         func() (*DB, error) { return New(t.Context(), nil) },
		"two Options":        func() (*DB, error) { return Open(t.Context(), "mysql://app@127.0.0.1:1/shop", nil, nil) },
		"a DSN of what else": func() (*DB, error) { return Open(t.Context(), "sqlserver://sa@h") },
	} {
		if db, err := open(); db != nil || !errors.Is(err, dialect.InvalidOption) {
			t.Errorf("%s: %v, %v", name, db, err)
		}
	}
	_, err := Open(context.Background(), "mysql://app:hunter2@127.0.0.1:1/shop")
	if !errors.Is(err, dialect.Unavailable) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("nobody listens: %v", err)
	}
}
