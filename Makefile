# Everything a newcomer and a maintainer run. Needs Python 3.11, 3.12 or 3.13, make and a package registry; nothing else.
SHELL := /bin/sh
.DEFAULT_GOAL := help

# Extra arguments of the command behind a target: make demo ARGS="--model tiny"
ARGS ?=
# Test processes side by side: one more than two cores, because many a test waits.
JOBS ?= 3

# That of the environment that is there, else the first on the path that runs and fits (a pyenv shim may exist and not run).
# PYTHON=/path/to/python3.13 names another; the environment is made anew for it.
ifndef PYTHON
PYTHON := $(shell for p in .venv/bin/python python3.11 python3.12 python3.13 python3 python; do \
  $$p -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit(1); print(sys._base_executable)' 2>/dev/null && break; done)
endif

# A test run and a demo start hundreds of processes: what one of them compiled the next one reads.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
SETUP = @$(if $(PYTHON),$(PYTHON),$(error Ratchet needs Python 3.11, 3.12 or 3.13 and found none on the path: install one, or name it with make PYTHON=/path/to/python3.13)) infra/setup.py

.PHONY: help setup venv model data demo up test test-real test-image test-machine coverage drill check clean lock release

help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## one real turn of the loop after the other, live, on this machine (ARGS="--model tiny" for the short one)
	$(SETUP) venv model
	@$(BIN)/ratchet demo $(ARGS)

up: ## the whole deployment without the simulated product
	$(SETUP) venv model
	@$(BIN)/ratchet up $(ARGS)

# What starts whole deployments comes last and two at a time: the demo, and beside it everything else; each waits more than it works.
test: ## all tests (ARGS="-k words" for some)
	$(SETUP) venv model data
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not e2e and not real"
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m e2e tests/e2e
else
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)
endif

test-real: ## real servers, clients and a browser of other make (vLLM, litellm, AI SDK, Chromium, …), in environments of their own
	$(SETUP) venv model
	@$(BIN)/python -m pytest -m "real and not machine" tests/real $(ARGS)

test-image: ## the image built, and every process of the loop run from it: needs root, podman and buildah, which it installs
	$(SETUP) venv model
	@$(BIN)/python -m pytest -m machine tests/real/containers/test_image.py $(ARGS)

test-machine: ## what needs root and a kernel to itself: the image, compose, Patroni in network namespaces, a disk that loses its power
	$(SETUP) venv model
	@$(BIN)/python -m pytest -m machine tests/real $(ARGS)

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

lock: venv ## write requirements.lock, one for all platforms, with hashes, and docs/platforms.md (after changing pyproject.toml)
	$(BIN)/python -m venv .cache/lock && .cache/lock/bin/python -m pip install --quiet uv==0.13.9 packaging==26.2
	.cache/lock/bin/python infra/lock.py $(ARGS)

# What setuptools built before goes first: what was deleted from the sources since the last wheel would be in this one.
release: venv ## the wheel, its lock, changelog, bill of materials (CycloneDX) and the licences of everything in it, in dist/
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python infra/release.py --out dist
	cp requirements.lock CHANGELOG.md dist/

clean: ## remove what set-up made; data folders (.ratchet*) stay
	rm -rf .venv .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
