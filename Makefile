# `make demo`, `make test`, `make check`, `make lint` and `make floor-test` each do all set-up on their own, once.

COMMA := ,
PYTHON ?= python3
VENV ?= .venv
FLOOR ?= .venv-floor
# Test processes; each runs torch on one thread.
WORKERS ?= 2
# More arguments for pytest, such as PYTEST_ARGS="-k rollback".
PYTEST_ARGS ?=
# More arguments for the installation of torch alone, such as an index of CPU builds.
TORCH_ARGS ?=

PYTEST = OMP_NUM_THREADS=1 $(1)/bin/pytest -n $(WORKERS) --dist=worksteal $(PYTEST_ARGS)

.PHONY: help demo test check lint imports floor-test clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo        code continued with and without drafting by the models that ship with the package, on the CPU'
	@echo 'make test        all tests'
	@echo 'make check       lint and the fast tests'
	@echo 'make lint        ruff, mypy, import-linter'
	@echo 'make floor-test  contract and lossless tests on the oldest supported transformers'
	@echo 'make clean       remove environments, caches and build outputs'

demo: $(VENV)/.installed
	$(VENV)/bin/python -P -m ready_hf.demo

# This environment has the extra `gpu`, so the test of a machine with kernel packages and no GPU must not be skipped.
test: $(VENV)/.installed
	READY_HF_REQUIRE_GPU_EXTRA=1 $(call PYTEST,$(VENV))

check: lint
	$(call PYTEST,$(VENV)) -m 'not slow and not gpu'

lint: imports
	$(VENV)/bin/ruff check --output-format=concise .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# import-linter wants the package in one folder, as in the wheel, with kernels/torch-ext/ready_kernels inside.
imports: $(VENV)/.installed
	@rm -rf build/imports && mkdir -p build/imports
	@cp -R src/ready_hf build/imports/ready_hf && cp -R kernels/torch-ext/ready_kernels build/imports/ready_hf/kernels
	PYTHONPATH=build/imports $(VENV)/bin/lint-imports --no-logo --no-cache

floor-test: $(FLOOR)/.installed
	$(call PYTEST,$(FLOOR)) -m 'contract or lossless'

clean:
	rm -rf $(VENV) $(FLOOR) build dist ready_hf.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src kernels tests examples -name __pycache__ -prune -exec rm -rf {} +

# torch is installed first, on its own: a dependency on "torch" alone may fetch a build with gigabytes of CUDA libraries.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "ready_hf needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
	    "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -qq -c $(1) $(TORCH_ARGS) torch
	$(@D)/bin/pip install -qq -c $(1) -e '.[$(2)]'
	@touch $@
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,constraints.txt,dev$(COMMA)gpu)

$(FLOOR)/.installed: pyproject.toml constraints-floor.txt
	$(call install,constraints-floor.txt,test)
