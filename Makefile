# Shardscope: `make demo` and `make lab` set up everything they need in .venv.
# Needs Python 3.11 or newer and make. Another interpreter: make demo PYTHON=/path/to/python3

VENV := .venv
BIN  := $(VENV)/bin
# Tests that run at a time. Most of them wait for processes to start, so two do well on two cores.
WORKERS ?= 2
# They start many processes: without bytecode on disk each of these would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

# The first candidate that actually runs: a name on PATH may be a shim without an interpreter.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3 python3.14 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$python"; exit; }; done)

.DEFAULT_GOAL := help
.PHONY: help demo lab test smoke pytest check format bench dist pins clean

help:
	@echo "make demo    train two models with every strategy on 1 process and on 4 ranks (1 to 2 minutes); table and HTML report"
	@echo "make lab     open the tour notebook in JupyterLab"
	@echo "make test    run the quick tests (about 5 minutes on two cores), then make check; full tier: make test ARGS=--full"
	@echo "make smoke   run the first tests after an edit (under a minute): rules of the house, formulas, a method of each kind"
	@echo "make pytest  run the tests alone"
	@echo "make check   run ruff (lint and format) and mypy"
	@echo "make format  apply ruff fixes and formatting"
	@echo "make bench   run the benchmarks and print their ratios"
	@echo "make dist    build wheel and sdist, and try each in new environments of Python 3.11 to 3.14 (minutes)"
	@echo "make pins    update binder/constraints.txt from .venv"
	@echo "make clean   remove .venv and caches; keep runs"

demo: $(VENV)/.installed
	@$(BIN)/shardscope demo $(ARGS)

lab: $(VENV)/.installed
	@$(BIN)/shardscope lab $(ARGS)

test: pytest
	@$(MAKE) --no-print-directory check

# The rules of the house, the public names, specs and formulas; then one method of each kind on real ranks.
smoke:
	@$(MAKE) --no-print-directory pytest ARGS="tests/test_house.py tests/test_public_api.py tests/spec tests/analytic \
		tests/training/strategies/test_conformance.py tests/training/compression/test_conformance.py \
		tests/methods/test_names.py tests/methods/test_lr_schedules.py tests/training/optim/test_lars.py"

pytest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@for file in tests/benchmarks/[a-z]*.py; do echo; echo "== $$file"; $(BIN)/python $$file || exit 1; done

dist: $(VENV)/.installed-dev
	@$(BIN)/python .ci/dist.py $(ARGS)

pins: $(VENV)/.installed-dev
	@{ head -1 binder/constraints.txt; \
	   $(BIN)/python -m pip --disable-pip-version-check freeze --exclude-editable | sed -E 's/^torch==([0-9.]+).*/torch==\1/' | grep '=='; } > $(VENV)/pins.txt
	@mv $(VENV)/pins.txt binder/constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find toolkit widgets tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ── set-up ───────────────────────────────────────────────────────────────────────────────────────────────────

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one, or give its path: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "make: PYTHON=$(PYTHON) is not a working Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot create a virtual environment; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Torch is installed first and alone; see binder/install.py.
$(VENV)/.torch: binder/torch-cpu.txt | $(BIN)/python
	@$(BIN)/python binder/install.py torch
	@touch $@

$(VENV)/.installed: pyproject.toml binder/constraints.txt $(VENV)/.torch
	@$(BIN)/python binder/install.py package
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python binder/install.py dev
	@touch $@
