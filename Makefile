# make scan    set everything up in .venv and scan Llama-3.1-8B: what would run in our kernels, and why the rest would not
# make test    set everything up in .venv and run all checks: lint, types, tests
#
# make scan MODEL=gpt2    another model            make golden    rewrite the golden files after an intended change
# make lint               ruff and mypy alone      make format    what ruff can mend by itself
# make gpu                the tests that need one  make matrix    both ends of the supported torch and transformers
# make wheel              build dist/*.whl         make clean     remove .venv and every cache

PYTHON ?= python3
MODEL ?= meta-llama/Llama-3.1-8B
JOBS ?= 2
VENV := .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check -q

# Linux without an NVIDIA driver takes the CPU build or nothing: the other one is several GB. See CONTRIBUTING.md.
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
LOCAL_BUILD := $(shell [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 && echo +cpu)
TORCH ?= torch==$(TORCH_VERSION)$(LOCAL_BUILD)

# More than one test process on few cores: torch's own threads would only get in each other's way.
export OMP_NUM_THREADS ?= 1

.PHONY: scan test lint unit slow golden format gpu matrix wheel clean
.DELETE_ON_ERROR:

scan: $(VENV)/.installed
	$(BIN)/python -m tilegym_fx.scan $(MODEL)

test: lint unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(JOBS) --dist loadgroup -m "not gpu and not slow" --durations=15 tests

slow: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(JOBS) -m slow tests

golden: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m golden --update-golden tests

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m gpu tests

matrix: $(VENV)/.installed-dev
	$(BIN)/nox

wheel: $(VENV)/.installed-dev
	$(PIP) wheel --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) .nox .hypothesis .mypy_cache .pytest_cache .ruff_cache dist build

$(VENV)/.python: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is older than 3.10. Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt "$(TORCH)" \
	  || { echo "error: no $(TORCH) for this Python and package index. Add PyTorch's CPU wheels to pip's indexes" \
	            "(PIP_EXTRA_INDEX_URL), or take another build: make TORCH=torch==$(TORCH_VERSION)" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed tests/packages.txt
	$(PIP) install -c constraints.txt -e ".[dev]"
	$(PIP) install --no-deps -r tests/packages.txt
	@touch $@
