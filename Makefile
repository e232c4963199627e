# `make` lists the targets. Everything happens in .venv; nothing else on the machine is changed.
#
#   PYTHON=python3.12          another interpreter (3.11 to 3.14)
#   PIP_ARGS="--index-url …"   extra arguments for pip. A machine without a GPU saves 2 GB with PyTorch's CPU index.
#   ONCE=1                     `make demo` ends after its answer
#   LONG=1                     `make test-all` has those too that take minutes
#   ARGS="-k router"           `make test` runs pytest once, in one process, with these arguments
#   QUICK=1                    `make faults` runs each kind of fault once

PYTHON ?= $(firstword $(foreach version,11 12 13 14,$(shell command -v python3.$(version))) python3)
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Packages of other versions than constraints.txt has: each of tests/*.txt is installed into a folder
# of its name, beside the rest.
BESIDE := openai-1 clients
NEEDS := pyproject.toml constraints.txt $(BESIDE:%=tests/%.txt)
# Installed once for each content of these files, so that a second `make` costs nothing.
STAMP := $(VENV)/.installed-$(shell cat $(NEEDS) | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all faults lint format hooks constraints clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

venv: $(STAMP) ## the virtual environment with Manta and its tools

$(STAMP): $(NEEDS)
	@echo "== Installing into $(VENV) (some minutes the first time)"
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) with venv is needed: apt-get install python3-venv, or PYTHON=... make" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	for name in $(BESIDE); do \
	  $(BIN)/python -m pip install $(PIP_ARGS) --upgrade --no-deps --no-compile --target $(VENV)/$$name -r tests/$$name.txt \
	    || exit 1; \
	done
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP) ## start the default model, print a streamed answer, serve on port 8000
	@$(BIN)/python -m deployments.demo $(if $(ONCE),--once)

where := not gpu$(if $(LONG),, and not long)
pytest = $(BIN)/python -m pytest

test: $(STAMP) ## what to run after a change: ten minutes on two cores
ifdef ARGS
	@test -n "$$MANTA_TEST_MODEL" || $(BIN)/python -m deployments.cli.models.fetch --quantization none default >/dev/null
	@$(pytest) -m '$(where)' $(ARGS)
else
	@$(BIN)/python -m tests.stages test
endif

test-all: $(STAMP) ## the tests that make test leaves out and that need no GPU
	@$(BIN)/python -m tests.stages $(if $(LONG),--long) rest

faults: $(STAMP) ## docs/reliability.md in full: kills, abuse, draining; half an hour
	@$(BIN)/python -m deployments.cli.models.fetch --quantization none default >/dev/null
ifdef QUICK
	@$(pytest) -m '$(where)' tests/faults
else
	@bad=; for what in soak abuse drain resume; do \
	  echo "== $$what"; $(BIN)/python -m tests.faults.$$what || bad="$$bad $$what"; \
	done; test -z "$$bad" || { echo "error: not within their bounds:$$bad" >&2; exit 1; }
endif

lint: $(STAMP) ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(STAMP) ## run the checks before each commit
	$(BIN)/pre-commit install

constraints: ## renew constraints.txt from a fresh environment
	rm -rf $(VENV)-fresh && $(PYTHON) -m venv $(VENV)-fresh
	$(VENV)-fresh/bin/python -m pip install $(PIP_ARGS) '.[dev]'
	grep '^#' constraints.txt > $(VENV)-fresh/new
	$(VENV)-fresh/bin/python -m pip freeze --exclude manta-serve | sed 's/+cpu$$//' >> $(VENV)-fresh/new
	mv $(VENV)-fresh/new constraints.txt && rm -rf $(VENV)-fresh

clean: ## remove what make made here (the model cache stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
