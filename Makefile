# Everything here works in a fresh clone with Python 3.11 or newer, git and make, and is cheap to repeat.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FIRST := $(VENV)/.example
EXAMPLE := -c locks/dev.txt --editable ./core --editable ./plugins/ddp scikit-learn matplotlib
XLA_VENV := .venv-xla
XLA_PYTHON := $(XLA_VENV)/bin/python
DECLARED := $(wildcard core/pyproject.toml kit/pyproject.toml plugins/*/pyproject.toml) requirements-build.txt requirements-dev.txt locks/dev.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# uv brings certificates of its own, which lack that of a company's proxy; pip asks the system for them, and so shall uv.
export UV_SYSTEM_CERTS := 1
# Containers often set this, and then each process of thousands compiles what it imports, uv's packages too, which come
# as sources. Empty is unset.
export PYTHONDONTWRITEBYTECODE :=

# The first interpreter that is new enough and can make an environment. `make setup PYTHON=...` chooses another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { command -v "$$python"; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-repeat test-xla test-newest test-oldest test-accelerate lint format lock docs site dist reports parity optimizers trainer-table pictures bench bench-xla clean force

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup: $(STAMP)  ## make .venv: the core, the backends that run on a CPU, the tools for tests

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with the venv module was found. Install one, or: make setup PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# uv takes a third of pip's time. It reads none of pip's settings: pip finds a build of torch that the machine offers, and
# takes over where an index is set for pip alone.
$(STAMP): $(DECLARED) | $(BIN)/python
	@echo "Installing into $(VENV): about a minute the first time."
	$(BIN)/python -m pip install --quiet -r requirements-build.txt
	@echo "1 of 2: torch, by far the largest"
	$(BIN)/python -m pip install --quiet -c locks/dev.txt uv 'torch==2.13.*'
	@echo "2 of 2: the distributions, what they need, and the tools of the tests"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation -r requirements-dev.txt \
		|| $(BIN)/python -m pip install --quiet --no-build-isolation -r requirements-dev.txt
	@touch $(STAMP)
	@echo "Installed: $(CURDIR)/$(VENV)"

# What the example needs, where the whole environment is not there: a fifth of its packages. `make setup` adds the rest.
$(FIRST): core/pyproject.toml plugins/ddp/pyproject.toml requirements-build.txt | $(BIN)/python
	@echo "Installing what the example needs into $(VENV)."
	$(BIN)/python -m pip install --quiet -r requirements-build.txt
	@echo "1 of 2: torch, by far the largest"
	$(BIN)/python -m pip install --quiet -c locks/dev.txt uv 'torch==2.13.*'
	@echo "2 of 2: the core, ddp, scikit-learn and matplotlib"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation $(EXAMPLE) \
		|| $(BIN)/python -m pip install --quiet --no-build-isolation $(EXAMPLE)
	@touch $(FIRST)

train: $(if $(wildcard $(STAMP)),$(STAMP),$(FIRST))  ## the main job: handwritten digits on 2 processes; ends with its accuracy, checkpoint and picture
	$(BIN)/drivetrain launch --config examples/ddp.yaml examples/digits.py

# Ranks wait for each other much of the time, so there is a worker more than cores. Two more took 1,441 processor seconds
# beside other work on two cores, where one had taken 1,050. Each takes whole files, since what a
# file's fixtures prepare is prepared once. A part, in one process: .venv/bin/python -m pytest core/tests/data
WORKERS := $(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) + 1 )); echo $$(( n < 8 ? n : 8 )))
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -o console_output_style=classic -p suite_progress -p suite_second_run \
	--numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(STAMP)  ## what a change usually breaks; ARGS="-x plugins/fsdp" are pytest's
	$(PYTEST) -m "not slow" $(ARGS)

# What an engine's layouts show alike runs in one of them, and of large grids a part (the marker `turns`). Of what is named
# to pytest itself all runs: .venv/bin/python -m pytest plugins/fsdp. `make reports` runs all conformance cases.
test-all: $(STAMP)  ## the whole suite; on two cores most of an hour
	$(PYTEST) --by-turns $(ARGS)

test-repeat: $(STAMP)  ## run tests N=20 times while all cores are busy: ARGS="core/tests/launch -k hangups"
	OMP_NUM_THREADS=1 $(BIN)/python tests/repeat.py $(or $(N),20) $(ARGS)

# torch_xla is linked to a torch of its own number, hence an environment of its own; what is large in it is in the cache.
test-xla: $(XLA_PYTHON)  ## the tests of the TPU backend, by real torch_xla on the CPU; installs a gigabyte once a machine
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 $(XLA_PYTHON) -m pytest -q --numprocesses 2 --dist loadfile plugins/xla/tests $(ARGS)

$(XLA_PYTHON): force
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 with the venv module was found: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" plugins/xla/environment/make.py $(XLA_VENV)

force:

# Each in an environment of its own, which is made anew when what the distributions ask for has changed.
test-newest: force  ## the quick tests against the newest releases of other libraries; ARGS=--record renews their table
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with the venv module was found: make $@ PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" tests/releases/run.py newest $(ARGS)

test-oldest: force  ## the quick tests against the oldest releases that the distributions admit; ARGS as above
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with the venv module was found: make $@ PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" tests/releases/run.py oldest $(ARGS)

# What it waives, and why, stands in tests/accelerate/waivers.py; the scripts are those of the installed Accelerate.
test-accelerate: $(STAMP)  ## Accelerate's own test scripts with Drivetrain in its place; prints what passes and what is waived
	OMP_NUM_THREADS=1 $(BIN)/python tests/accelerate/suite.py $(ARGS)

lint: $(STAMP)  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## what ruff can repair by itself
	$(BIN)/ruff check --fix .

# A lock holds every version of every package, for each supported Python, as constraints of pip. Versions alone: the CPU
# build of torch that a machine offers and the accelerator build of the same release both satisfy them, hashes would not;
# and a constraint installs nothing, so the CPU build brings none of the accelerator libraries that are listed.
UV_COMPILE = $(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-annotate \
	--custom-compile-command "make lock" $(patsubst %,--no-emit-package %,$(OURS))
OURS := $(shell sed -n 's/^name = "\(drivetrain[a-z-]*\)"$$/\1/p' core/pyproject.toml kit/pyproject.toml plugins/*/pyproject.toml)
lock: | $(BIN)/python  ## renew the lock files to the newest releases; the suite must pass before they are committed
	$(BIN)/python -m pip install --quiet -r requirements-build.txt uv
	@sed '/^-c /d' requirements-build.txt requirements-dev.txt requirements-bench.txt requirements-optimizers.txt | $(UV_COMPILE) --output-file locks/dev.txt -
	@cat plugins/xla/environment/torch.txt plugins/xla/environment/requirements.txt | $(UV_COMPILE) --output-file locks/xla.txt -

docs: $(STAMP)  ## renew what the documents say about the code
	$(BIN)/python docs/generate.py

site: $(STAMP)  ## the documents as a site, in runs/site/index.html
	@echo "Writing the site: a minute or two the first time, seconds when a page has changed."
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html -d runs/site/.doctrees docs runs/site
	@echo "The site: $(CURDIR)/runs/site/index.html"

dist: $(STAMP)  ## wheels and sdists of all distributions, checked, in runs/dist
	$(BIN)/python tests/packaging/dist.py

# A report belongs to the cases and capabilities that it was made with; tests/house says when it is too old.
BACKENDS := single dp ddp fsdp deepspeed megatron xla
reports: $(STAMP) $(if $(filter xla,$(BACKENDS)),$(XLA_PYTHON))  ## run the conformance kit, half an hour, and renew its tables; BACKENDS=fsdp does one
	@export OMP_NUM_THREADS=1; for name in $(BACKENDS); do \
		python=$(BIN)/python; tests=$$(ls kit/tests/test_*conformance_$$name.py plugins/$$name/tests/test_*conformance*.py 2>/dev/null); \
		if [ $$name = xla ]; then python=$(XLA_PYTHON); export PJRT_DEVICE=CPU; fi; \
		$$python -m pytest -q --report docs/reports/$$name.json $$tests || exit 1; \
	done
	$(BIN)/python docs/generate.py

parity: $(STAMP)  ## run every script of tests/parity under every backend, and renew their table
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity/run_scripts.py --record
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity/run_scripts.py --layouts --record
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity/run_scripts.py --advised --record
	$(BIN)/python docs/generate.py

optimizers: $(STAMP)  ## every optimizer under every backend, others' packages included; renew their table
	$(BIN)/pip install -q -r requirements-optimizers.txt
	OMP_NUM_THREADS=1 $(BIN)/python tests/parity/run_scripts.py --optimizers --record
	$(BIN)/python docs/generate.py

trainer-table: $(STAMP)  ## Trainer under every backend beside stock Trainer on one process; renew the table of its page
	OMP_NUM_THREADS=1 $(BIN)/python plugins/transformers/tests/trainer_table.py
	$(BIN)/python docs/generate.py

pictures: $(STAMP)  ## run the examples as the tutorial does, and renew its pictures and numbers
	$(BIN)/python docs/tutorial/measure.py
	$(BIN)/python docs/generate.py

bench: $(STAMP)  ## side by side with the bare engine and with peers: medians, ratios, spread
	$(BIN)/python benchmarks/run.py

bench-xla: $(XLA_PYTHON)  ## a step against the bare torch_xla loop, with the number of graphs compiled
	PJRT_DEVICE=CPU OMP_NUM_THREADS=1 $(XLA_PYTHON) -m benchmarks.xla

clean:  ## drop .venv and caches; runs/ stays
	rm -rf $(VENV) $(XLA_VENV) .venv-newest .venv-oldest .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
