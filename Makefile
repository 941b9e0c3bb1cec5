# make demo | test | test-long | mutants | soak | gpu | check | docs | pictures | wheel | setup | clean. Needs Python 3.11 or newer; everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
# A package index with CPU wheels of torch (see "Start locally" on pytorch.org): it saves the gigabytes of CUDA libraries
# that the default wheels bring on Linux.
TORCH_INDEX ?=
# Arguments for pytest: make test ARGS="tests/unit -k newton"
ARGS ?=
KILLS ?= 200
PIP_FLAGS ?= --quiet --disable-pip-version-check

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-long mutants soak gpu check format docs pictures wheel setup venv clean

help:
	@echo "make demo    train a small model with AdamW and with the one line, on 4 CPU processes (3 to 6 minutes)"
	@echo "make test    run the tests (8 minutes on two cores)"
	@echo "make test-long  run those that start programs: snippets of the pages, restarts, two nodes, the soak (5 minutes)"
	@echo "make mutants  plant the mistakes of tests/mutants.py, one at a time, and see that the tests find them (half an hour)"
	@echo "make soak    kill 200 ranks at random times, compare the restarted runs (10 to 20 minutes; KILLS=20 for fewer)"
	@echo "make gpu     check and measure on one CUDA card what the package promises there (3 minutes, no network)"
	@echo "make check   run the linters, the type checks and the checks of scripts/"
	@echo "make format  let ruff format and mend what it can"
	@echo "make docs    build the pages of docs/ into site/; dead links and anchors are errors (ARGS=serve: on a local port)"
	@echo "make pictures  make the pictures of docs/img from real runs (2 minutes)"
	@echo "make wheel   build the wheel into dist/, install it into an empty environment, run the quickstart there"
	@echo "make setup   create $(VENV) and install everything"
	@echo "make clean   remove $(VENV) and all caches"

demo: $(STAMP)
	$(BIN)/python -m recipes.vowels.demo

# Three at a time: ranks that wait for each other leave much of two cores idle. In the order of the folders, short files come
# last, and none runs long alone at the end. Hundreds of processes share the bytecode.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --durations=20
WHAT = $(if $(strip $(ARGS)),$(ARGS),-n 3 --dist loadfile --no-loadscope-reorder)

test: $(STAMP)
	$(PYTEST) -m "not long" $(WHAT)
	@echo "make test: all tests passed"

test-long: $(STAMP)
	$(PYTEST) -m long $(WHAT)
	@echo "make test-long: all tests passed"

# A part: make mutants ARGS="zero2 cli"
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

# A seed that is printed repeats a series: make soak KILLS=20 ARGS="--seed 21".
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.long.soak --kills $(KILLS) $(ARGS)

# Installs nothing: takes .venv if it is there, otherwise a Python that has torch with CUDA (make gpu PYTHON=python3).
gpu:
	$(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=. $(BIN)/lint-imports
	$(BIN)/python -m scripts.check_imports
	$(BIN)/python -m scripts.check_sizes
	$(BIN)/python -m scripts.check_ascii
	$(BIN)/python -m scripts.check_figures
	$(BIN)/python -m scripts.walks
	@echo "make check: no complaints"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mkdocs-material says in a box on the terminal that it disagrees with plans for MkDocs 2.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(strip $(ARGS)),$(ARGS),build --strict)

pictures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.pictures

wheel: $(STAMP)
	$(BIN)/python -m scripts.check_wheel --out dist -- $(TORCH_INDEX:%=--extra-index-url %)

setup venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes."
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt $(TORCH_INDEX:%=--extra-index-url %) torch
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
