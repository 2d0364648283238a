# Every command builds what it needs; a fresh machine has to bring python3 (3.11 or newer, with
# venv and its C headers), make and gcc/g++.
#
#   PYTHON       the interpreter the environment is built from        (python3)
#   PIP_ARGS     more arguments for pip; on a machine without a GPU, a CPU build of torch saves
#                gigabytes:  make venv PIP_ARGS="--extra-index-url <index of CPU wheels>"
#   WORKERS      test processes                                      (2)
#   PYTEST_ARGS  more arguments for pytest:  make quick PYTEST_ARGS="-k theory -x"
#   COV_MIN      least line coverage of the package, in percent      (88)
#   DEMO_ARGS    arguments of the demo
#   ZOO_ARGS     arguments of the zoo:  make zoo ZOO_ARGS="--only llama qwen3"

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=
COV_MIN ?= 88
DEMO_ARGS ?=
ZOO_ARGS ?= --write docs/zoo.md

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
SOURCES := $(wildcard mxnorm_pass tests examples benchmarks docs)

# Nothing here may reach for a model hub.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# Several test processes, each single-threaded, beat threads that fight for the same cores;
# compiling in the test process itself spares each of them a pool of compile workers.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo zoo docs test quick long coverage gpu lint format clean distclean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## build .venv (again only when pyproject.toml or constraints.txt changed)

# The stamp is written last: an installation that was cut short is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned test tools need Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[test,report,docs,dev]'
	@touch $@

demo: $(STAMP) ## train a small Llama three ways and compare the losses
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

zoo: $(STAMP) ## the pass on every architecture of transformers; hours on 2 cores, resumable
	$(TEST_ENV) $(BIN)/python benchmarks/zoo.py --jobs $(WORKERS) $(ZOO_ARGS)

docs: $(STAMP) ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint ## lint, types, all tests but the long ones: what CI runs
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

quick: $(STAMP) ## the tests that are neither slow, long, nor need a GPU
	$(PYTEST) -m "not slow and not long and not cuda" $(PYTEST_ARGS)

long: $(STAMP) ## the long tests: whole models, and variants of what the others test
	$(PYTEST) -m long $(PYTEST_ARGS)

# Apart from the tests: tracing lines makes a compile half as slow again.
coverage: $(STAMP) ## the quick tests with line coverage of the package
	$(PYTEST) -m "not slow and not long" --cov=mxnorm_pass --cov-report=term-missing:skip-covered --cov-fail-under=$(COV_MIN) $(PYTEST_ARGS)

gpu: $(STAMP) ## the tests that need a CUDA GPU
	$(BIN)/python -m pytest -m cuda -n $(WORKERS) $(PYTEST_ARGS)

lint: $(STAMP) ## ruff and mypy, nothing is changed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(STAMP) ## let ruff fix and format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean: ## remove caches, reports and builds, keep .venv
	rm -rf build dist demo-out htmlcov *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv too
	rm -rf $(VENV)
