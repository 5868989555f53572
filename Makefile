# make demo    the whole path on this machine: checkpoints in, outputs against an fp64 oracle, a table of error and time
# make test    ruff, mypy and pytest against the installed wheel
# make lint    ruff and mypy only            make format  let ruff rewrite
# make dev     an editable install           make clean   remove everything that make built
#
# Each target sets up what it needs in VENV, and does so again only when the sources or the pinned versions have changed.
# PYTHON is the interpreter for a new VENV (3.10 to 3.13), WORKERS the number of test processes, PYTEST_ARGS further
# arguments of pytest, e.g. `make test PYTEST_ARGS="tests/quant -k mxfp4"`.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint format dev clean tools

PACKAGES := moe_layer comm gemm quant models benchmarks
LINTED := $(PACKAGES) tests
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# The stamp carries a hash of what it stands for: unlike modification times it sees deleted files and survives a checkout.
SOURCES := $(sort $(shell find $(PACKAGES) -type f \( -name '*.py' -o -name '*.json' -o -name py.typed \)))
HASH := $(firstword $(shell sha256sum $(SOURCES) pyproject.toml constraints.txt README.md LICENSE | sha256sum))
INSTALLED := $(VENV)/.moe-layer-$(HASH)

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else \
	    f"error: {sys.executable} is Python {v[0]}.{v[1]}; Python 3.10 to 3.13 is needed (make PYTHON=python3.12 ...)")'
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; echo "error: no venv (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }

# setuptools and wheel lie in the environment, so that our wheel needs no second, isolated one; a build folder left from
# before would put deleted modules into it. The second install replaces an older build of the same version.
$(INSTALLED): | $(VENV)/bin/python
	@rm -rf $(VENV)/.moe-layer-* build moe_layer.egg-info
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) wheel --no-deps --no-build-isolation -w build/wheel .
	@wheel=$$(echo build/wheel/*.whl); set -x; \
	$(PIP) install -c constraints.txt "$$wheel[test]"; \
	$(PIP) install --no-deps --force-reinstall "$$wheel"
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/moe-layer demo

# Spin (the protocol models) and a C compiler for what it generates; without them those tests are skipped and say why.
tools:
	@if ! { command -v spin && command -v gcc; } >/dev/null; then \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq spin gcc libc6-dev; } >/dev/null 2>&1 \
	            || echo "could not install spin: the protocol model checks will be skipped"; \
	    else \
	        echo "spin or gcc is missing: the protocol model checks will be skipped (Debian: apt-get install spin gcc)"; \
	    fi; \
	fi

# mypy runs outside the tree: inside it the folder moe_layer/ would hide the installed package.
lint: $(INSTALLED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	cd $(BIN) && ./mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p moe_layer

# The command `pytest`, not `python -m pytest`: that would put the tree before the installed package.
test: tools lint
	MOE_LAYER_TEST_WHEEL=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) $(PYTEST_ARGS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

dev: | $(VENV)/bin/python
	@rm -f $(VENV)/.moe-layer-*
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[test]'

clean:
	rm -rf .venv build dist moe_layer.egg-info .mypy_cache .pytest_cache .ruff_cache
	find $(PACKAGES) tests -type d -name __pycache__ -prune -exec rm -rf {} +
