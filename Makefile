# Everything a contributor runs. Each target makes the virtual environment first when it is missing or out of date.
#
#   make demo      compile a small GPT for two ranks, train it, compare with one device (about a minute)
#   make test      the checks (lint) and the default tests, about four minutes on two cores
#   make test-all  the slow tests, the rest of what continuous integration runs
#   make gpu       everything that one GPU can show; without one the CPU stands in
#   make docs      the guides and the reference: build/reference/index.html
#   make lint      ruff (rules and format), mypy, import-linter
#
# PYTHON chooses the interpreter (3.11 or newer), JOBS the number of test processes, TORCH another version of torch than
# the one in constraints.txt, which gets an environment of its own.

SHELL := /bin/bash
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
JOBS ?= 2
VENV := .venv$(addprefix /torch-,$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist=worksteal

# Many ranks share few cores: one thread each is fastest, and keeps sums in one order.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1
# Test processes, and those that tests start, share bytecode: a test file's assertions are rewritten once, not in every run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test default test-all gpu docs lint clean

demo: $(READY)
	@$(BIN)/python examples/demo.py

# Side by side: mypy takes most of a minute, of one core.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 lint default

default: $(READY)
	$(PYTEST) -m "not slow" --durations=10

test-all: $(READY)
	$(PYTEST) -m slow --durations=10

gpu: $(READY)
	$(BIN)/python benchmarks/one_gpu.py

docs: $(READY)
	@$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt sphinx myst-parser
	$(BIN)/sphinx-build --quiet --fail-on-warning -c docs/api -b html . build/reference

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "shardwright needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^setuptools==/d',cat) constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt 'setuptools>=77'
	@$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[test]'
	@touch $@
