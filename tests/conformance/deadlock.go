package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/deadlock"
	"github.com/dblock-go/dblock/rowlock"
)

var deadlockClauses = []clause{
	{"deadlock: the whole transaction starts again", deadlockStartsAgain},
	{"deadlock: no money is moved twice", deadlockKeepsMoney},
	{"deadlock: the Checker sees every way to lock", checkerSees},
	{"deadlock: the Checker sees every way to lock inside of every other", checkerSeesAllPairs},
	{"deadlock: the Checker sees releases", checkerSeesReleases},
	{"deadlock: the Checker sees the locks of a transaction", checkerSeesTransactions},
	{"deadlock: a retry inside of a transaction passes the failure on", retryInside},
	{"deadlock: a timeout starts the whole transaction again if asked for", retryTimeouts},
	{"deadlock: who gives way can be chosen", deadlockSettings},
	{"deadlock: philosophers who take both forks in one call never deadlock", philosophersAtOnce},
	{"deadlock: philosophers who take one fork after the other in a transaction all eat", philosophersInTransactions},
	{"deadlock: philosophers who take one fork after the other on sessions all eat", philosophersOnSessions},
}

// bank has accounts of 100 each, under applications that do not lock them in order.
func bank(t *testing.T, h *Harness, accounts int) *Database {
	d := h.Database(t)
	d.Setup(t)
	d.exec(t, `CREATE TABLE accounts (id INT PRIMARY KEY, balance INT NOT NULL)`)
	for id := range accounts {
		d.exec(t, fmt.Sprintf(`INSERT INTO accounts VALUES (%d, 100)`, id))
	}
	return d
}

func move(ctx context.Context, tx dblock.Tx, account, amount int) error {
	return execute(ctx, tx, fmt.Sprintf(`UPDATE accounts SET balance = balance + %d WHERE id = %d`, amount, account))
}

func (d *Database) balance(t *testing.T, account int) int {
	t.Helper()
	return d.number(t, fmt.Sprintf(`SELECT balance FROM accounts WHERE id = %d`, account))
}

// countRetries counts those that an application makes for the given class.
func countRetries(t *testing.T, n *atomic.Int64) dblock.Observer {
	return dblock.ObserverFunc(func(_ context.Context, e dblock.Event) {
		if e.Kind == dblock.EventRetried {
			n.Add(1)
		}
	})
}

// Two transactions update the same two accounts crosswise. The one that the
// server fails has its first update undone, so only the whole can start again.
func deadlockStartsAgain(t *testing.T, h *Harness) {
	d := bank(t, h, 2)
	ctx := testContext(t)
	var retries atomic.Int64
	rows := rowlock.New(d.DB, &rowlock.Options{Observer: countRetries(t, &retries)})

	var crossed, all sync.WaitGroup
	crossed.Add(2)
	transfer := func(name string, from, to, amount int) {
		first := true
		err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
			if err := move(ctx, tx, from, -amount); err != nil {
				return err
			}
			if first {
				first = false
				crossed.Done()
				crossed.Wait()
			}
			return move(ctx, tx, to, amount)
		}, dblock.NewKey("transfer", name))
		if err != nil {
			t.Errorf("transfer %s: %v", name, err)
		}
	}
	all.Go(func() { transfer("there", 0, 1, 10) })
	all.Go(func() { transfer("back", 1, 0, 3) })
	all.Wait()
	if retries.Load() == 0 {
		t.Error("no deadlock was provoked: this clause shows nothing")
	}
	if a, b := d.balance(t, 0), d.balance(t, 1); a != 93 || b != 107 {
		t.Errorf("balances %d and %d, want 93 and 107", a, b)
	}
}

// findDeadlocksSoon is for deadlocks of connections to come to take milliseconds, where
// that would be a second.
func (d *Database) findDeadlocksSoon(t *testing.T) {
	t.Helper()
	if d.DB.Name() != "postgres" {
		return
	}
	var name string
	if err := d.SQL.QueryRow(`SELECT current_database()`).Scan(&name); err != nil {
		t.Fatal(err)
	}
	d.exec(t, `ALTER DATABASE `+name+` SET deadlock_timeout = '5ms'`)
}

func deadlockKeepsMoney(t *testing.T, h *Harness) {
	const accounts, goroutines, transfers = 4, 8, 20
	d := bank(t, h, accounts)
	d.findDeadlocksSoon(t)
	db := d.OpenMax(t, crowd)
	ctx := testContext(t)
	var retries atomic.Int64
	rows := rowlock.New(db, &rowlock.Options{
		Retry:    &deadlock.RetryOptions{Attempts: 100},
		Observer: countRetries(t, &retries),
	})

	var expected [accounts]atomic.Int64
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for range transfers {
				from, amount := rand.IntN(accounts), 1+rand.IntN(5)
				to := (from + 1 + rand.IntN(accounts-1)) % accounts
				err := rowlock.InTx(ctx, rows, func(ctx context.Context, tx dblock.Tx) error {
					if err := move(ctx, tx, from, -amount); err != nil {
						return err
					}
					return move(ctx, tx, to, amount)
				}, dblock.NewKey("transfer", strconv.Itoa(g)))
				if err != nil {
					t.Error(err)
					return
				}
				expected[from].Add(int64(-amount))
				expected[to].Add(int64(amount))
			}
		})
	}
	all.Wait()
	sum := 0
	for id := range accounts {
		balance := d.balance(t, id)
		sum += balance
		if want := 100 + int(expected[id].Load()); balance != want {
			t.Errorf("account %d has %d, want %d", id, balance, want)
		}
	}
	if sum != 100*accounts {
		t.Errorf("%d in all, want %d", sum, 100*accounts)
	}
	t.Logf("%d transfers, %d retries", goroutines*transfers, retries.Load())
}
