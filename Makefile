# make demo      the main job on built-in pictures and clips, on 2 CPU ranks
# make test      all tests but the slow ones
# make test-all  all tests
# make lint      style, types, architecture
# make docs      the documentation site, into site/; a broken link ends the build
# make format    rewrites the code in the project's format
# make clean     removes the environment, builds and caches
#
# Each target installs what it needs into .venv, at the exact versions of constraints.txt, and only once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint docs format clean

demo: $(VENV)/.demo-installed
	$(BIN)/knapformer demo

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/.dev-installed
	$(BIN)/python -m pytest

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# The builder prints advertising for its successor unless it is told not to.
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "knapformer needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone, at its pin, so that no later install brings another build of several gigabytes.
# hatchling, so that the installs below need no build environment of their own.
$(VENV)/.torch-installed: constraints.txt | $(BIN)/python
	$(INSTALL) torch numpy hatchling
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.torch-installed pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[demo]'
	@touch $@

# Without torch: the site is made from sources, not from imported modules.
$(VENV)/.docs-installed: constraints.txt pyproject.toml | $(BIN)/python
	$(INSTALL) hatchling
	$(INSTALL) --no-build-isolation -e '.[docs]'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.torch-installed pyproject.toml
	$(INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
