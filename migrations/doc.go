// Package migrations runs goose migrations (https://pressly.github.io/goose) so
// that of any number of replicas which start at once one migrates, and the
// others wait for it and then find nothing left to do.
//
// The guard is a session lock of the database (pg_advisory_lock, GET_LOCK,
// sp_getapplock) on the very connection on which goose works. It survives the
// implicit commits of DDL on MySQL and MariaDB, and it ends with the
// connection: a migrator that crashes locks nobody out, and a migrator whose
// session dies can neither go on unguarded nor record what it did not do,
// because losing the guard and losing the work are one event. The exception are
// Go migrations of goose's kind RunDB, which work on other connections; prefer
// RunTx. A server that executes a statement of a migrator which has crashed may
// go on until the statement is done, and the guard with it; on PostgreSQL
// client_connection_check_interval shortens that
// (https://www.postgresql.org/docs/current/runtime-config-connection.html).
//
// Replicas that wait ask again every 50 ms at first and every second at last,
// outside any transaction. They never wait inside the server, where on
// PostgreSQL their snapshot would block the holder's CREATE INDEX CONCURRENTLY
// for ever
// (https://www.postgresql.org/docs/current/sql-createindex.html#SQL-CREATEINDEX-CONCURRENTLY).
//
// [Up], [UpTo] and [Down] read what has been applied after they got the guard.
// The version table is created under the guard, too. [Status] and [Version] only
// read: they neither wait for the guard nor create anything.
//
// [SessionLocker] is the guard alone, for programs that use goose.NewProvider
// themselves. [Setup] creates dblock's own tables, guarded in the same way.
package migrations
