# Shardscope: `make demo` and `make lab` set up everything they need in .venv.
# Needs Python 3.11 or newer and make. Another interpreter: make demo PYTHON=/path/to/python3

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check

# The first candidate that really runs: a name on PATH may be a shim with nothing behind it.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3 python3.14 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$python"; exit; }; done)

.DEFAULT_GOAL := help
.PHONY: help demo lab test check format bench pins clean

help:
	@echo "make demo    train a small GPT and a classifier on 1 and 4 ranks by every strategy; table and HTML report"
	@echo "make lab     open JupyterLab on the tour"
	@echo "make test    run the quick tests (minutes), then make check; all of them: make test ARGS=--full"
	@echo "make check   ruff (lint, format) and mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make bench   print the measured ratios"
	@echo "make pins    renew binder/constraints.txt from .venv"
	@echo "make clean   remove .venv and caches (runs stay)"

demo: $(VENV)/.installed
	@$(BIN)/shardscope demo $(ARGS)

lab: $(VENV)/.installed
	@$(BIN)/shardscope lab $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)
	@$(MAKE) --no-print-directory check

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	@for file in tests/benchmarks/[a-z]*.py; do echo; echo "== $$file"; $(BIN)/python $$file || exit 1; done

pins: $(VENV)/.installed-dev
	@{ head -1 binder/constraints.txt; \
	   $(PIP) freeze --exclude-editable | sed -E 's/^torch==([0-9.]+).*/torch==\1/' | grep '=='; } > $(VENV)/pins.txt
	@mv $(VENV)/pins.txt binder/constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find toolkit widgets tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ── set-up ───────────────────────────────────────────────────────────────────────────────────────────────────

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "make: PYTHON=$(PYTHON) is not a working Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot create a virtual environment; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch comes first and alone, so that at most one package is looked for on PyTorch's own index:
# the rest then finds torch in place and never names that index.
$(VENV)/.torch: binder/torch-cpu.txt | $(BIN)/python
	@if nvidia-smi >/dev/null 2>&1 || [ "$$(uname -s)" != Linux ]; then \
		echo "Installing torch (default build)"; \
		$(PIP) install -qq "$$(grep '^torch==' binder/torch-cpu.txt)"; \
	else \
		echo "Installing torch (CPU build)"; \
		$(PIP) install -qq --no-deps --retries 1 --timeout 20 -r binder/torch-cpu.txt || { \
			echo "make: PyTorch's CPU index is out of reach; installing the default build of torch instead"; \
			$(PIP) install -qq --no-deps "$$(grep '^torch==' binder/torch-cpu.txt)"; }; \
		$(PIP) show torch | grep -q '^Version:.*+cpu' || \
			echo "make: PyTorch's CPU build was out of reach, so the default build is used; it is larger and works the same"; \
	fi
	@touch $@

$(VENV)/.installed: pyproject.toml binder/constraints.txt $(VENV)/.torch
	@echo "Installing shardscope and its pinned dependencies (a minute or two)"
	@$(PIP) install -qq -c binder/constraints.txt -e '.[fast]'
	@$(BIN)/shardscope --version
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools of the tests"
	@$(PIP) install -qq -c binder/constraints.txt -e '.[dev]'
	@touch $@
