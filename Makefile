# `make demo` and `make test` set up everything they need; a second run installs nothing.
# Wanted on the machine: Python 3.11 or newer, pip, make. PYTHON=... picks an interpreter, ARGS=... goes to the command.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := xformers,train,report,docs,dev
JOBS := 2
RUN_NOTEBOOKS := 1
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal --durations 15 --durations-min 2
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then command -v $$name; break; fi; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test exhaustive users engines newest vllm check sanitize aarch64 format bench site wheels release clean

help: ## Say what can be made
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null \
	|| sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1: \2/p' Makefile

# Tests keep memory that was freed, since asking the kernel for it again takes a tenth of the time (glibc),
# and compiled Python files, since many tests start a process.
test exhaustive users: export MALLOC_TRIM_THRESHOLD_ := 1073741824
test exhaustive users: export MALLOC_MMAP_THRESHOLD_ := 33554432
test exhaustive users: export MALLOC_TOP_PAD_ := 67108864
test exhaustive users: export PYTHONDONTWRITEBYTECODE :=

setup: $(READY) ## Make the virtual environment; every other target does it when it must

demo: $(READY) ## Swap, measure and report on the embedded model: attnzoo-demo/report.html
	$(BIN)/attnzoo demo $(ARGS)

test: $(READY) ## Run the tests; those with other libraries and in fresh processes are in `make users`
	$(PYTEST) --ignore tests/users $(ARGS)

exhaustive: $(READY) ## Run the tests that repeat a rule on more cases
	$(PYTEST) -m exhaustive $(ARGS)

users: $(READY) ## Run attnzoo with Accelerate, PEFT, TRL, sentence-transformers and lm_eval, in threads and fresh processes
	$(PYTEST) tests/users $(ARGS)

engines: $(READY) ## Load swapped and converted models with llama.cpp and CTranslate2, in a folder of packages of their own
	$(BIN)/nox --session engines

newest: $(READY) ## Run the tests of all that knows transformers with the newest releases of today, torch included
	$(BIN)/nox --session newest

vllm: $(READY) ## Run the tests of integrations/vllm under the engine, in an environment of its own
	$(BIN)/nox --session vllm

check: $(READY) ## Lint, check the format and the types, compile the Triton kernels for sm_90
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy attnzoo tools
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		$(BIN)/python -m tools.compile_triton --arch 90; fi

sanitize: $(READY) ## Check the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python -m tools.sanitize

aarch64: $(READY) ## Check the C++ kernels as compiled for 64-bit ARM, under QEMU
	$(BIN)/python -m tools.aarch64

format: $(READY) ## Format, and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## Time the operations; JSON lines
	$(BIN)/python benchmarks/ops.py $(ARGS)

site: $(READY) ## Build the site: the pages of docs/, the reference, the notebooks; a broken link is an error
	NO_MKDOCS_2_WARNING=1 RUN_NOTEBOOKS=$(RUN_NOTEBOOKS) $(BIN)/python -m mkdocs build --strict

wheels: $(READY) ## Build wheels that carry compiled kernels, and try one without a compiler
	$(BIN)/nox --session wheels

release: $(READY) ## Build sdist and wheels, check and try them in a bare environment; uploads nothing
	$(BIN)/nox --session release

clean: ## Remove what was built and cached, the virtual environment included
	rm -rf $(VENV) .nox build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache attnzoo-demo
	find attnzoo tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, at its pinned version: what depends on it must not choose another.
# triton: a CUDA build of torch has brought its own; elsewhere on Linux the version that is tested is added.
$(READY): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11 or newer is needed and none was found; name one: make PYTHON=/path/to/python3.11"; exit 1; fi
	@echo "Setting up $(VENV), once; this takes a few minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); } \
	|| { rm -rf $(VENV); "$(PYTHON)" -m venv --without-pip $(VENV) \
		&& "$(PYTHON)" -m pip --python $(BIN)/python install pip; }
	$(PIP) install --quiet --constraint constraints.txt torch setuptools
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)' \
		|| $(PIP) install --quiet triton==3.6.0; fi
	@touch $@
