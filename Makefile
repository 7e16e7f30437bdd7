# make quickstart   sets up what is missing, then runs recipes/quickstart.yaml
# make test         sets up what is missing, then runs every test
# make lint         formatter, linter, type checker
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The version whose CPU build is used where pip's settings (PIP_FIND_LINKS and the like) offer one.
TORCH_CPU := torch==2.13.0

.PHONY: quickstart test lint
.DEFAULT_GOAL := quickstart

quickstart: $(VENV)/.ready
	$(BIN)/sentray run recipes/quickstart.yaml

test: $(VENV)/.ready
	$(BIN)/python -m pytest tests

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Sentray needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 2; }
	@echo "Setting up $(VENV) (once; about 2 GB, a few minutes)"
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi >/dev/null 2>&1; then \
		echo "A GPU is here: torch comes with CUDA"; \
	else \
		echo "No GPU is here: installing $(TORCH_CPU), the CPU build if pip is offered one"; \
		$(BIN)/python -m pip install --quiet $(TORCH_CPU); \
	fi
	@echo "Installing Sentray and its pinned dependencies"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
