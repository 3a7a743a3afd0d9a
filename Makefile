# make demo   install into .venv, prefill the example handbook, ask a few questions
# make test   install the test extras into .venv and run the whole suite
# make test-floors   the suite on the lowest versions that are admitted
# make check  lint, types and tests, and the size of the source
# make numbers   the first group of the CPU figures again, into docs/numbers; ALL=1: every one that can be made here
# make build  wheel and sdist in dist/; the wheel is installed into an empty venv elsewhere and asked a question

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORE ?= demo-kb
TWO_PROCESSES := --numprocesses 2 --dist loadfile

.PHONY: demo test test-floors check lint types build numbers clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py --store $(STORE)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(TWO_PROCESSES)

# the lowest versions that pyproject.toml admits, in a venv of their own (torch comes as a CUDA build there)
test-floors:
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/pip install --quiet --disable-pip-version-check -c constraints-floors.txt -e '.[dev]'
	.venv-floors/bin/python -m pytest $(TWO_PROCESSES)

check: lint types test
	@$(BIN)/python tests/source_size.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

build: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tests/built_wheel.py dist

numbers: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot]'
	$(BIN)/python docs/measure.py $(if $(ALL),--all)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-floors $(STORE) dist build
