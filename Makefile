# `make demo` and `make test` install what they need into .venv, once.
#
#   make demo PYTHON=python3.12     another interpreter (3.11 or newer)
#   make test ARGS='-k keeper'      arguments for pytest; `make bench` takes them too
#   make test JOBS=0                one test after the other, in one process
#   make test TORCH=torch==2.14.1   compare with another version of PyTorch, 2.13.0 or newer
#
# Each set-up step leaves a stamp in the virtual environment and is repeated only when
# pyproject.toml (or this file) changes. Plain pip of any age is enough.

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
ARGS ?=
JOBS ?= 4
SEED ?= 1
MINUTES ?= 10
SECONDS ?= 60

# Tests and benchmarks compare with this version. Keep the exact pin: if pip has an index of CPU-only
# builds, the pin selects 2.13.0+cpu. A range would fetch gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0

# `make test-newest` compares with this version, in an environment of its own. There may be no build of it for
# CPUs only; the one for CUDA takes 5.4 GB.
NEWEST ?= torch==2.15.0
NEWEST_VENV ?= .venv-newest

# Builds the documentation. When this was pinned, release 0.0.74 required a package (zensical-ui)
# that the package index did not have.
DOCS ?= zensical==0.0.73

BIN := $(VENV)/bin
PIP = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
SETTINGS := pyproject.toml Makefile
# mypy checks these folders one by one: it rejects two modules of one name, such as conftest.py.
TEST_FOLDERS := $(patsubst %/,%,$(sort $(filter-out tests/__pycache__/,$(wildcard tests/*/))))

# Writes a dependency group of pyproject.toml to a requirements file. Only pip 25.1 and newer read
# groups, and the pip of a new virtual environment may be older.
GROUP = $(1)/bin/python -c 'import sys, tomllib; \
	groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
	print(*groups[sys.argv[1]], sep="\n")' $(2) > $(1)/$(2).txt

.DELETE_ON_ERROR:
.PHONY: help demo test test-newest test-jax lint types format bench chaos simulate docs clean distclean
.DEFAULT_GOAL := help

help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.holdfast ## Run a job that loses a worker and a node, gains one, and finishes (about 10 seconds)
	@$(BIN)/python examples/demo.py

test: $(VENV)/.holdfast $(VENV)/.test $(VENV)/.torch ## Run all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-jax: $(VENV)/.holdfast $(VENV)/.test ## Run the tests that need JAX; installs 500 MB into $(VENV)-jax
	@test -x $(VENV)-jax/bin/python || $(PYTHON) -m venv $(VENV)-jax
	@$(call PIP,$(VENV)-jax) jax==0.10.2 --editable . --requirement $(VENV)/test.txt
	$(VENV)-jax/bin/python -m pytest -n 0 tests/peers/test_jax.py $(ARGS)

test-newest: ## Run the tests that use PyTorch with the newest version of it that we support
	@$(MAKE) --no-print-directory test VENV=$(NEWEST_VENV) TORCH='$(NEWEST)' ARGS='-m torch $(ARGS)'

lint: $(VENV)/.holdfast $(VENV)/.test $(VENV)/.lint ## Check style, types and the layering of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types
	$(BIN)/lint-imports

types: $(VENV)/.holdfast $(VENV)/.test $(VENV)/.lint ## Check types only
	$(BIN)/mypy src simulator benchmarks chaos examples $(wildcard tests/*.py)
	set -e; for folder in $(TEST_FOLDERS); do $(BIN)/mypy $$folder; done

format: $(VENV)/.lint ## Format the source and fix what ruff can fix
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
	@! grep -rE '<(script|link|img|iframe)[^>]*(src|href)="?https?:' site --include='*.html' || { echo "The site must load nothing from other hosts" >&2; exit 1; }

clean: ## Remove caches and build results
	rm -rf site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache
	find benchmarks chaos examples simulator src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environments as well
	rm -rf $(VENV) $(VENV)-jax $(DOCS_VENV) $(NEWEST_VENV)

# Set-up.

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
	@echo "Installing the dependency group '$*' into $(VENV) ..."
	@$(call GROUP,$(VENV),$*)
	@$(call PIP,$(VENV)) --requirement $(VENV)/$*.txt
	@touch $@

# Changes only when TORCH does.
$(VENV)/.torch-version: FORCE | $(VENV)/.pip
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.torch: $(SETTINGS) $(VENV)/.torch-version | $(VENV)/.pip
	@echo "Installing $(TORCH) into $(VENV) ..."
	@$(call PIP,$(VENV)) $(TORCH) numpy
	@$(call GROUP,$(VENV),peers)
	@$(call PIP,$(VENV)) --no-deps --requirement $(VENV)/peers.txt
	@touch $@

$(DOCS_VENV)/.docs: $(SETTINGS) | $(DOCS_VENV)/.pip
	@echo "Installing $(DOCS) into $(DOCS_VENV) ..."
	@$(call PIP,$(DOCS_VENV)) $(DOCS)
	@touch $@

.PHONY: FORCE
FORCE:

# Without this, make deletes these intermediate files.
.PRECIOUS: %/bin/python %/.pip
