# Each target makes what it needs first, so that `make demo` and `make test` work on a machine that has nothing but
# make and a Python of 3.11 or newer. Nothing is installed outside this folder. `make help` lists the targets.

VENV ?= .venv
# The Python to make the environment with; empty: the first of these that is new enough and has venv.
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
# Further arguments for pip, e.g. PIP_ARGS="--extra-index-url URL"; PIP_EXTRA_INDEX_URL is pip's own and works as well.
PIP_ARGS ?=
# Further arguments for what a target runs, e.g. make test ARGS="-k verdict".
ARGS ?=
# How many files of tests run at a time; each starts processes of its own, so that more than a few are no gain.
WORKERS ?= 2
# Which benchmarks `make bench` runs; all of them unless named.
BENCHES ?= $(basename $(notdir $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))))

PY := $(VENV)/bin/python
PIP := $(PY) -m pip
SETTINGS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test rehearse-slurm dev lint style types layers format docs-help bench build clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo  ## train on CPU processes, corrupt one, watch it being caught and named
	$(VENV)/bin/bitwitness demo $(ARGS)

test: $(VENV)/.dev  ## all tests
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

rehearse-slurm: $(VENV)/.dev  ## on a real Slurm: corrupt a node of a job, watch it being drained and the job go on
	$(PY) -m tests.rehearsals.slurm $(ARGS)

dev: $(VENV)/.dev  ## the environment for development, in $(VENV)

lint: style types layers  ## everything that can be said about the code without running it

style: $(VENV)/.dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(VENV)/.dev
	$(PY) -m mypy

layers: $(VENV)/.dev
	PYTHONPATH=src $(VENV)/bin/lint-imports

format: $(VENV)/.dev  ## put the code into its format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs-help: $(VENV)/.dev  ## write the current help of every command into README.md and docs/
	$(PY) -m tests.docs_help --write

bench: $(VENV)/.dev  ## measure the promises of the README on this machine
	@set -e; for name in $(BENCHES); do echo "== $$name"; $(PY) -m benchmarks.$$name $(ARGS); done

build: $(VENV)/.dev  ## source archive and wheel, in dist/
	rm -rf dist
	$(PY) -m build

clean:  ## remove what was built and cached; leaves the environment and the runs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.*
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove the environment
	rm -rf $(VENV)

# One resolver run each: constraints.txt must hold for everything that is installed together. The stamps are newer than
# the settings they were made from, so a second call does nothing and a changed setting installs again.
$(VENV)/.demo: $(SETTINGS) | $(PY)
	$(PIP) install --constraint constraints.txt $(PIP_ARGS) --editable '.[train]'
	@touch $@

# pip 25.1 is the first that knows dependency groups.
$(VENV)/.dev: $(SETTINGS) | $(PY)
	$(PIP) install --quiet $(PIP_ARGS) 'pip>=25.1'
	$(PIP) install --constraint constraints.txt $(PIP_ARGS) --editable '.[all]' --group dev
	@touch $@ $(VENV)/.demo

$(PY):
	@set -e; \
	suits='import sys; sys.exit(not (3, 11) <= sys.version_info)'; \
	without=''; chosen=''; \
	for candidate in $(PYTHONS); do \
	    "$$candidate" -c "$$suits" >/dev/null 2>&1 || continue; \
	    if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then chosen=$$candidate; break; fi; \
	    without="$$without $$candidate"; \
	done; \
	if [ -z "$$chosen" ] && [ -n "$$without" ]; then \
	    version=$$(set -- $$without; "$$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "Found$$without, but without venv and ensurepip, so no environment can be made. On Debian or Ubuntu:" >&2; \
	    echo "    apt-get install python$$version-venv" >&2; exit 1; \
	fi; \
	if [ -z "$$chosen" ]; then \
	    echo "bitwitness needs Python 3.11 or newer; none of these is: $(PYTHONS)" >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python test" >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$chosen" --version) ($$(command -v "$$chosen"))"; \
	"$$chosen" -m venv $(VENV)
