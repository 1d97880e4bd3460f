package mysql

import (
	"regexp"
	"slices"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

const (
	userLevelLock = "USER LEVEL LOCK"
	modeExclusive = "EXCLUSIVE"
)

// metadataLock is one of an advisory key, a table, or something that statements
// must not change under each other.
type metadataLock struct {
	object  string // its kind, as MySQL calls it
	target  dialect.Target
	mode    string
	pending bool
	thread  int64 // of performance_schema
	session int64
}

func metadataTarget(object, schema, name string) dialect.Target {
	switch object {
	case userLevelLock:
		return dialect.Target{Kind: dialect.KindAdvisory, Key: name}
	case "TABLE":
		return dialect.Target{Kind: dialect.KindTable, Table: schema + "." + name}
	}
	return dialect.Target{Kind: dialect.KindOther, Key: strings.TrimSpace(strings.ToLower(object) + " " + schema)}
}

// The modes that are in the way of each mode if they are granted, and if they are
// pending and so go first, from the tables in
// https://github.com/mysql/mysql-server/blob/8.0/sql/mdl.cc, of which MariaDB has
// the same.
var (
	inTheWay = map[string]string{
		"INTENTION_EXCLUSIVE":   "SHARED EXCLUSIVE",
		"SHARED":                "EXCLUSIVE INTENTION_EXCLUSIVE", // the latter of what is no table
		"SHARED_HIGH_PRIO":      "EXCLUSIVE",
		"SHARED_READ":           "SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_WRITE":          "SHARED_READ_ONLY SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_WRITE_LOW_PRIO": "SHARED_READ_ONLY SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_UPGRADABLE":     "SHARED_UPGRADABLE SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_READ_ONLY":      "SHARED_WRITE SHARED_WRITE_LOW_PRIO SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_NO_WRITE":       "SHARED_WRITE SHARED_WRITE_LOW_PRIO SHARED_UPGRADABLE SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_NO_READ_WRITE":  "SHARED_READ SHARED_WRITE SHARED_WRITE_LOW_PRIO SHARED_UPGRADABLE SHARED_READ_ONLY SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		modeExclusive:           "SHARED SHARED_HIGH_PRIO SHARED_READ SHARED_WRITE SHARED_WRITE_LOW_PRIO SHARED_UPGRADABLE SHARED_READ_ONLY SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE INTENTION_EXCLUSIVE",
	}
	goFirst = map[string]string{
		"INTENTION_EXCLUSIVE":   "SHARED EXCLUSIVE",
		"SHARED":                "EXCLUSIVE",
		"SHARED_READ":           "SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_WRITE":          "SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_WRITE_LOW_PRIO": "SHARED_READ_ONLY SHARED_NO_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_UPGRADABLE":     "EXCLUSIVE",
		"SHARED_READ_ONLY":      "SHARED_WRITE SHARED_NO_READ_WRITE EXCLUSIVE",
		"SHARED_NO_WRITE":       "EXCLUSIVE",
		"SHARED_NO_READ_WRITE":  "EXCLUSIVE",
	}
)

// blocks reports whether m is in the way of the pending lock.
func (m metadataLock) blocks(waiting metadataLock) bool {
	modes := inTheWay[waiting.mode]
	if m.pending {
		modes = goFirst[waiting.mode]
	}
	return m.session != waiting.session && m.target == waiting.target && slices.Contains(strings.Fields(modes), m.mode)
}

// waitForMetadata adds the advisory locks, the tables that somebody waits for, and
// who waits for whom.
func (l *survey) waitForMetadata() {
	ofTarget := map[dialect.Target][]metadataLock{}
	for _, m := range l.metadata {
		if !strings.HasPrefix(m.target.Key, probePrefix) {
			ofTarget[m.target] = append(ofTarget[m.target], m)
		}
	}
	for target, locks := range ofTarget {
		l.waitFor(target, locks)
		for _, m := range locks {
			blocks := slices.ContainsFunc(locks, func(other metadataLock) bool { return other.pending && m.blocks(other) })
			if target.Kind == dialect.KindAdvisory || m.pending || blocks {
				l.s.Locks = append(l.s.Locks, l.lockOf(m))
			}
		}
	}
}

// waitFor adds who waits for whom because of one target. The servers see at once if two
// sessions wait for each other so, and end it: where it looks like that, the lock has
// changed hands while the views were read, and only a wait for who holds it is believed.
func (l *survey) waitFor(target dialect.Target, locks []metadataLock) {
	type wait struct{ waiter, blocker int64 }
	holds := map[wait]bool{} // or else the blocker came first
	for _, m := range locks {
		for _, other := range locks {
			if m.pending && other.blocks(m) {
				w := wait{m.session, other.session}
				holds[w] = holds[w] || !other.pending
			}
		}
	}
	for w, blockerHolds := range holds {
		waiterHolds, mutual := holds[wait{w.blocker, w.waiter}]
		if !mutual || blockerHolds && !waiterHolds {
			l.s.Waits = append(l.s.Waits, dialect.SnapshotWait{Waiter: w.waiter, Blocker: w.blocker, Target: target})
		}
	}
}

func (l *survey) lockOf(m metadataLock) dialect.SnapshotLock {
	lock := dialect.SnapshotLock{Target: m.target, Session: m.session, Mode: m.mode, Waiting: m.pending}
	if m.object == userLevelLock {
		lock.Mode = dialect.Exclusive.String()
	}
	switch {
	case m.pending:
		lock.Since = l.inState[m.session]
	case m.object == userLevelLock:
		lock.Since = l.since[m.session]
	default:
		lock.Since = l.sessions[m.session].Began
	}
	return lock
}

// waitForTables tells from the statements of those who wait for a table on MariaDB
// which one it is: one that is named there and that others have in use. Who holds it
// in a mode to be upgraded, as ALTER TABLE does, waits for its exclusive use.
func (l *survey) waitForTables() {
	granted := slices.Clone(l.metadata)
	var behind []metadataLock
	for _, x := range l.sessions {
		if x.State != "Waiting for table metadata lock" {
			continue
		}
		words := identifiers(x.Statement)
		var table dialect.Target
		upgrades := false
		for _, m := range granted {
			_, name, _ := strings.Cut(m.target.Table, ".")
			if m.target.Kind != dialect.KindTable || !words[strings.ToLower(name)] {
				continue
			}
			if m.session == x.ID && upgradable[m.mode] {
				table, upgrades = m.target, true
				break
			}
			if m.session != x.ID {
				table = m.target
			}
		}
		if table.Table == "" {
			continue
		}
		waiting := metadataLock{object: "TABLE", target: table, mode: modeExclusive, pending: true, session: x.ID}
		if upgrades || isDDL.MatchString(x.Statement) {
			l.metadata = append(l.metadata, waiting)
			continue
		}
		waiting.mode = "SHARED_WRITE"
		if isRead.MatchString(x.Statement) {
			waiting.mode = "SHARED_READ"
		}
		behind = append(behind, waiting)
	}
	l.metadata = append(l.metadata, behind...)
}

var (
	upgradable = map[string]bool{"SHARED_UPGRADABLE": true, "SHARED_NO_WRITE": true, "SHARED_NO_READ_WRITE": true}
	isDDL      = regexp.MustCompile(`(?i)^\s*(ALTER|DROP|TRUNCATE|RENAME|CREATE|LOCK|OPTIMIZE|REPAIR|FLUSH)\b`)
	isRead     = regexp.MustCompile(`(?i)^\s*(\(|SELECT|WITH|TABLE|VALUES|SHOW|DESC)`)
	word       = regexp.MustCompile("`[^`]+`|[\\pL\\pN_$]+")
)

func identifiers(statement string) map[string]bool {
	words := map[string]bool{}
	for _, w := range word.FindAllString(statement, -1) {
		words[strings.ToLower(strings.Trim(w, "`"))] = true
	}
	return words
}
