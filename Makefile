# `make demo` shows what KVCacheD does, `make test` checks all of it. Both set up what they need; nothing else has to be done first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ENGINES := .venv-engines
SOURCES := $(shell find native/src native/include native/CMakeLists.txt pyproject.toml -type f 2>/dev/null)

.PHONY: help setup engines sglang check test-core test-engines test-sglang test demo bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

setup: $(VENV)/.ready  ## the development environment: package, native library, checkers

$(VENV)/.ready: $(SOURCES)
	@scripts/setup_dev.sh $(PYTHON) $(VENV)
	@touch $@

engines: setup  ## the engine environment: torch (CPU), three versions of vLLM, small models
	@$(PYTHON) scripts/setup_engines.py

sglang: setup  ## the SGLang environment: torch (CPU), four versions of SGLang, small models
	@$(PYTHON) scripts/setup_sglang.py

check: setup  ## format, lint, types, import contracts
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

test-core: setup  ## unit, stateful, fault, contract and process tests, without an engine
	$(RUN) -m pytest tests/unit tests/stateful tests/faults tests/contract tests/process

test-engines: engines  ## the tests on real engines
	$(RUN) -m pytest tests/engines tests/e2e

test-sglang: sglang  ## the tests on real SGLang
	$(RUN) -m pytest tests/engines_sglang

test: check test-core test-engines  ## everything

demo: engines  ## two real engines with one small card: answers, a live table, a picture (ARGS=--help shows options)
	$(ENGINES)/bin/python -m examples.demo $(ARGS)

bench: setup  ## the benchmarks that need no GPU
	$(RUN) benchmarks/ledger.py
	$(RUN) benchmarks/pool.py

clean:  ## remove what the targets above made
	rm -rf build dist $(VENV) $(ENGINES) .venv-sglang .cache demo-output src/kvcached/vmm/libkvcached.so
