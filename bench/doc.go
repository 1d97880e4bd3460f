// Package bench measures dblock beside its peers: raw statements of a driver, a
// pool with a connection for each lock, goose's session locker, golang-migrate,
// Redis and etcd. RESULTS.md has the figures of the last complete run.
//
//	make bench                                       # everything, into RESULTS.md: about half an hour
//	make bench DATABASE=postgres SCENARIO=pair       # one scenario, printed only
//	make bench SCENARIO=throughput/redis REPETITIONS=9
//
// # How it measures
//
// A figure is a ratio between dblock and a peer that were measured in turns, in
// short chunks of time within one run: what slows the machine down slows down
// both. Both have connections of their own, and where the kernel runs the two ends
// of a connection changes a round trip by more than the difference that is
// measured; so each repetition opens new connections, and the figure is the median
// of all repetitions, beside their smallest and their largest. The rows called
// noise compare the raw statements with themselves: nearer to each other no two
// figures can be told apart.
//
// A file is a scenario. Each names its target, and what it compares with.
//
// Without repetitions asked for, as in go test, every scenario runs for a moment
// only: that shows that it runs, and no figure is meant. What must not fail is
// checked in both: no call returns an error, a key that is held is refused to
// others, and no two holders of one key overlap.
//
// # What bounds the figures
//
// Not every target is reached, and rows called "what bounds it" measure why. Against
// golang-migrate on MySQL and MariaDB the two raw statements themselves take two thirds
// of its time: it prepares each of its two, but on a loopback interface a round trip is no
// half of that. A lock that travels with BEGIN saves its round trip, not the work of the
// server, and costs what it costs in a pgx.Batch written by hand. For 100 keys in one call
// two bare statements, which look at nothing, reach 47 times the single ones on PostgreSQL
// and 25 times on MySQL and MariaDB. With a key that everybody wants and nobody holds, the
// processes and the server's share two processors; what is left of a hand-off is one
// statement for each cohort and two wake-ups. A claim on MySQL and MariaDB reads its
// candidates on a second connection, and then locks each by a look-up of its key: the two
// bare statements take two and a half times as long as the one that locks whatever it reads.
//
// It runs on Linux, on private servers that tests/servers starts, or on those that
// DBLOCK_TEST_POSTGRES_DSN, DBLOCK_TEST_MYSQL_DSN and DBLOCK_TEST_MARIADB_DSN name.
package bench
