package mysql

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dblock-go/dblock/dialect"
)

// ClaimUserRows reads candidates without locking, on a second connection and so in a
// snapshot of the moment, and then locks them by their key, where the condition is
// asked again. A single statement that sorts would lock every row that it sorts, and
// under REPEATABLE READ every row that it reads.
// https://dev.mysql.com/doc/refman/en/innodb-locks-set.html
//
// What was locked by others is tried once. As long as all candidates were tried,
// twice as many are read.
func (db *DB) ClaimUserRows(ctx context.Context, tx dialect.Tx, c dialect.UserClaim) ([][]any, error) {
	q, err := db.querier(ctx, tx)
	if err != nil {
		return nil, err
	}
	t, err := db.userTable(ctx, c.Table)
	if err != nil {
		return nil, err
	}
	var claimed [][]any
	tried := map[string]bool{}
	for window := c.Limit; ; window *= 2 {
		candidates, err := db.candidates(ctx, t, c, window)
		if err != nil {
			return nil, stillLocked(len(claimed), db.failure(ctx, err))
		}
		untried := candidates
		if len(tried) > 0 {
			untried = slices.DeleteFunc(slices.Clone(candidates), func(key []string) bool { return tried[joined(key)] })
		}
		for len(untried) > 0 && len(claimed) < c.Limit {
			n := min(len(untried), c.Limit-len(claimed), claimedAtOnce)
			keys, err := db.claim(ctx, q, t, c, untried[:n])
			if err != nil {
				return nil, stillLocked(len(claimed), db.failure(ctx, err))
			}
			claimed = append(claimed, keys...)
			untried = untried[n:]
		}
		if len(claimed) == c.Limit || len(candidates) < window {
			return claimed, nil
		}
		for _, key := range candidates {
			tried[joined(key)] = true
		}
	}
}

// claimedAtOnce bounds the length of a statement.
const claimedAtOnce = 1000

// joined identifies a key.
func joined(key []string) string { return strings.Join(key, "\x00\x01") }

func (db *DB) candidates(ctx context.Context, t *userTable, c dialect.UserClaim, limit int) ([][]string, error) {
	conn, done, err := db.side.take(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	where := ""
	if c.Where != "" {
		where = " WHERE (" + c.Where + "\n)" // which may end with a comment
	}
	candidates, err := queryTexts(ctx, conn, "SELECT "+t.texts()+" FROM "+t.name+where+" ORDER BY "+t.order(c)+fmt.Sprintf(" LIMIT %d", limit), c.Args...)
	for _, mistake := range []uint16{errUnknownColumn, errParse, errDoesNotExist} {
		if isNumber(err, mistake) {
			return nil, c.Mistaken(db.failure(ctx, err), strconv.Itoa(int(mistake)), "?", dialect.RemainsUsable)
		}
	}
	return candidates, err
}

// claim locks those of the candidates that are free and that the condition is true
// of, each by a look-up of its key: given a list of keys instead, the optimizer may
// scan a small table, and under REPEATABLE READ lock all of it. For both servers a
// join of the list in this order, through this index, leaves no other way.
// https://dev.mysql.com/doc/refman/en/index-hints.html
func (db *DB) claim(ctx context.Context, q dialect.Querier, t *userTable, c dialect.UserClaim, candidates [][]string) ([][]any, error) {
	rows := make([]userRow, len(candidates))
	for i, key := range candidates {
		rows[i].literals = make([]string, len(key))
		for n, text := range key {
			literal, why := t.columns[n].literal(text)
			if why != "" {
				return nil, fmt.Errorf("read a key of %s: the column %s %s, but not %q", c.Table, c.Table.Key[n], why, text)
			}
			rows[i].literals[n] = literal
		}
	}
	same := make([]string, len(t.columns))
	for n, column := range t.columns {
		same[n] = fmt.Sprintf("%s = dblock_key_%d", quote(column.name), n)
	}
	where := ""
	if c.Where != "" {
		where = " WHERE (" + c.Where + "\n)"
	}
	locked, err := queryTexts(ctx, q, fmt.Sprintf("SELECT STRAIGHT_JOIN %s FROM %s JOIN %s FORCE INDEX (%s) ON %s%s %s SKIP LOCKED",
		t.texts(), db.listed(rows), t.name, quote(t.index), strings.Join(same, " AND "), where, db.lockingClause(c.Strength)), c.Args...)
	if err != nil {
		return nil, err
	}
	isLocked := make(map[string]bool, len(locked))
	for _, key := range locked {
		isLocked[joined(key)] = true
	}
	var claimed [][]any
	for _, key := range candidates {
		if isLocked[joined(key)] {
			claimed = append(claimed, t.values(key))
		}
	}
	return claimed, nil
}
