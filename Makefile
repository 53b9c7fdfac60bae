# Everything a newcomer needs: `make demo` and `make test` set up what they use, once.
#
#   make demo PYTHON=python3.12     another interpreter (3.11 or newer)
#   make test ARGS='-k keeper'      arguments for pytest; `make bench` takes them too
#   make test JOBS=0                one test after the other, in one process
#
# Each set-up step leaves a stamp in the virtual environment and is repeated only when
# pyproject.toml (or this file) changes. Plain pip of any age is enough.

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
ARGS ?=
JOBS ?= 3
SEED ?= 1
MINUTES ?= 10
SECONDS ?= 60

# The peer that tests and benchmarks compare with. The exact pin matters: it also matches a
# CPU-only build (2.13.0+cpu) where pip is told of one, and prefers it. A range would fetch
# gigabytes of CUDA libraries instead.
TORCH ?= torch==2.13.0 numpy

# What builds the documentation. Its next release, 0.0.74, requires a package (zensical-ui) that
# was not to be found on the package index when this was pinned.
DOCS ?= zensical==0.0.73

BIN := $(VENV)/bin
PIP = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
SETTINGS := pyproject.toml Makefile
# For mypy, one by one: each may have a conftest.py, and mypy takes one module of a name at a time.
TEST_FOLDERS := $(patsubst %/,%,$(sort $(filter-out tests/__pycache__/,$(wildcard tests/*/))))

# The dependency groups of pyproject.toml as a requirements file: pip reads groups itself only
# since 25.1, and the pip of a fresh virtual environment may be older.
GROUP = $(1)/bin/python -c 'import sys, tomllib; \
	groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	print(*groups[sys.argv[1]], sep="\n")' $(2) > $(1)/$(2).txt

.DELETE_ON_ERROR:
.PHONY: help demo test lint types format bench chaos simulate docs clean distclean
.DEFAULT_GOAL := help

help: ## Show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.holdfast ## Run a job that loses a worker and a node, gains one, and finishes (about 10 seconds)
	@$(BIN)/python examples/demo.py

test: $(VENV)/.holdfast $(VENV)/.test $(VENV)/.torch ## Run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/.holdfast $(VENV)/.test $(VENV)/.lint ## Check style, types and the layering of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types
	$(BIN)/lint-imports

types: $(VENV)/.holdfast $(VENV)/.test $(VENV)/.lint ## Check types only
	$(BIN)/mypy src simulator benchmarks chaos examples $(wildcard tests/*.py)
	set -e; for folder in $(TEST_FOLDERS); do $(BIN)/mypy $$folder; done

format: $(VENV)/.lint ## Lay out the source as `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.holdfast $(VENV)/.torch ## Measure against torchrun and bare processes
	$(BIN)/python -m benchmarks $(ARGS)

chaos: $(VENV)/.holdfast $(VENV)/.test ## Run real jobs under random faults (as root): SEED=1 MINUTES=10, ARGS='--backend ha'
	$(BIN)/python -m chaos --seed $(SEED) --minutes $(MINUTES) $(ARGS)

simulate: $(VENV)/.holdfast ## Simulate jobs of many nodes under faults: SEED=1 SECONDS=60, ARGS='--driver etcd'
	@$(BIN)/python -m simulator --seed $(SEED) --seconds $(SECONDS) $(ARGS)

docs: $(DOCS_VENV)/.docs ## Build the documentation into site/
	$(DOCS_VENV)/bin/zensical build --clean

clean: ## Remove caches and build results
	rm -rf site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
	find benchmarks chaos examples simulator src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environments as well
	rm -rf $(VENV) $(DOCS_VENV)

# The steps of the set-up.

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Holdfast needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@echo "Creating $* ..."
	@$(PYTHON) -m venv $* || { \
		rm -rf $*; \
		echo "The module venv is missing; many distributions have it as python3-venv" >&2; exit 1; }

# A virtual environment that another tool made may lack pip.
%/.pip: | %/bin/python
	@$*/bin/python -m pip --version > /dev/null 2>&1 || $*/bin/python -m ensurepip > /dev/null
	@touch $@

$(VENV)/.holdfast: $(SETTINGS) | $(VENV)/.pip
	@echo "Installing holdfast into $(VENV) ..."
	@$(call PIP,$(VENV)) --editable .
	@touch $@

$(VENV)/.test $(VENV)/.lint: $(VENV)/.%: $(SETTINGS) | $(VENV)/.pip
	@echo "Installing what '$*' needs into $(VENV) ..."
	@$(call GROUP,$(VENV),$*)
	@$(call PIP,$(VENV)) --requirement $(VENV)/$*.txt
	@touch $@

$(VENV)/.torch: $(SETTINGS) | $(VENV)/.pip
	@echo "Installing $(TORCH) into $(VENV) ..."
	@$(call PIP,$(VENV)) $(TORCH)
	@$(call GROUP,$(VENV),peers)
	@$(call PIP,$(VENV)) --no-deps --requirement $(VENV)/peers.txt
	@touch $@

$(DOCS_VENV)/.docs: $(SETTINGS) | $(DOCS_VENV)/.pip
	@echo "Installing $(DOCS) into $(DOCS_VENV) ..."
	@$(call PIP,$(DOCS_VENV)) $(DOCS)
	@touch $@

# Kept, although they are only steps on the way.
.PRECIOUS: %/bin/python %/.pip
