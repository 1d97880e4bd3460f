package main

import (
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
)

type hashCmd struct {
	format
	Database string   `placeholder:"NAME" help:"The database whose keys on MySQL and MariaDB are meant: names there carry it, since the whole server shares them. Default: the one that a mysql:// or mariadb:// DSN names, without asking the server."`
	Keys     []keyArg `arg:"" name:"key" help:"Keys, as exec takes them."`
}

// Help is shown by dblock hash --help.
func (hashCmd) Help() string { return keyHelp }

// hashed is a key as each database locks it.
type hashed struct {
	Key       string `json:"key"`
	ID        int64  `json:"id"`
	Hex       string `json:"hex"`
	ClassID   uint32 `json:"classid"` // pg_locks, where objsubid is 1
	ObjID     uint32 `json:"objid"`
	MySQL     string `json:"mysql,omitempty"` // absent where it takes the database's name
	SQLServer string `json:"sqlserver"`
}

func (c *hashCmd) Run(a *app) error {
	database := c.Database
	if database == "" {
		database = mysqlDatabase(a.databaseURL())
	}
	var all []hashed
	for _, k := range c.Keys {
		id := k.ID()
		h := hashed{
			Key:       k.String(),
			ID:        id,
			Hex:       fmt.Sprintf("%016x", uint64(id)),
			ClassID:   uint32(uint64(id) >> 32),
			ObjID:     uint32(id),
			SQLServer: k.Name(""),
		}
		if database != "" || k.raw {
			h.MySQL = k.Name(database)
		}
		all = append(all, h)
	}
	if c.JSON {
		return writeJSON(a.stdout, all)
	}
	for i, h := range all {
		if i > 0 {
			fmt.Fprintln(a.stdout)
		}
		if err := h.write(a.stdout); err != nil {
			return err
		}
	}
	return nil
}

// mysqlDatabase is the database that a DSN names if it is one of MySQL or
// MariaDB, else empty.
func mysqlDatabase(dsn string) string {
	u, err := url.Parse(dsn)
	if err != nil || (u.Scheme != "mysql" && u.Scheme != "mariadb") {
		return ""
	}
	return strings.TrimPrefix(u.Path, "/")
}

func (h hashed) write(w io.Writer) error {
	mysql := h.MySQL
	if mysql == "" {
		mysql = "give --database NAME"
	}
	return writeTable(w,
		[]string{"key", h.Key},
		[]string{"id", strconv.FormatInt(h.ID, 10), "0x" + h.Hex},
		[]string{"PostgreSQL", fmt.Sprintf("pg_advisory_lock(%d)", h.ID),
			fmt.Sprintf("in pg_locks classid %d, objid %d, objsubid 1", h.ClassID, h.ObjID)},
		[]string{"MySQL, MariaDB", mysql},
		[]string{"SQL Server", h.SQLServer},
	)
}
