# Two commands for newcomers: `make demo` and `make test`. Everything else is for maintainers.
# Each target installs what it needs first; nothing has to be prepared by hand.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first that is there and can run: a shim of a version manager may be there and not run.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
TOOLS := .tools
UV := $(TOOLS)/bin/uv
BIN := .venv/bin

# A folder of wheels that pip would prefer (a CPU build of torch, say) is preferred by uv as well.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

# Compiled modules are kept, whatever the environment says. The tests start hundreds of processes, and
# without them each compiles torch and tensordict again before it does anything.
unexport PYTHONDONTWRITEBYTECODE

# Lanes of pytest. Tests of refit wait more than they work, so that more lanes than cores do not get
# into each other's way. They load NIXL into the test's own process, others Yuanrong, and the two end
# a process that holds both: they are apart.
LANES = -n $(1) --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: help
help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: python
python:
	@$(or $(PYTHON),false) -c '$(SUPPORTED)' || { echo "make: found no Python 3.11, 3.12 or 3.13 as '$(PYTHON)';" \
		"install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "make: $(PYTHON) lacks its module venv; on Debian:" \
		"sudo apt-get install python3-venv" >&2; exit 1; }

$(UV): | python
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet "uv>=0.9"

# Quiet where nothing is to be done, else with uv's progress. $(1) is what is installed, $(2) its arguments.
SYNC = $(UV) sync --check --quiet --python $(PYTHON) $(2) 2>/dev/null || { \
	echo "Installing $(1) into .venv; the first time takes some minutes"; \
	$(UV) sync --python $(PYTHON) $(2); }

.PHONY: sync
sync: $(UV) ## Install the workspace and its development tools into .venv
	@$(call SYNC,the workspace and its tools (2.6 GB),--all-packages --extra mooncake --extra yuanrong)

# Inexact: what is installed already stays, so that the demo does not remove the tools of the tests.
.PHONY: sync-demo
sync-demo: $(UV)
	@$(call SYNC,what the demo needs (2 GB),--inexact --no-dev --package grpo-trainer --package dataplane-admin --extra ray)

.PHONY: system-packages
system-packages: python ## Install the Debian packages of the tests as root, else print how to
	@$(PYTHON) integration/system_packages.py

.PHONY: demo
demo: sync-demo ## Train a tiny model with GRPO through the data plane; reward.png shows it learn
	$(BIN)/grpo-trainer train

.PHONY: trace
trace: sync-demo ## Trace three steps of the demo across all its processes; build/trace.html shows them
	$(BIN)/grpo-trace --steps 3 --html build/trace.html --perfetto build/trace.json

.PHONY: admin
admin: sync-demo ## Open the admin service beside a live demo run; prints its address
	$(BIN)/python integration/admin_demo.py

.PHONY: test
test: system-packages left-out isolation test-slow test-refit test-together test-admin ## Run every test but the long ones (test-long, cluster)

.PHONY: left-out
left-out: sync ## List the tests that a missing Debian package leaves out
	@$(PYTHON) integration/system_packages.py --check || $(BIN)/pytest --list-left-out -m "not long"

.PHONY: test-slow
test-slow: sync ## Run those tests of packages that isolation leaves out, but for refit-mx's
	$(BIN)/pytest $(call LANES,2) -m "slow and not long" packages --ignore=packages/refit-mx

.PHONY: test-refit
test-refit: sync ## Run those of refit-mx that isolation leaves out, and the tests of refit-server
	$(BIN)/pytest -n 4 --dist worksteal --durations=10 -m "slow and not long" packages/refit-mx
	$(BIN)/pytest $(call LANES,4) services/refit-server

.PHONY: test-together
test-together: sync ## Run the tests of the trainer and of everything together
	$(BIN)/pytest $(call LANES,2) -m "not long" integration services/trainer

.PHONY: test-admin
test-admin: sync ## Run the tests of the admin service, its pages in Chromium
	$(BIN)/pytest $(call LANES,2) services/admin

.PHONY: test-long
test-long: sync ## Run the tests that `make test` leaves out, but for those of two machines
	$(BIN)/pytest -m long --ignore=integration/cluster

.PHONY: cluster
cluster: sync ## Run all tests of a run on two machines; needs root
	unshare --net --mount --uts --ipc true  # else all of them would be skipped
	$(BIN)/pytest integration/cluster

.PHONY: lint
lint: sync ## Check style and formatting, and the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --offline --no-progress --quiet .github
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-actions .github/actions/*/action.yml

.PHONY: format
format: sync ## Apply style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: types
types: sync ## Check types, strict on packages and services
	$(BIN)/mypy packages/*/src services/*/src

.PHONY: isolation
isolation: sync ## Build each package's wheel and run its quick tests in an environment of its own
	$(BIN)/python integration/isolation.py $(ARGUMENTS)

.PHONY: api
api: sync ## Compare what each package exports with its last release
	$(BIN)/python integration/releases.py api

.PHONY: released
released: sync ## Test the core's last release with these packages, and their last with this core
	$(BIN)/python integration/releases.py released

export TAG
.PHONY: release-check
release-check: sync ## Say whether TAG may be released; build it and its notes into build/release
	$(BIN)/python integration/releases.py check "$$TAG"

.PHONY: deps
deps: sync ## Show what depends on what
	@$(UV) tree --quiet --depth 1 --no-dev

.PHONY: wheels
wheels: sync ## Build what would be uploaded into build/dist, and check it
	rm -rf build/dist
	for package in packages/*; do $(UV) build --quiet --no-sources --package $$(basename $$package) --out-dir build/dist; done
	$(BIN)/twine check --strict build/dist/*.whl build/dist/*.tar.gz

.PHONY: docs
docs: sync ## Build the documentation site into build/site, and fail on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: bench-quick
bench-quick: sync ## Compare speed with others in under three minutes: build/bench.json
	mkdir -p build
	$(BIN)/python -m integration.benchmarks --quick --json build/bench.json

.PHONY: bench
bench: sync ## Every benchmark, with tables and a picture of each area for docs/results.md
	mkdir -p build
	$(BIN)/python -m integration.benchmarks --full --json build/bench.json --pictures docs/images

.PHONY: lint-images
lint-images: sync ## Check Dockerfiles, compose files, manifests and dashboards
	$(BIN)/pytest integration/test_deploy_images.py integration/test_deploy_kubernetes.py integration/test_deploy_metrics.py

.PHONY: images
images: sync ## Build the images without an engine and try them; needs root, buildah and debootstrap
	docker/build build/images
	$(BIN)/python -m integration.try_images build/images

.PHONY: ci
ci: system-packages lint types test ## What continuous integration runs
