# `make demo` shows what KVCacheD does, `make test` checks all of it. Both set up what they need; nothing else has to be done first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ENGINES := .venv-engines .venv-sglang
# What the demo is asked for decides what it needs.
DEMO_NEEDS := $(if $(filter sglang --engine=sglang,$(ARGS)),sglang-demo,$(if $(filter both --engine=both,$(ARGS)),engines-demo sglang-demo,engines-demo))
ENGINE_TESTS := tests/engines tests/engines_sglang tests/e2e -n 2 --dist loadgroup --no-loadscope-reorder
SOURCES := $(shell find native/src native/include native/CMakeLists.txt pyproject.toml scripts/setup_dev.sh -type f 2>/dev/null)

.PHONY: help setup engines engines-demo sglang sglang-demo environments check test-core test-engines test-sglang test test-full demo bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

setup: $(VENV)/.ready  ## the development environment: package, native library, checkers

$(VENV)/.ready: $(SOURCES)
	@scripts/setup_dev.sh $(PYTHON) $(VENV)
	@touch $@

engines: setup  ## the engine environment: torch (CPU), three versions of vLLM, small models
	@$(PYTHON) scripts/setup_engines.py

engines-demo: setup  ## what the demo needs of it: the newest vLLM and SmolLM2
	@$(PYTHON) scripts/setup_engines.py --only-demo

sglang: setup  ## the SGLang environment: torch (CPU), four versions of SGLang, small models
	@$(PYTHON) scripts/setup_sglang.py

sglang-demo: setup  ## what the demo needs of it: the newest SGLang and SmolLM2
	@$(PYTHON) scripts/setup_sglang.py --only-demo

environments: setup
	@$(PYTHON) scripts/setup_engines.py
	@$(PYTHON) scripts/setup_sglang.py

check: setup  ## format, lint, types, import contracts
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

test-core: setup  ## unit, stateful, fault, contract and process tests, without an engine
	$(RUN) -m pytest tests/unit tests/stateful tests/faults tests/contract tests/process

test-engines: environments  ## the tests on real engines: vLLM, SGLang, both on one card, the demo
	$(RUN) -m pytest $(ENGINE_TESTS)

test-sglang: sglang  ## those of them on SGLang alone
	$(RUN) -m pytest tests/engines_sglang tests/e2e/test_sglang_crowd.py -n 2 --dist loadgroup --no-loadscope-reorder

test: check  ## what CI runs: everything, but what only repeats on more releases or for longer
	@$(MAKE) --no-print-directory -j 2 test-core environments
	$(RUN) -m pytest $(ENGINE_TESTS)

test-full: check  ## everything
	@$(MAKE) --no-print-directory -j 2 test-core environments
	$(RUN) -m pytest $(ENGINE_TESTS) --full

demo: $(DEMO_NEEDS)  ## two real engines with one small card: answers, a live table, a picture (ARGS=--help shows options)
	$(RUN) -m examples.demo $(ARGS)

bench: setup  ## the benchmarks that need no GPU
	$(RUN) benchmarks/ledger.py
	$(RUN) benchmarks/pool.py

clean:  ## remove what the targets above made
	rm -rf build dist $(VENV) $(ENGINES) .cache demo-output src/kvcached/vmm/libkvcached.so
