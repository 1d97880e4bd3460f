//go:build linux

package bench

import (
	"context"
	"encoding/gob"
	"net/url"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// etcdPairs are etcd's Mutex, on one session of one client, as it is meant to be
// used by a process. The server is embedded in a process of its own, and syncs
// every write to the disk, as etcd does.
func etcdPairs(goroutines int) func(testing.TB, *database) op {
	return func(t testing.TB, _ *database) op {
		server := startWorker(t, "etcd")
		server.send(t, etcdPlace{Folder: t.TempDir(), Client: "http://" + freeAddress(t), Peer: "http://" + freeAddress(t)})
		var endpoint string
		server.receive(t, &endpoint)
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		session, err := concurrency.NewSession(client)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { session.Close() })
		mutexes := make([]*concurrency.Mutex, goroutines)
		for i := range mutexes {
			mutexes[i] = concurrency.NewMutex(session, "/bench/"+strconv.Itoa(i))
		}
		return func(ctx context.Context, goroutine int) error {
			if err := mutexes[goroutine].Lock(ctx); err != nil {
				return err
			}
			return mutexes[goroutine].Unlock(ctx)
		}
	}
}

type etcdPlace struct{ Folder, Client, Peer string }

// serveEtcd is the role of a worker: a cluster of one.
func serveEtcd(in *gob.Decoder, out *gob.Encoder) error {
	var place etcdPlace
	if err := in.Decode(&place); err != nil {
		return err
	}
	config := embed.NewConfig()
	config.Dir = place.Folder
	config.LogLevel = "error"
	client, err := url.Parse(place.Client)
	if err != nil {
		return err
	}
	peer, err := url.Parse(place.Peer)
	if err != nil {
		return err
	}
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{*peer}, []url.URL{*peer}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	server, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	defer server.Close()
	select {
	case <-server.Server.ReadyNotify():
	case err := <-server.Err():
		return err
	}
	if err := out.Encode(place.Client); err != nil {
		return err
	}
	return in.Decode(new(struct{})) // until its input ends
}
