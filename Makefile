# What a person and CI run. It needs make, and a python3 of 3.11 or later with venv; uv is used where it is there.
#
# `make demo` and `make test` make .venv on the way, anew whenever pyproject.toml is newer.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Asked by running it: a version manager can have a `uv` on the PATH that does not start.
ifeq ($(shell uv --version >/dev/null 2>&1 && echo yes),yes)
new_environment = test -x $(1)/bin/python || uv venv --quiet --python $(2) $(1)
install = uv pip install --python $(1)/bin/python
build_wheel = uv build --quiet --wheel --out-dir $(1)
else
# Dependency groups came with pip 25.1, and an environment begins with whatever its Python brought along. One that uv
# made has no pip at all.
new_environment = test -x $(1)/bin/pip || $(2) -m venv $(1); $(1)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
install = $(1)/bin/python -m pip install
build_wheel = $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(1) .
endif

.PHONY: help
help:  ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1\t\2/p' Makefile | expand -t 22

# An environment for development holds all that the demo needs, so the demo is content with either.
$(VENV)/.for-demo: pyproject.toml
	@echo "Once, for the demo: install PyTorch and what else it needs into $(VENV) (5 GB, unless they are cached)."
	$(call new_environment,$(VENV),$(PYTHON))
	$(call install,$(VENV)) --editable '.[examples]'
	touch $@

$(VENV)/.for-development: pyproject.toml constraints.txt
	$(call new_environment,$(VENV),$(PYTHON))
	$(call install,$(VENV)) --editable . --group dev --constraint constraints.txt
	touch $(VENV)/.for-demo $@

.PHONY: demo
demo: $(VENV)/.for-demo  ## train a ResNet on scanned digits in memory that the batch does not fit
	@$(BIN)/python examples/digits.py

TEST_OPTIONS ?=
# As many workers as there are cores, but four at the most. tests/support/processes/sharing_out.py says which files each gets.
WORKERS := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
QUICK := -m 'not slow and not sweep'

.PHONY: test
test: $(VENV)/.for-development  ## run every test but the slow ones and the sweeps
	$(BIN)/python -m pytest $(WORKERS) $(QUICK) $(TEST_OPTIONS)

.PHONY: test-slow
test-slow: $(VENV)/.for-development  ## run the slow tests, most of which wait for real processes
	$(BIN)/python -m pytest $(WORKERS) -m 'slow and not sweep' $(TEST_OPTIONS)

# Before a release, and after a change of what they go through.
.PHONY: test-sweeps
test-sweeps: $(VENV)/.for-development  ## run the sweeps: more faults, kills and combinations than the tests above sample
	$(BIN)/python -m pytest $(WORKERS) -m sweep $(TEST_OPTIONS)

.PHONY: test-all
test-all:  ## run every test but the sweeps, on each supported Python
	for version in 3.11 3.12 3.13; do scripts/test_with.sh python $$version; done

.PHONY: lint
lint: $(VENV)/.for-development  ## check style, format and which package imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

.PHONY: types
types: $(VENV)/.for-development  ## check types
	$(BIN)/mypy

.PHONY: docs
docs: $(VENV)/.for-development  ## build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

# Outside the checkout, so that nothing but what is in the wheel can be imported.
.PHONY: wheel-check
wheel-check: $(VENV)/.for-development  ## build the wheel and use it and its command in an empty environment
	rm -rf build/wheel build/empty
	$(call build_wheel,build/wheel)
	$(call new_environment,build/empty,$(BIN)/python)
	$(call install,build/empty) build/wheel/autoaccum-*.whl
	cd / && unset PYTHONPATH && $(CURDIR)/build/empty/bin/python -c \
		'import autoaccum; print("imported from", autoaccum.__file__); assert "site-packages" in autoaccum.__file__'
	cd / && unset PYTHONPATH && $(CURDIR)/build/empty/bin/autoaccum --version
	cd / && unset PYTHONPATH && $(CURDIR)/build/empty/bin/python -m autoaccum doctor --json >/dev/null

.PHONY: release-check
release-check: $(VENV)/.for-development  ## build the sdist and the wheel of a release, and use both (needs git and uv)
	$(BIN)/python scripts/release_check.py

.PHONY: gpu
gpu: $(VENV)/.for-development  ## run what only a GPU can show (some 8 minutes; needs a GPU)
	$(BIN)/python benchmarks/gpu.py --out build/gpu
