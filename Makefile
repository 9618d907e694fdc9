# Everything a newcomer and a maintainer run. Needs Python 3.11 or 3.12, make and a package registry; nothing else.
SHELL := /bin/sh
.DEFAULT_GOAL := help

# Extra arguments of the command behind a target: make demo ARGS="--model tiny"
ARGS ?=
# Test processes side by side.
JOBS ?= 2

# That of the environment that is there, else the first on the path that runs and fits (a pyenv shim may exist and not run).
# PYTHON=/path/to/python3.12 names another; the environment is made anew for it.
ifndef PYTHON
PYTHON := $(shell for p in .venv/bin/python python3.11 python3.12 python3 python; do \
  $$p -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 12) or sys.exit(1); print(sys._base_executable)' 2>/dev/null && break; done)
endif

BIN := .venv/bin
SETUP = @$(if $(PYTHON),$(PYTHON),$(error Ratchet needs Python 3.11 or 3.12 and found none on the path: install one, or name it with make PYTHON=/path/to/python3.12)) infra/setup.py

.PHONY: help setup venv model data demo up test test-real coverage drill check clean lock release

help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## one real turn of the loop after the other, live, on this machine (ARGS="--model tiny" for the short one)
	$(SETUP) venv model
	@$(BIN)/ratchet demo $(ARGS)

up: ## the whole deployment without the simulated product
	$(SETUP) venv model
	@$(BIN)/ratchet up $(ARGS)

# What starts whole deployments comes last and one at a time, because each takes all cores. The demo is one of them.
test: ## all tests (ARGS="-k words" for some)
	$(SETUP) venv model data
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not e2e and not real"
	@$(BIN)/python -m pytest -m e2e
else
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)
endif

test-real: ## real servers, clients and a browser of other make (vLLM, litellm, AI SDK, Chromium, …), in environments of their own
	$(SETUP) venv model
	@$(BIN)/python -m pytest -m real tests/real $(ARGS)

coverage: ## which statements the fast tests run, by room (ARGS="--part 1/30" for some of the test files, ARGS=--report)
	$(SETUP) venv model data
	@$(BIN)/python -m tests.bench.covering $(ARGS)

check: ## ruff, pyright, import contracts
	$(SETUP) venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

drill: ## lose a database and come back: point in time, erasures again, audit chain, weights and segments verified
	$(SETUP) venv
	@$(BIN)/python -m tests.bench.drill $(ARGS)

bench-%: ## a benchmark of tests/bench: bench-cycle, bench-ingest, bench-gates, ...
	$(SETUP) venv model data
	@$(BIN)/python -m tests.bench.$(subst -,_,$*) $(ARGS)

setup: ## everything the targets above need; each of them does its part of this by itself
	$(SETUP) venv model data

venv: ## the virtual environment with the locked packages
	$(SETUP) venv

model: ## SmolLM2-135M-Instruct, converted, and the tiny random model
	$(SETUP) venv model

data: ## the real conversations that tests and benchmarks read
	$(SETUP) venv data

# A list and no `pip freeze`, which writes paths of this machine for what was installed from a file. The local part of a version (+cpu) goes, and so does what a GPU build of torch brings along: installing torch brings it again.
lock: venv ## write requirements.lock, with hashes, from what is installed in .venv (after changing pyproject.toml)
	$(BIN)/python -m pip list --format=freeze --exclude pip --exclude-editable | sed -E 's/[+][a-z0-9.]+$$//; /^(nvidia-|cuda-|triton==)/d' > .cache/pins.txt
	$(BIN)/python -m venv .cache/lock && .cache/lock/bin/python -m pip install --quiet uv==0.13.9
	grep -v '^torch==' .cache/pins.txt | .cache/lock/bin/uv pip compile --quiet --no-deps --no-header --no-annotate --generate-hashes --python-version 3.11 - > .cache/requirements.lock
	grep '^torch==' .cache/pins.txt >> .cache/requirements.lock
	mv .cache/requirements.lock requirements.lock

release: venv ## the wheel, its bill of materials (CycloneDX) and the licences of everything in it, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python infra/release.py --out dist

clean: ## remove what set-up made; data folders (.ratchet*) stay
	rm -rf .venv .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
