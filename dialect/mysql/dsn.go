package mysql

import (
	"cmp"
	"net"
	"net/url"
	"strings"

	driver "github.com/go-sql-driver/mysql"

	"github.com/dblock-go/dblock/dialect"
)

// parseDSN reads a URL or the driver's own format. Its errors never quote what
// could be a part of the password.
func parseDSN(dsn string) (*driver.Config, error) {
	var config *driver.Config
	var err error
	switch scheme, _, _ := strings.Cut(dsn, "://"); strings.ToLower(scheme) {
	case "mysql", "mariadb":
		config, err = parseURL(dsn)
	default:
		config, err = parseDriverDSN(dsn)
	}
	if err != nil {
		return nil, err
	}
	if config.DBName == "" {
		return nil, badDSN("it names no database, which the names of locks need: …/database")
	}
	config.InterpolateParams = true // one round trip instead of three
	config.ParseTime = true         // as goose needs it
	config.Logger = &driver.NopLogger{}
	config.ConnectionAttributes = strings.TrimPrefix(config.ConnectionAttributes+",program_name:"+defaultApplication, ",")
	return config, nil
}

func parseURL(dsn string) (*driver.Config, error) {
	u, err := url.Parse(dsn)
	if err != nil || u.Fragment != "" || strings.ContainsAny(strings.TrimPrefix(u.EscapedPath(), "/"), "/@") {
		return nil, badDSN("it is not a URL: percent-encode what is special in the user's name and the password, such as / as %2F and # as %23")
	}
	var params []string
	for param := range strings.SplitSeq(u.RawQuery, "&") {
		if !strings.HasPrefix(param, "socket=") {
			params = append(params, param)
		}
	}
	// A slash is fine in a URL's query, but not in the driver's format.
	config, err := parseParams(strings.ReplaceAll(strings.Join(params, "&"), "/", "%2F"))
	if err != nil {
		return nil, err
	}
	config.DBName = strings.TrimPrefix(u.Path, "/")
	config.User = u.User.Username()
	config.Passwd, _ = u.User.Password()
	switch host, port, socket := u.Hostname(), u.Port(), u.Query().Get("socket"); {
	case socket != "":
		config.Net, config.Addr = "unix", socket
	default:
		config.Addr = net.JoinHostPort(cmp.Or(host, "127.0.0.1"), cmp.Or(port, "3306"))
	}
	return config, nil
}

func parseDriverDSN(dsn string) (*driver.Config, error) {
	_, params, _ := strings.Cut(dsn[strings.LastIndexByte(dsn, '/')+1:], "?")
	if _, err := parseParams(params); err != nil {
		return nil, err
	}
	config, err := driver.ParseDSN(dsn)
	if err != nil {
		return nil, badDSN("write it as mysql://user:password@host:3306/database or user:password@tcp(host:3306)/database")
	}
	return config, nil
}

// parseParams lets the driver read the parameters alone, so that its errors can
// be shown.
func parseParams(params string) (*driver.Config, error) {
	for param := range strings.SplitSeq(params, "&") {
		if strings.HasPrefix(param, "strict=") { // the driver panics
			return nil, badDSN("the driver has no parameter strict any more; set sql_mode instead")
		}
	}
	config, err := driver.ParseDSN("/?" + params)
	if err != nil {
		return nil, &dialect.Error{Class: dialect.InvalidOption, Err: err, Hint: "see the parameters at https://github.com/go-sql-driver/mysql#parameters"}
	}
	config.Addr, config.TLS = "", nil // derived from an address that is not the DSN's; the driver derives them again
	return config, nil
}

func badDSN(hint string) error {
	return &dialect.Error{Class: dialect.InvalidOption, Hint: "cannot use the DSN: " + hint}
}
