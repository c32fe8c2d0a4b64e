# Each target installs what it needs, and shows what it is doing if that takes time.
# A new machine needs Python 3.11 or newer and Java 17 or newer, on the PATH or in JAVA_HOME.

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/runtime
READY := $(VENV)/ready
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet

# Arguments for the command of a target: make test ARGS='-m "not cluster" -x'
ARGS ?=

# The tests start hundreds of Python processes, which must not compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Groups of long tests (.ci/long) that `make test` also runs: make test LONG='feed fsck'. "all" is all.
LONG ?=
LONG_GROUPS = $(shell sed -n 's/^\([a-z]*\) .*/\1/p' .ci/long)
ifneq ($(filter-out $(LONG_GROUPS),$(LONG)),)
$(error No group of long tests: $(filter-out $(LONG_GROUPS),$(LONG)). There are: $(sort $(LONG_GROUPS)))
endif
WITH_LONG = $(if $(filter all,$(LONG)),,-m "not long$(foreach group,$(LONG), or long(group='$(group)'))")

# Number of processes that run the tests. Four would keep two cores busy all the time, so that tests
# with real servers run into their time limits.
WORKERS ?= 3
XDIST = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# The first Python here that is new enough and can create an environment (Debian packages venv
# separately).
PYTHON ?= $(or $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
		2>/dev/null && echo $$python && break; done),$(error \
	Python 3.11 or newer, with its venv module, is needed: install python3 and python3-venv))

# Java of JAVA_HOME if it is set, else the one on the PATH, like the local cluster.
JAVA = $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
JAVA_VERSION = $(shell "$(JAVA)" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p')

# Java is checked before anything is installed, so that the error appears at once.
ifneq ($(filter demo demo-operate feed-demo fsck-demo restore-demo notify-demo test test-% soak-% compat judge bench bench-%,$(MAKECMDGOALS)),)
ifneq ($(shell test 0$(JAVA_VERSION) -ge 17 && echo found),found)
$(error Java 17 or newer is needed, and "$(JAVA)" is not: install a JRE (Debian: openjdk-17-jre-headless), \
	or set JAVA_HOME$(if $(JAVA_HOME), to one or unset it))
endif
endif
ifneq ($(filter judge,$(MAKECMDGOALS)),)
ifndef URI
$(error Name the cluster to judge: make judge URI=zk+hierarchical://127.0.0.1:2181/ledgers)
endif
endif

.PHONY: help demo demo-operate feed-demo fsck-demo restore-demo notify-demo test test-all soak-audit compat judge bench \
	bench-repair bench-archive bench-audit bench-feed bench-fsck bench-limit bench-notify dist fsck-archive lint docs proto lock venv dev clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: venv ## start a cluster here, kill a bookie, and repair its ledgers
	@$(BIN)/bookmender local demo $(ARGS)

demo-operate: dev ## operate a secured cluster through a loss, with Prometheus and Chromium
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.operate_demo $(ARGS)

feed-demo: dev ## kill leaders and followers of the change feed, and compare what they know with ZooKeeper
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.feed_demo $(ARGS)

fsck-demo: dev ## find each kind of damage with fsck on Spark here, show it in Chromium, repair it
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.fsck.demo

restore-demo: dev ## delete ZooKeeper's data under load, restore it, and read every entry with Java's client
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.restore_demo $(ARGS)

notify-demo: dev ## kill servers, nodes and bookies; every client learns the latest version of its objects
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.notify_demo $(ARGS)

test: dev ## run the tests, with real ZooKeeper and real bookies: about ten minutes
	@$(BIN)/python -m tests.prepare
	@$(BIN)/python -m pytest $(XDIST) $(WITH_LONG) $(ARGS)

test-all: ## run the long tests, too: about half an hour
	@$(MAKE) test LONG=all

test-matrix: ## repair on every pair of storage class, version and layout: about three minutes
	@$(MAKE) test LONG=matrix ARGS='tests/cluster/test_matrix.py $(ARGS)'

compat: dev ## compare with Java's tests: build/compatibility.md
	@$(BIN)/python -m tests.prepare
	@$(BIN)/python -m tests.compat $(ARGS)

soak-audit: dev ## check marks during half an hour of losses, killed leaders and restarts
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.soak.audit $(ARGS)

judge: dev ## read every copy with BookKeeper's own client: make judge URI=zk+hierarchical://…
	@$(BIN)/python -m tests.java.judge '$(URI)' $(ARGS)

bench: dev ## short measurements: compare with Java's AutoRecovery, show where time goes
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.repair --quick
	@$(BIN)/python -m bench.limit --quick

bench-repair: dev ## 45 minutes: compare repairs with Java's AutoRecovery (bench/results)
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.repair $(ARGS)

bench-archive: dev ## 20 minutes: lag, size, restore and memory of the archive (bench/results)
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.archive $(ARGS)

bench-audit: dev ## 30 minutes: compare marks after a loss with Java's auditor (bench/results)
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.audit $(ARGS)

bench-feed: dev ## 5 minutes: rates and latencies of the change feed (bench/results)
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.feed $(ARGS)

bench-fsck: dev ## 22 minutes: compare the levels of fsck with Java's check (bench/results)
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.fsck $(ARGS)

bench-limit: dev ## show where a repair spends its time (bench/results)
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.limit $(ARGS)

bench-notify: dev ## 9 minutes: rates, latencies and storms of notifications (bench/results)
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.notify $(ARGS)

dist: dev ## build what users install: wheel, sources, an archive for hosts without network, fsck archive
	@deploy/make-dist
	@$(MAKE) --no-print-directory fsck-archive

# For executors with this Python and platform. Executors have their own Spark.
fsck-archive: dev ## pack what executors need: dist/bookmender-fsck.tar.gz, for spark-submit --archives
	@rm -rf build
	@$(PIP) install --target build/fsck \
		--require-hashes --requirement requirements-spark.lock
	@$(PIP) install --target build/fsck \
		--upgrade --no-deps --no-build-isolation .
	@mkdir -p dist
	@tar -czf dist/bookmender-fsck.tar.gz -C build/fsck .

lint: dev ## check format, lint, types, imports, house rules, OpenAPI document, alert rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest --quiet tests/test_house.py tests/daemon/http/test_openapi.py
	.ci/alerts
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: dev ## the documents as a site in build/site, and those pages that the code writes
	@$(BIN)/python -m daemon.pages docs
	@$(BIN)/python -m daemon.http.metrics_page >docs/metrics.md
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

proto: dev ## generate the *_pb2 modules from the .proto files
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --mypy_out=. \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy $(shell find ledgers -name '*.proto')

# The lock files name no index and no registry: pip uses the configured one, and hashes decide.
LOCK = $(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 \
	--generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
	--custom-compile-command 'make lock'

lock: | $(BIN)/uv ## pin the newest versions that pyproject.toml allows, with hashes
	$(LOCK) --output-file requirements.lock
	$(LOCK) --constraint requirements.lock --extra fsck --extra feed --extra s3 --group dev \
		--group docs --output-file requirements-dev.lock
	$(LOCK) --constraint requirements-dev.lock --extra fsck \
		--no-emit-package pyspark --no-emit-package py4j --output-file requirements-spark.lock

venv: $(RUNTIME) ## install what bookmender needs to run into .venv
dev: $(READY) ## add the tools for development and PySpark

# Created only if it is missing or broken; otherwise pip changes only what the lock changed. Modules
# are compiled when they are first imported. The package itself is installed in place, built with the
# setuptools that the other lock pins.
$(RUNTIME): requirements.lock pyproject.toml
	@echo "Installing bookmender into $(VENV): downloads 10 MB, takes some ten seconds."
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| $(PYTHON) -m venv --clear $(VENV)
	@sed -n '/^setuptools==/,/[^\]$$/p' requirements-dev.lock | cat requirements.lock - \
		| $(PIP) install --no-compile --require-hashes --requirement /dev/stdin
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(READY): $(RUNTIME) requirements-dev.lock
	@echo "Adding the tools and PySpark to $(VENV): downloads 550 MB, takes a minute or two."
	@$(PIP) install --require-hashes --requirement requirements-dev.lock
	@touch $@

$(BIN)/uv:
	@$(MAKE) dev

clean: ## restore a fresh checkout: remove the environment, caches and builds
	rm -rf $(VENV) *.egg-info build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
