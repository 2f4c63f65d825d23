# make train   makes .venv, installs, and trains a GPT under a memory budget, beside the same run without one
# make test    the whole CPU test suite
# Needs nothing but make and Python >= 3.11. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# What tests and tools run with. `make test-gpu RUN=python3` uses an interpreter that already has what they need.
RUN ?= $(VENV)/bin/python
# Processes that test the GPU at once; each takes a core, and 1 to 15 GiB of the GPU's memory.
GPU_WORKERS ?= 14
# Processes that run the other tests: one more than there are cores, since many tests wait for processes and files.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
TRAIN ?= train --compare --ram 120MiB --disk torchstorm-runs/spill

# Processes that share the cores: none starts threads, or compilers of its own beside its work. And each keeps the bytecode
# that it compiles, whatever the environment says: else every one of some hundred compiles this package anew.
SHARING := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONDONTWRITEBYTECODE=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# The variables hold what a build in isolation installs to the same versions, too.
INSTALL := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
	$(PIP) install --quiet --constraint constraints.txt

ifeq ($(RUN),$(VENV)/bin/python)
NEEDS_TEST := $(VENV)/.test
else
NEEDS_TEST :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test coverage fuzz mutations test-gpu test-families test-nvme xnvme lint format docs tables wheel clean

help:
	@echo "make train      install, then train a GPT under a memory budget, beside the same run without one"
	@echo "make test       the whole CPU test suite"
	@echo "make coverage   the same, and fails if the tests run less than 95 % of the lines; takes a third longer"
	@echo "make fuzz       the tests with examples drawn at random, which are others each time; fails with what repeats it"
	@echo "make mutations  whether the tests catch forty faults, put in one at a time"
	@echo "make test-gpu   the tests that need a GPU; fails if any of them skips"
	@echo "make test-families  compiled models of 18 families of transformers, with a record; takes half an hour."
	@echo "                With FAMILIES=\"GPT-2 or ViT\" these alone, without a record"
	@echo "make xnvme      the xNVMe library into .xnvme/, from its source release (XNVME_SOURCE=/path/to/it)"
	@echo "make test-nvme  storage on an emulated NVMe device in QEMU; fails if any test skips"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff put the files in shape"
	@echo "make docs       docs/reference.md from the docstrings"
	@echo "make tables     the figures of README and docs from benchmarks/results/"
	@echo "make wheel      a wheel in dist/"
	@echo "make clean      remove what these made"

train: $(VENV)/.package
	$(VENV)/bin/torchstorm $(TRAIN)

test: $(NEEDS_TEST)
	$(SHARING) $(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal

coverage: $(NEEDS_TEST)
	$(SHARING) $(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal --cov --cov-report=term

fuzz: $(NEEDS_TEST)
	$(SHARING) $(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal --hypothesis-profile fuzz -m "hypothesis and not gpu"

mutations: $(NEEDS_TEST)
	$(RUN) tools/mutations.py --json benchmarks/results/cpu/mutations.json

# One process on a GPU's host spends its time on compiling and launching, so GPU_WORKERS of them share the GPU. They share
# what Triton and NVRTC compile, too, by the caches on disk. Tests marked `alone` follow in one process.
test-gpu: $(NEEDS_TEST)
	failed=0; \
	$(SHARING) $(RUN) -m pytest -m "gpu and not alone" --fail-on-skip --durations 20 --numprocesses $(GPU_WORKERS) \
		--dist worksteal || failed=1; \
	$(RUN) -m pytest -m "gpu and alone" --fail-on-skip --durations 20 || failed=1; \
	exit $$failed

# All of them in one process: what was found goes into one record. Those that FAMILIES names, without a record, in several.
test-families: $(NEEDS_TEST)
	$(if $(FAMILIES),$(SHARING),OMP_NUM_THREADS=1) $(RUN) -m pytest -m families tests/offload/test_families.py --fail-on-skip \
		$(if $(FAMILIES),-k "$(FAMILIES)" --numprocesses $(WORKERS) --dist loadgroup)

# Not part of any install: needs a C compiler and liburing's headers, and fetches xNVMe's source release.
xnvme:
	PYTHON=$(PYTHON) tools/build_xnvme.sh

test-nvme: $(NEEDS_TEST)
	$(RUN) tools/test_nvme.py

lint: $(NEEDS_TEST)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict
	$(RUN) docs/generate_tables.py --check

format: $(NEEDS_TEST)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(NEEDS_TEST)
	$(RUN) docs/generate_reference.py

tables:
	$(PYTHON) docs/generate_tables.py

wheel: $(NEEDS_TEST)
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) dist build htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv that breaks off half-way has no stamp, and is made anew.
$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or name \
	one: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "$(PYTHON) is Python %d.%d, but 3.11 or \
	newer is needed. Name one: make PYTHON=/path/to/python3.12" % v[:2])'
	@$(PYTHON) -m venv --clear $(VENV) || { echo "'$(PYTHON) -m venv' failed. Debian and Ubuntu keep it in a package \
	of its own, python3-venv."; exit 1; }
	@touch $@

$(VENV)/.package: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.package
