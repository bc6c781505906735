# Everything installs itself into .venv first. `make quickstart` and `make test` are all that a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
# of the tests: one for each core, each takes a gigabyte
WORKERS ?= logical --maxprocesses 4

.PHONY: quickstart test check habits lint docs figures format stamp clean

quickstart: .venv/core
	$(BIN)/pnn quickstart

test: .venv/dev  ## all that needs no GPU
	$(BIN)/pytest -m "not gpu" -n $(WORKERS) --dist worksteal

check: lint  ## linters and the fast tier
	$(BIN)/pytest -m "not gpu and not slow" -n $(WORKERS) --dist worksteal -q

habits: .venv/habits  ## what people do with Hugging Face's libraries, with the transformers in use and the oldest that we take
	$(BIN)/pytest -q tests/models/test_habits.py tests/training/test_trackers.py
	PYTHONPATH=.venv/oldest $(BIN)/pytest -q tests/models/test_habits.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/docs  ## the documentation site, into site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

figures: .venv/dev  ## all figures of the site and the notebooks' outputs anew: about ten minutes
	$(BIN)/python docs/figures.py
	$(BIN)/python notebooks/execute.py runs/site/runs/quickstart/pnn

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stamp:  ## before the code is copied to a machine without its .git: src/pnn/_commit.json goes along and tells runs their commit
	$(PYTHON) src/pnn/code_version.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/core: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -e . -c constraints.txt
	@touch $@

.venv/dev: .venv/core
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $@

.venv/habits: .venv/dev
	$(BIN)/python -m pip install --quiet -e '.[habits]' -c constraints.txt
	grep -v '^transformers==' constraints.txt > .venv/constraints-of-oldest.txt
	$(BIN)/python -m pip install --quiet --upgrade --target .venv/oldest transformers==5.17.0 -c .venv/constraints-of-oldest.txt
	@touch $@

.venv/docs: .venv/core
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	@touch $@

clean:
	rm -rf .venv runs prepared site .pytest_cache .mypy_cache .ruff_cache .hypothesis
