# `make` lists the targets. Everything happens in .venv; nothing else on the machine is changed.
#
#   PYTHON=python3.12          another interpreter (3.11 to 3.14)
#   PIP_ARGS="--index-url …"   more arguments as pip has them; uv gets them, too
#   TORCH_CPU_INDEX=URL        a mirror of PyTorch's index of builds without CUDA; empty: take PyTorch with CUDA
#   ONCE=1                     `make demo` ends after its answer
#   LONG=1                     `make test-all` has those too that take minutes
#   ARGS="-k router"           `make test` runs pytest once, in one process, with these arguments
#   QUICK=1                    `make faults` runs each kind of fault once

ASKED := $(if $(PYTHON),--python '$(PYTHON)')
PYTHON ?= $(firstword $(foreach version,11 12 13 14,$(shell command -v python3.$(version))) python3)
PIP_ARGS ?=
export PIP_ARGS
VENV := .venv
BIN := $(VENV)/bin
# Ends at once where there is nothing to do.
install = @$(PYTHON) deploy/install.py $(ASKED)

.DEFAULT_GOAL := help
.PHONY: help venv install demo test test-all nightly faults lint format hooks constraints clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

venv: ## the virtual environment with Manta, its tools and the clients that tests drive
	$(install) --tests

install: ## the virtual environment with what runs; EXTRAS=aws or gcp: what a cluster's head needs
	$(install) --extras '$(EXTRAS)'

demo: install ## start the default model, print a streamed answer, serve on port 8000
	@$(BIN)/python -m deployments.demo $(if $(ONCE),--once)

where := not gpu$(if $(LONG),, and not long)
pytest = $(BIN)/python -m pytest

test: venv ## what to run after a change: eight minutes on two cores
ifdef ARGS
	@test -n "$$MANTA_TEST_MODEL" || $(BIN)/python -m deployments.cli.models.fetch --quantization none default >/dev/null
	@$(pytest) -m '$(where)' $(ARGS)
else
	@$(BIN)/python -m tests.stages test
endif

test-all: venv ## the tests that make test leaves out and that need no GPU
	@$(BIN)/python -m tests.stages $(if $(LONG),--long) rest

nightly: venv ## tests of prose and of machine code, and exhaustive grids
	@$(BIN)/python -m tests.stages --long nightly

faults: venv ## docs/reliability.md in full: kills, abuse, draining; half an hour
	@$(BIN)/python -m deployments.cli.models.fetch --quantization none default >/dev/null
ifdef QUICK
	@$(pytest) -m '$(where)' tests/faults
else
	@bad=; for what in soak abuse drain resume; do \
	  echo "== $$what"; $(BIN)/python -m tests.faults.$$what || bad="$$bad $$what"; \
	done; test -z "$$bad" || { echo "error: not within their bounds:$$bad" >&2; exit 1; }
endif

lint: venv ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: venv ## run the checks before each commit
	$(BIN)/pre-commit install

constraints: venv ## renew constraints.txt from pyproject.toml; UPGRADE=1: with the newest of everything
	$(BIN)/python -m tests.pins $(if $(UPGRADE),upgrade,renew)

clean: ## remove what make made here (the model cache stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
