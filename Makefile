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
VERSIONS := 3.11 3.12 3.13

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
	$(call new_environment,$(VENV),$(PYTHON))
	$(call install,$(VENV)) --editable '.[examples]'
	touch $@

$(VENV)/.for-development: pyproject.toml constraints.txt
	$(call new_environment,$(VENV),$(PYTHON))
	$(call install,$(VENV)) --editable . --group dev --constraint constraints.txt
	touch $(VENV)/.for-demo $@

.PHONY: demo
demo: $(VENV)/.for-demo  ## train a ResNet on scanned digits in memory that the batch does not fit
	$(BIN)/autoaccum fit examples/digits.py

$(VENV)/.for-bench: $(VENV)/.for-development
	$(call install,$(VENV)) --editable '.[bench]'
	touch $@

# With a version of transformers in which others measured, since its models keep other tensors than today's.
$(VENV)-published-%/.made: pyproject.toml
	$(call new_environment,$(VENV)-published-$*,$(PYTHON))
	$(call install,$(VENV)-published-$*) --editable '.[bench]' $(OF_THE_TIME) 'transformers==$*'
	$(if $(BUILT_HERE),$(call install,$(VENV)-published-$*) --no-build-isolation $(BUILT_HERE))
	$(if $(ALONE),$(call install,$(VENV)-published-$*) --no-deps $(ALONE))
	touch $@

$(VENV)-published-4.45.0/.made: OF_THE_TIME := 'peft==0.12.0'
$(VENV)-published-4.48.1/.made: OF_THE_TIME := 'peft==0.13.2' \
	'mmsegmentation==1.2.2' 'mmcv-lite==2.1.0' 'mmpretrain==1.2.0' ftfy regex
# mmcv is built with the setuptools of its time, and litgpt asks for a Lightning that is none of the releases.
$(VENV)-published-4.51.3/.made: OF_THE_TIME := 'setuptools<81' wheel
$(VENV)-published-4.51.3/.made: BUILT_HERE := 'mmcv==1.7.0' 'mmaction2==0.24.1'
$(VENV)-published-4.51.3/.made: ALONE := 'litgpt==0.2.0'
$(VENV)-published-5.13.1/.made: OF_THE_TIME := 'peft==0.20.0'

TEST_OPTIONS ?=
# As many workers as there are cores, but four at the most. tests/sharing_out.py says which files each gets.
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

# Ray and ultralytics are large, and only these tests need them; without them, test-slow skips them.
$(VENV)/.for-ray $(VENV)/.for-ultralytics: $(VENV)/.for-%: $(VENV)/.for-development
	$(call install,$(VENV)) --group $*
	touch $@

.PHONY: test-ray
test-ray: $(VENV)/.for-ray  ## run the slow tests of Ray Train, with workers that are killed (some 4 minutes)
	$(BIN)/python -m pytest tests/across/test_ranks_ray.py $(TEST_OPTIONS)

.PHONY: test-ultralytics
test-ultralytics: $(VENV)/.for-ultralytics  ## run the slow test of ultralytics' command, started again with smaller batches
	$(BIN)/python -m pytest tests/launch/test_run_ultralytics.py $(TEST_OPTIONS)

TIMM_TRAIN ?= train.py
.PHONY: test-timm
test-timm: $(VENV)/.for-development  ## run the slow test of timm's train.py, which TIMM_TRAIN=PATH names
	TIMM_TRAIN=$(abspath $(TIMM_TRAIN)) $(BIN)/python -m pytest tests/launch/test_run_timm.py $(TEST_OPTIONS)

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

.PHONY: docs-pictures
docs-pictures: $(VENV)/.for-development  ## run the tutorial, and draw what the documentation shows (some 2 minutes)
	$(BIN)/python scripts/docs_pictures

# Committed to the branch gh-pages of this checkout; publishing it is `git push origin gh-pages`, by a person.
.PHONY: docs-version
docs-version: $(VENV)/.for-development  ## put the documentation of this version onto the local branch gh-pages
	PATH="$(abspath $(BIN)):$$PATH" mike deploy --update-aliases \
		"$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')" latest
	PATH="$(abspath $(BIN)):$$PATH" mike set-default latest

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

.PHONY: test-all
test-all: $(addprefix test-on-,$(VERSIONS))  ## run every test, sweeps included, on each Python that is here

# Sets `found` to the path of a Python of this version, or to nothing.
find_python = found="$$(command -v python$(1) || true)"; \
	"$${found:-false}" --version >/dev/null 2>&1 || found="$$(ls -d "$$(pyenv root 2>/dev/null || echo ~/.pyenv)"/versions/$(1).*/bin/python 2>/dev/null | tail -1 || true)"

test-on-%:
	@$(call find_python,$*); \
	if [ -z "$$found" ]; then echo "Python $* is not on this machine: not tested"; exit 0; fi; \
	echo "Python $*: $$found"; \
	$(call new_environment,.venv-$*,$$found); \
	$(call install,.venv-$*) --editable . --group dev --constraint constraints.txt; \
	.venv-$*/bin/python -m pytest $(WORKERS)

.PHONY: test-newest
test-newest:  ## run the quick tests with the newest release of every package
	$(call new_environment,.venv-newest,$(PYTHON))
	$(call install,.venv-newest) --upgrade --editable . --group dev
	.venv-newest/bin/python -m pytest $(WORKERS) $(QUICK) $(TEST_OPTIONS)

# The oldest PyTorch that pyproject.toml allows, with the torchvision that was made for it.
OLDEST_TORCH := 'torch==2.8.0' 'torchvision==0.23.0'

.PHONY: test-oldest-torch
test-oldest-torch:  ## run the quick tests with the oldest PyTorch that is supported
	$(call new_environment,.venv-oldest-torch,$(PYTHON))
	$(call install,.venv-oldest-torch) --editable . --group dev $(OLDEST_TORCH)
	.venv-oldest-torch/bin/python -m pytest $(WORKERS) $(QUICK) $(TEST_OPTIONS)

# The oldest frameworks that pyproject.toml allows.
OLDEST_FRAMEWORKS := 'transformers==4.57.6' 'accelerate==1.10.1' 'lightning==2.4.0' 'trl==0.24.0' 'peft==0.17.1'

.PHONY: test-adapters-oldest
test-adapters-oldest:  ## run the quick tests of the adapters with the oldest frameworks that are supported
	$(call new_environment,.venv-oldest-adapters,$(PYTHON))
	$(call install,.venv-oldest-adapters) --editable . --group dev $(OLDEST_FRAMEWORKS)
	.venv-oldest-adapters/bin/python -m pytest $(WORKERS) $(QUICK) tests/integrations $(TEST_OPTIONS)

.PHONY: overhead
overhead: $(VENV)/.for-development  ## measure what the runner costs beside a loop written by hand
	$(BIN)/python benchmarks/overhead.py

.PHONY: tokens
tokens: $(VENV)/.for-development  ## measure what lists of samples save on texts of unlike length
	$(BIN)/python benchmarks/tokens.py

.PHONY: chunked-loss
chunked-loss: $(VENV)/.for-development  ## measure what a loss in chunks costs, by the tokens of a chunk
	$(BIN)/python benchmarks/chunked_loss.py

.PHONY: rungs
rungs: $(VENV)/.for-bench  ## measure what each way to save memory gives and takes under a limit (some 20 minutes)
	$(BIN)/python benchmarks/rungs.py --turns 9 --out benchmarks/results/rungs.json

.PHONY: noise-scale
noise-scale: $(VENV)/.for-development  ## measure what measuring the gradient noise scale costs
	$(BIN)/python benchmarks/noise_scale.py

.PHONY: adapters
adapters: $(VENV)/.for-bench  ## measure what adapters cost beside their frameworks' own accumulation (some 2 minutes)
	$(BIN)/python benchmarks/adapters.py

.PHONY: host-limit
host-limit: $(VENV)/.for-development  ## measure what a process goes through that keeps running out of memory
	$(BIN)/python benchmarks/host_limit.py

.PHONY: bench
bench: $(VENV)/.for-bench  ## measure autoaccum beside its peers (some half an hour)
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/estimates.py --out benchmarks/results/estimates-$$(nproc)-cores.json

.PHONY: estimates
estimates: $(VENV)/.for-bench  ## measure predicted memory against the real, and how fast it is said (some 10 minutes)
	$(BIN)/python benchmarks/estimates.py --out benchmarks/results/estimates-$$(nproc)-cores.json
	$(BIN)/python benchmarks/estimate_speed.py --out benchmarks/results/estimate_speed-$$(nproc)-cores.json

.PHONY: published
published: $(foreach version,4.45.0 4.48.1 4.51.3 5.13.1,$(VENV)-published-$(version)/.made)  ## predict what others measured on real cards
	$(VENV)-published-4.51.3/bin/python benchmarks/published.py --out benchmarks/results/published.json
	$(VENV)-published-4.45.0/bin/python benchmarks/allocated.py --sources text --out benchmarks/results/allocated.json
	$(VENV)-published-4.48.1/bin/python benchmarks/allocated.py --sources images text --out benchmarks/results/allocated.json
	$(VENV)-published-4.51.3/bin/python benchmarks/allocated.py --sources videos litgpt --out benchmarks/results/allocated.json
	$(VENV)-published-5.13.1/bin/python benchmarks/allocated.py --sources adapters bert --out benchmarks/results/allocated.json

# timm has the backbones of some of transformers' models.
$(VENV)/.for-architectures: $(VENV)/.for-development
	$(call install,$(VENV)) timm
	touch $@

.PHONY: architectures
architectures: $(VENV)/.for-architectures  ## predict every architecture of transformers and torchvision for a card (some half an hour; goes on where it was)
	$(BIN)/python benchmarks/architectures.py --out benchmarks/results/architectures.json --page docs/predicted-models.md

.PHONY: scaling
scaling: $(VENV)/.for-development  ## measure what several ranks cost (some 3 minutes)
	$(BIN)/python benchmarks/scaling.py

.PHONY: faults
faults: $(VENV)/.for-development  ## let every operator of a step fail in turn, and compare (one to two hours; scripts/faults.py --sample 18: some 15 minutes)
	$(BIN)/python scripts/faults.py

.PHONY: attack
attack: $(VENV)/.for-development  ## kill, damage, starve and misuse a training, and count what was lost (some 14 minutes)
	$(BIN)/python scripts/attack.py --page docs/attacks.md

.PHONY: gpu
gpu: $(VENV)/.for-development  ## run what only a GPU can show (some 8 minutes; needs a GPU)
	$(BIN)/python benchmarks/gpu.py --out build/gpu

$(VENV)-gpu-machine/.made: scripts/gpu_machine.txt
	$(call find_python,3.12); \
	$(call new_environment,$(VENV)-gpu-machine,$${found:?there is no Python 3.12})
	$(call install,$(VENV)-gpu-machine) --requirement $< --constraint constraints.txt
	for name in autoaccum platformdirs torchao liger_kernel; do \
		! $(VENV)-gpu-machine/bin/python -c "import $$name" 2>/dev/null || { echo "a GPU machine has no $$name" >&2; exit 1; }; \
	done
	touch $@

.PHONY: gpu-rehearsal
gpu-rehearsal: $(VENV)-gpu-machine/.made  ## run what a GPU machine would run, with small sizes and without a GPU
	scripts/gpu_rehearsal.sh $(VENV)-gpu-machine
