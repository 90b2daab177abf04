# Everything here works in a fresh clone with Python 3.11 or newer, git and make, and is cheap to repeat.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DECLARED := $(wildcard core/pyproject.toml plugins/*/pyproject.toml) requirements-build.txt requirements-dev.txt constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The first interpreter that is new enough and can make an environment. `make setup PYTHON=...` chooses another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { command -v "$$python"; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format docs bench clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10

setup: $(STAMP)  ## make .venv: the core, the backends that run on a CPU, the tools for tests

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with the venv module was found. Install one, or: make setup PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(STAMP): $(DECLARED) | $(BIN)/python
	@echo "Installing into $(VENV): about a minute the first time."
	$(BIN)/python -m pip install --quiet -r requirements-build.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -r requirements-dev.txt
	@touch $(STAMP)

train: $(STAMP)  ## the main job: handwritten digits on 2 processes; ends with its accuracy, checkpoint and picture
	$(BIN)/drivetrain launch --config examples/ddp.yaml examples/digits.py

test: $(STAMP)  ## the whole suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: $(STAMP)  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## what ruff can repair by itself
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## renew what the documents say about the code
	$(BIN)/python docs/generate.py

bench: $(STAMP)  ## side by side with the bare engine and with peers: medians, ratios, spread
	$(BIN)/python benchmarks/run.py

clean:  ## drop .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
