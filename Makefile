# make demo   install into .venv, prefill the example handbook, ask a few questions
# make test   install the test extras into .venv and run the whole suite
# make check  lint, types and tests, and the size of the source

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STORE ?= demo-kb

.PHONY: demo test check lint types numbers clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py --store $(STORE)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

check: lint types test
	@$(BIN)/python tests/source_size.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

numbers: $(VENV)/.installed
	$(BIN)/python docs/numbers.py --store $(STORE)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(STORE) dist build
