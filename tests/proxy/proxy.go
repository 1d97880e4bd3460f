// Package proxy puts a network that a test can disturb in front of a server.
package proxy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// Proxy leads to a server. Stop cuts its connections and refuses new ones until
// Start.
type Proxy struct {
	*toxiproxy.Proxy
	DSN string // through the proxy
}

// New ends with the test.
func New(t testing.TB, dsn string) *Proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	upstream := u.Host
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	for range 20 {
		// Not a port that the system could give to an outgoing connection while the
		// proxy is stopped.
		u.Host = fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(10000))
		p := toxiproxy.NewProxy(api, "database", u.Host, upstream)
		if err = p.Start(); err == nil {
			t.Cleanup(p.Stop)
			return &Proxy{p, u.String()}
		}
	}
	t.Fatal(err)
	return nil
}

// The toxics that tests use: https://github.com/Shopify/toxiproxy#toxics
const (
	Reset   = `"type": "reset_peer"`
	Silence = `"type": "timeout"` // nothing arrives any more, and nobody is told
	Stall   = `"type": "latency", "attributes": {"latency": 5000}`
	Latency = `"type": "latency", "attributes": {"latency": 100, "jitter": 90}`
)

// Poison lets a toxic work on what flows both ways, until Heal.
func (p *Proxy) Poison(toxic string) error {
	for _, stream := range []string{"upstream", "downstream"} {
		if _, err := p.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{%s, "stream": %q}`, toxic, stream))); err != nil {
			return err
		}
	}
	return nil
}

// Heal ends all toxics.
func (p *Proxy) Heal() { p.Toxics.ResetToxics(context.Background()) }
