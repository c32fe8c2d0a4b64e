# Every target sets up what it needs by itself and says what it is doing while that takes time.
# A fresh machine needs Python 3.11 or newer and Java 17 or newer, found on PATH or in JAVA_HOME.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# Passed on to the command behind a target: make test ARGS='-m "not cluster" -x'
ARGS ?=

# The tests start hundreds of Python processes: none is to compile all modules once more.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run the tests. Those on real clusters wait half of their time, so more than cores.
WORKERS ?= 4
XDIST = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# The first of these that is new enough and can make an environment (Debian splits that off).
PYTHON ?= $(or $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
		2>/dev/null && echo $$python && break; done),$(error \
	Python 3.11 or newer, with its venv module, is needed: install python3 and python3-venv))

# JAVA_HOME's if it is set, else the PATH's: as the local cluster chooses.
JAVA = $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
JAVA_VERSION = $(shell "$(JAVA)" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p')

# Looked for before anything is installed, so that the answer comes in the first second.
ifneq ($(filter demo fsck-demo test test-% soak-% compat judge bench bench-%,$(MAKECMDGOALS)),)
ifneq ($(shell test 0$(JAVA_VERSION) -ge 17 && echo found),found)
$(error Java 17 or newer is needed, and "$(JAVA)" is none: install a JRE (Debian: openjdk-17-jre-headless), \
	or set JAVA_HOME$(if $(JAVA_HOME), to one or unset it))
endif
endif
ifneq ($(filter judge,$(MAKECMDGOALS)),)
ifndef URI
$(error The cluster to judge is needed: make judge URI=zk+hierarchical://127.0.0.1:2181/ledgers)
endif
endif

.PHONY: help demo fsck-demo test test-matrix test-scale soak-audit compat judge bench bench-repair \
	bench-audit bench-fsck bench-limit fsck-archive lint proto lock venv clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: venv ## a cluster here, a bookie killed, and its ledgers made whole again
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/bookmender demo $(ARGS)

fsck-demo: venv ## damage of each kind found by fsck on a Spark cluster here, shown in Chromium, and mended
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.fsck.demo

test: venv ## the whole suite, with real ZooKeeper and real bookies
	@$(BIN)/python -m tests.prepare
	@$(BIN)/python -m pytest $(XDIST) $(ARGS)

compat: venv ## Java's tests and known gaps beside ours: docs/compatibility.md
	@$(BIN)/python -m tests.prepare
	@$(BIN)/python -m tests.compat $(ARGS)

test-matrix: venv ## a repair on every storage class, version and layout: about ten minutes
	@$(BIN)/python -m tests.prepare
	@TEST_MATRIX=full $(BIN)/python -m pytest tests/cluster/test_matrix.py $(ARGS)

test-scale: venv ## the auditor with 1,000 bookies and 200,000 ledgers: about three minutes
	@$(BIN)/python -m tests.prepare --default-only
	@TEST_SCALE=full $(BIN)/python -m pytest tests/cluster/test_scale.py $(ARGS)

soak-audit: venv ## half an hour of losses, killed leaders and restarts: are all marks right?
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m tests.soak.audit $(ARGS)

test-fsck: venv ## fsck on damage of each kind, and on 1,000 healthy ledgers under load
	@$(BIN)/python -m tests.prepare --default-only
	@TEST_FSCK=full $(BIN)/python -m pytest tests/cluster/test_fsck.py $(ARGS)

judge: venv ## BookKeeper's own checker reads every copy: make judge URI=zk+hierarchical://…
	@$(BIN)/python -m tests.java.judge '$(URI)' $(ARGS)

bench: venv ## measurements in short: against Java's AutoRecovery, and where the time goes
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.repair --quick
	@$(BIN)/python -m bench.limit --quick

bench-repair: venv ## three quarters of an hour: repairs against Java's AutoRecovery, into bench/results
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.repair $(ARGS)

bench-audit: venv ## half an hour: marks after a loss against Java's auditor, into bench/results
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.audit $(ARGS)

bench-fsck: venv ## 22 minutes: fsck's levels, and Java's check, into bench/results
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.fsck $(ARGS)

bench-limit: venv ## where the time of a repair goes, into bench/results
	@$(BIN)/python -m tests.prepare --default-only
	@$(BIN)/python -m bench.limit $(ARGS)

# For executors of the Python and the platform that this runs with; Spark itself is theirs.
fsck-archive: venv ## dist/bookmender-fsck.tar.gz: what executors need, for spark-submit --archives
	@rm -rf build
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --target build/fsck \
		--require-hashes --requirement requirements-spark.lock
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --target build/fsck \
		--upgrade --no-deps --no-build-isolation .
	@mkdir -p dist
	@tar -czf dist/bookmender-fsck.tar.gz -C build/fsck .

lint: venv ## format, lint, types, import direction, and the house rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest --quiet tests/test_house.py

proto: venv ## the *_pb2 modules again, from the .proto files beside them
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --mypy_out=. \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy $(shell find ledgers -name '*.proto')

# Neither index nor registry is named in what this writes: pip takes its own, and the hashes decide.
LOCK = $(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 \
	--generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
	--custom-compile-command 'make lock'

lock: | $(BIN)/uv ## the newest versions that pyproject.toml allows, pinned with hashes
	$(LOCK) --output-file requirements.lock
	$(LOCK) --constraint requirements.lock --extra local --extra fsck --group dev \
		--output-file requirements-dev.lock
	$(LOCK) --constraint requirements-dev.lock --extra fsck \
		--no-emit-package pyspark --no-emit-package py4j --output-file requirements-spark.lock

venv: $(READY)

# Made anew only when it is missing or broken; otherwise pip changes just what the lock changed.
# The package itself is installed in place, built with the setuptools that the lock pins.
$(READY): requirements-dev.lock pyproject.toml
	@echo "Bringing the Python in $(VENV) up to date. The first time this fetches PySpark, whose jars"
	@echo "hold ZooKeeper: 450 MB, about a minute."
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check install --require-hashes \
		--requirement requirements-dev.lock
	@$(BIN)/python -m pip --disable-pip-version-check install --no-deps --no-build-isolation \
		--editable .
	@touch $@

$(BIN)/uv:
	@$(MAKE) venv

clean: ## back to a fresh checkout: removes the environment, caches and builds
	rm -rf $(VENV) *.egg-info build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
