# Every target makes .venv and installs from constraints.txt by itself. `test` caches bytecode: its
# processes, over a hundred, import the same files. Files start in the order of tests/conftest.py.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help capture test test-all models versions check docs package-check gpu sanitize

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1|\2/' | column -t -s '|'

capture: $(STAMP) ## the main job: capture the reference model's graphs and check every replay
	$(BIN)/graphkit capture

# A test that hangs ends the run with the stacks of its threads. Without --max-worker-restart 0
# xdist starts the same test again for each new worker.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile \
	--no-loadscope-reorder --max-worker-restart 0
test: $(STAMP) ## run the tests that are not slow, one process per core
	$(PYTEST) -m "not slow and not gpu"

test-all: $(STAMP) ## run every test that this machine can run
	$(PYTEST) --durations 20

models: $(STAMP) ## compare small models of every type that docs/transformers.md lists with transformers
	GRAPHKIT_ALL_MODELS=1 $(BIN)/python -m pytest -n auto \
	tests/models/test_kinds.py tests/models/test_quantised_kinds.py

# Beside the version of constraints.txt; --no-deps, because the environment has the other packages.
OLDEST := transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
NEWEST := transformers==5.24.0
versions: .venv/oldest .venv/newest ## load models with the oldest and the newest supported transformers
	for folder in $^; do PYTHONPATH=$$folder $(BIN)/python -m pytest -n auto \
	tests/models/test_load.py tests/models/test_kinds.py tests/models/test_quantised_kinds.py \
	tests/models/test_versions.py || exit 1; done

.venv/oldest .venv/newest: $(STAMP) Makefile
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ $(if $(filter %oldest,$@),$(OLDEST),$(NEWEST))
	@touch $@

check: $(STAMP) docs ## lint, format, types and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation into docs/build, without a network
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going docs docs/build

package-check: $(STAMP) ## build sdist and wheel of HEAD, install them on each Python of the classifiers and use them
	$(BIN)/python tools/package_check.py

gpu: $(if $(GPU_PYTHON),,$(STAMP)) ## run the GPU tests; GPU_PYTHON=python3 takes a Python that holds torch already
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu

# NCCL calls functions that a driver may lack; memcheck would report the refused calls.
sanitize: $(if $(GPU_PYTHON),,$(STAMP)) ## run the kernels under memcheck and racecheck of compute-sanitizer
	for options in "memcheck --report-api-errors no" racecheck; do \
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$options --error-exitcode 9 \
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -m sanitized -n 6 --dist worksteal tests/gpu tests/unit/ops tests/unit/attention || exit 1; done

# As README installs it: without a GPU the CPU build of torch, which is smaller by gigabytes. An
# index of one's own may have that build; pip asks the index of torch only if none has.
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
comma := ,
HAS_GPU := $(shell command -v nvidia-smi)
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(if $(HAS_GPU),,$(BIN)/python -m pip install --quiet '$(TORCH)+cpu' 2> /dev/null || \
	$(BIN)/python -m pip install --quiet $(TORCH) --index-url https://download.pytorch.org/whl/cpu)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(if $(HAS_GPU),cuda$(comma))dev,docs]'
	@touch $@
