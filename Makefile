# Everything installs itself into .venv first. `make quickstart` and `make test` are all that a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
# of the tests: one for each core, each takes a gigabyte
WORKERS ?= logical --maxprocesses 4

# of the tests: those that show what another version of a package breaks
TELLING := tests/models/test_models.py tests/models/test_loading.py tests/models/test_ddl.py tests/test_fixtures.py \
	tests/data/test_tokenizers.py tests/data/test_corpora.py tests/training/test_loop.py tests/training/test_optim.py \
	tests/plasticity/test_surgery.py tests/cli/test_starting.py

.PHONY: quickstart test check attack habits mutants oldest newest release wheel dependencies lint docs figures format stamp clean

quickstart: .venv/core
	$(BIN)/pnn quickstart

test: .venv/dev  ## all that needs no GPU
	$(BIN)/pytest -m "not gpu" -n $(WORKERS) --dist worksteal

check: lint  ## linters and the fast tier
	$(BIN)/pytest -m "not gpu and not slow" -n $(WORKERS) --dist worksteal -q

attack: .venv/dev  ## fuzzers, kills, a full disk, two at one folder, a page under bad input: six minutes on two idle cores, into results/attack
	$(BIN)/python tests/attack/run.py

habits: .venv/habits  ## what people do with Hugging Face's libraries, with the transformers in use and the oldest that we take
	$(BIN)/pytest -q tests/models/test_habits.py tests/training/test_trackers.py
	PYTHONPATH=.venv/oldest $(BIN)/pytest -q tests/models/test_habits.py

mutants: .venv/dev  ## changes the source in ways that matter: a test must notice each (results/mutations)
	$(BIN)/python tests/mutations/run.py

oldest newest: %: .venv/envs/%/ready  ## the telling tests with the oldest packages in range, and with the newest that there are
	.venv/envs/$*/bin/python -m pytest -q -m "not gpu and not slow" $(TELLING)

release: .venv/dev  ## wheel, source package, checksums and bill of materials into dist/; built twice, to the same bytes
	$(BIN)/python release/build.py dist

wheel: .venv/dev  ## the wheel as a new user has it: installed in an empty folder, quickstart, a head removed in Chromium; ten minutes
	$(BIN)/python release/try_wheel.py

dependencies: .venv/core  ## docs/dependencies.md: versions and licences
	$(BIN)/python release/dependencies.py page

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/docs  ## the documentation site, into site/; a broken link or reference is an error (not with --quiet)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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

.venv/envs/oldest/ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv --clear .venv/envs/oldest
	.venv/envs/oldest/bin/python -m pip install --quiet -e . pytest hypothesis -c constraints-oldest.txt
	@touch $@

.venv/envs/newest/ready: pyproject.toml
	$(PYTHON) -m venv --clear .venv/envs/newest
	.venv/envs/newest/bin/python -m pip install --quiet -e . pytest hypothesis
	@touch $@

.venv/docs: .venv/core
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	@touch $@

clean:
	rm -rf .venv runs prepared site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
