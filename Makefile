STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
# Platforms that the code is built for, besides this machine's.
PLATFORMS := darwin/arm64 windows/amd64 linux/arm64
# The root module, and those beside it whose dependencies stay out of users' go.sum.
MODULES := $(sort $(dir $(shell find . -name go.mod -not -path '*/testdata/*')))
# Those that people build elsewhere; the benchmarks' peers take minutes to compile.
PORTABLE := $(filter-out ./bench/,$(MODULES))

# Runs a command in every module and fails if it failed in one.
in_modules = @status=0; for module in $(or $(2),$(MODULES)); do \
	echo "== $$module: $(1)"; (cd $$module && $(1)) || status=1; done; exit $$status

.PHONY: help test crossings servers check fmt vet oldest staticcheck cross tidy go-version demo torture bench

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

test: servers ## run all tests, on real servers
	$(call in_modules,go test -race -count=1 -timeout 40m ./...)

CROSSINGS ?= 5000
crossings: servers ## let grants and the ends of waits cross, 20,000 times for each database, and cancel guarded writes
	cd tests && DBLOCK_TEST_CROSSINGS=$(CROSSINGS) go test -v -count=1 -timeout 2h -run '/advisory/(a_grant_that_crosses|a_cancel_at_any_moment)|/rows:_a_cancel_at_any_moment' .

servers: ## install the database servers that the tests use
	-@scripts/install-servers

check: fmt go-version tidy vet oldest staticcheck cross ## check everything but the tests

fmt: ## check the formatting
	@echo "== gofmt"; files=$$(gofmt -l .); \
	if [ -n "$$files" ]; then echo "not formatted; run gofmt -w on:"; echo "$$files"; exit 1; fi

go-version: ## check that the modules ask for no newer Go than they promise
	$(call in_modules,grep -q '^go 1\.25\.' go.mod && ! grep -q '^toolchain' go.mod)

tidy: ## check that go.mod and go.sum are tidy
	$(call in_modules,go mod tidy -diff)

vet: ## run go vet
	$(call in_modules,go vet ./...)

oldest: ## vet with the oldest Go that the modules promise
	$(call in_modules,GOTOOLCHAIN=go$$(go list -m -f '{{.GoVersion}}') go vet ./...,$(PORTABLE))

# It may need a newer Go than the modules.
staticcheck: ## run staticcheck
	$(call in_modules,GOTOOLCHAIN=auto go run $(STATICCHECK) ./...)

cross: ## build and vet for other platforms
	@status=0; for platform in $(PLATFORMS); do export GOOS=$${platform%/*} GOARCH=$${platform#*/}; \
	echo "== $$platform"; go build ./... || status=1; \
	for module in $(PORTABLE); do (cd $$module && go vet ./...) || status=1; done; done; exit $$status

demo: ## show the three uses at work
	go run ./cmd/dblock demo

# How long, for each database; the random choices of an earlier run; only postgres, mysql or mariadb.
DURATION := 5m
SEED := 0
DATABASE :=
torture: servers ## torture the locks: DURATION=5m SEED=… DATABASE=postgres|mysql|mariadb
	cd tests && go test -race -count=1 -v -timeout 24h ./torture -run '^TestUnderTorture$$/$(DATABASE)' \
		-torture.duration=$(DURATION) -torture.seed=$(SEED)

# How often each comparison is measured, and only one of the scenarios. Without a package's name
# go test shows the figures as they come.
REPETITIONS := 5
SCENARIO :=
bench: servers ## measure dblock beside its peers: REPETITIONS=5 DATABASE=… SCENARIO=pair|transaction|throughput|hot|several|many
	cd bench && go test -count=1 -timeout 3h -run '^TestPeers$$/$(DATABASE)/$(SCENARIO)' \
		-peers.repetitions=$(REPETITIONS) $(if $(DATABASE)$(SCENARIO),,-peers.results=RESULTS.md)
