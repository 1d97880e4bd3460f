package lost

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/dblock-go/dblock"
	"github.com/dblock-go/dblock/advisory"
	"github.com/dblock-go/dblock/dialect"
	"github.com/dblock-go/dblock/tests/proxy"
)

const rounds = 50

// heardBy takes the keys, ends their sessions one by one, at moments that are
// spread over a heartbeat, and measures until each holder hears of it.
func heardBy(t *testing.T, d *database, db dblock.DB, end func(key dblock.Key)) *figures {
	t.Helper()
	all := keys(rounds)
	// Each lock on a session of its own, to be ended alone.
	l, successors := newLocker(t, db, &advisory.Options{SessionPerLock: true}), newLocker(t, d.others)
	locks := make([]*advisory.Lock, len(all))
	for i, key := range all {
		locks[i] = mustLock(t, l, key)
	}
	var heard figures
	var waits sync.WaitGroup
	ends := make([]time.Time, len(all))
	for i, key := range all {
		ends[i] = time.Now()
		end(key)
		waits.Go(func() {
			select {
			case <-locks[i].Done():
				heard.add(time.Since(ends[i]))
			case <-time.After(time.Minute):
				t.Errorf("%v: not heard", key)
			}
		})
		time.Sleep(time.Duration(i%10) * time.Millisecond)
	}
	waits.Wait()
	for i, lock := range locks {
		successor := mustLock(t, successors, all[i])
		neverHeldAgain(t, lock)
		must(t, successor.Check(testContext(t)))
		must(t, successor.Release(testContext(t)))
	}
	d.nothingLeft(t)
	return &heard
}

func neverHeldAgain(t testing.TB, lock *advisory.Lock) {
	t.Helper()
	for what, err := range map[string]error{
		"Err": lock.Err(), "cause": context.Cause(lock.Context()),
		"Check": lock.Check(testContext(t)), "Release": lock.Release(testContext(t)),
	} {
		if !errors.Is(err, dblock.ErrLost) {
			t.Errorf("%s after the loss: %v", what, err)
		}
	}
}

func TestASessionThatTheServerKillsIsHeardOf(t *testing.T) {
	each(t, func(t *testing.T, w way, d *database) {
		heard := heardBy(t, d, d.db, func(key dblock.Key) { d.kill(t, d.left(t, key)[0].Session) })
		heard.within(t, "killed by the server, heard", time.Second)
	})
}

func TestAClosedSocketIsHeardOf(t *testing.T) {
	each(t, func(t *testing.T, w way, d *database) {
		p := newWire(t, d.dsn)
		db := d.open(t, w, p.dsn)
		session := func(key dblock.Key) string {
			query := "SELECT host FROM information_schema.processlist WHERE id = %d"
			if w.kind == "postgres" {
				query = "SELECT host(client_addr) || ':' || client_port FROM pg_stat_activity WHERE pid = %d"
			}
			var address string
			must(t, d.others.SQL().QueryRowContext(t.Context(), fmt.Sprintf(query, d.left(t, key)[0].Session)).Scan(&address))
			return address
		}
		heard := heardBy(t, d, db, func(key dblock.Key) {
			if !p.cut(session(key)) {
				t.Fatalf("%v: no such connection", key)
			}
		})
		heard.within(t, "socket closed, heard", time.Second)
	})
}

// The proxy takes new connections, so whatever reconnected would succeed.
func TestNoCallOnTheHandleReconnects(t *testing.T) {
	each(t, func(t *testing.T, w way, d *database) {
		p := newWire(t, d.dsn)
		db := d.open(t, w, p.dsn)
		l, successors := newLocker(t, db), newLocker(t, d.others)
		key := dblock.NewKey("projector")
		for name, call := range map[string]func(*advisory.Lock) error{
			"Check":   func(lock *advisory.Lock) error { return lock.Check(testContext(t)) },
			"Release": func(lock *advisory.Lock) error { return lock.Release(testContext(t)) },
		} {
			lock := mustLock(t, l, key)
			p.cut("")
			if err := call(lock); !errors.Is(err, dblock.ErrLost) {
				t.Errorf("%s at once: %v", name, err)
			}
			successor := mustLock(t, successors, key)
			if err := lock.Check(testContext(t)); err == nil {
				t.Errorf("held after %s", name)
			}
			if err := lock.Release(testContext(t)); !errors.Is(err, dblock.ErrLost) {
				t.Errorf("Release after %s: %v", name, err)
			}
			must(t, successor.Release(testContext(t)))
		}

		// The same for a session alone, and for statements beside its calls.
		db = d.open(t, w, p.dsn) // with a pool that knows of no broken connections
		conn, err := db.SQL().Conn(t.Context())
		must(t, err)
		defer conn.Close()
		s, err := db.OnConn(t.Context(), conn)
		must(t, err)
		locked := []dialect.Key{key.Resolve(db.Features().Scope)}
		_, err = s.Acquire(t.Context(), dialect.Request{Keys: locked})
		must(t, err)
		p.cut("")
		for range 3 {
			if _, err := conn.ExecContext(t.Context(), "SELECT 1"); err == nil {
				t.Error("a statement found another session")
			}
			if held, err := dialect.HoldsAll(t.Context(), s, locked); held || err == nil {
				t.Errorf("held: %v, %v", held, err)
			}
			if err := s.Release(t.Context(), locked); dialect.ClassOf(err) != dialect.Lost {
				t.Errorf("release: %v", err)
			}
			if _, err := s.Acquire(t.Context(), dialect.Request{Keys: locked}); err == nil {
				t.Error("acquired again")
			}
		}
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		d.nothingLeft(t)
	})
}

// A server that ends what is idle for 2 s does not end a hold.
func TestAHoldOutlivesTheIdleLimitsOfItsServer(t *testing.T) {
	settings := func(w way) []string {
		if w.kind == "postgres" {
			return []string{"idle_session_timeout=2s", "idle_in_transaction_session_timeout=2s"}
		}
		return []string{"wait-timeout=2", "interactive-timeout=2"}
	}
	private(t, ways, settings, func(t *testing.T, w way, d *database) {
		var reaped sync.WaitGroup
		bystander := w.pool(t, d.dsn)
		conn, err := bystander.Conn(t.Context())
		must(t, err)
		defer conn.Close()
		must(t, conn.PingContext(t.Context()))
		lock := mustLock(t, newLocker(t, d.db), dblock.NewKey("projector"))
		reaped.Go(func() {
			time.Sleep(5 * time.Second)
			if _, err := conn.ExecContext(t.Context(), "SELECT 1"); err == nil {
				t.Error("the limits end nothing")
			}
		})
		select {
		case <-lock.Done():
			t.Errorf("lost: %v", lock.Err())
		case <-time.After(6 * time.Second):
		}
		reaped.Wait()
		must(t, lock.Check(testContext(t)))
		must(t, lock.Release(testContext(t)))
	})
}

func TestAConnectionIsDiscardedUnderAnOpenTransaction(t *testing.T) {
	each(t, func(t *testing.T, w way, d *database) {
		pool := w.pool(t, d.dsn)
		pool.SetMaxOpenConns(1)
		conn, err := pool.Conn(t.Context())
		must(t, err)
		tx, err := conn.BeginTx(t.Context(), nil)
		must(t, err)
		s, err := d.db.OnConn(t.Context(), conn)
		must(t, err)
		key := dblock.NewKey("job")
		locked := []dialect.Key{key.Resolve(d.db.Features().Scope)}
		_, err = s.Acquire(t.Context(), dialect.Request{Keys: locked})
		must(t, err)

		began := time.Now()
		for range 2 {
			must(t, s.Close())
		}
		took := figures{all: []time.Duration{time.Since(began)}}
		took.within(t, "discarded", time.Second)
		mustLock(t, newLocker(t, d.others), key)
		if _, err := tx.ExecContext(t.Context(), "SELECT 1"); err == nil {
			t.Error("the transaction goes on")
		}
		if err := tx.Rollback(); errors.Is(err, sql.ErrTxDone) {
			t.Errorf("rollback: %v", err)
		}
		ctx := testContext(t)
		must(t, pool.PingContext(ctx)) // the only place in the pool is free again
	})
}

// The network stalls while the grant is under way. Meanwhile the server, which hears
// nothing more, ends the session and gives the key to somebody else.
func TestAGrantThatComesTooLateIsNone(t *testing.T) {
	each(t, func(t *testing.T, w way, d *database) {
		t.Parallel()
		p := proxy.New(t, d.dsn)
		db := d.open(t, w, p.DSN)
		waiters := newLocker(t, db, &advisory.Options{KeepAlive: 100 * time.Millisecond, AnswerWithin: 500 * time.Millisecond})
		others := newLocker(t, d.others)
		key := dblock.NewKey("projector")
		lock := mustLock(t, others, key)
		result := make(chan error, 1)
		go func() {
			late, err := waiters.Lock(testContext(t), key)
			if err == nil {
				t.Errorf("granted; its context says %v", late.Err())
			}
			result <- err
		}()
		for len(d.left(t, key)) < 2 {
			time.Sleep(10 * time.Millisecond)
		}
		must(t, p.Poison(proxy.Stall))
		must(t, lock.Release(testContext(t)))
		successor := mustLock(t, others, key)
		t.Log(<-result)
		must(t, successor.Check(testContext(t)))
		must(t, successor.Release(testContext(t)))
	})
}

// wire is a proxy to a server. Each connection through it can be cut, where toxiproxy
// cuts all or none; it takes new ones as before.
type wire struct {
	dsn   string
	mu    sync.Mutex
	pairs map[string][2]net.Conn // by the address that the server sees
}

func newWire(t testing.TB, dsn string) *wire {
	t.Helper()
	u, err := url.Parse(dsn)
	must(t, err)
	target := u.Host
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	u.Host = listener.Addr().String()
	p := &wire{dsn: u.String(), pairs: map[string][2]net.Conn{}}
	var running sync.WaitGroup
	t.Cleanup(func() {
		listener.Close()
		p.cut("")
		running.Wait()
	})
	pipe := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		to.Close()
		from.Close()
	}
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				client.Close()
				continue
			}
			p.mu.Lock()
			p.pairs[server.LocalAddr().String()] = [2]net.Conn{client, server}
			p.mu.Unlock()
			running.Go(func() { pipe(server, client) })
			running.Go(func() { pipe(client, server) })
		}
	})
	return p
}

// cut closes both halves of the connection that the server sees from the
// address, of all connections if it is empty.
func (p *wire) cut(address string) (found bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for seen, pair := range p.pairs {
		if address == "" || address == seen {
			pair[0].Close()
			pair[1].Close()
			delete(p.pairs, seen)
			found = true
		}
	}
	return found
}
