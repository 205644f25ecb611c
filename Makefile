# `make demo`, `make test` and `make docs` work on a machine that has nothing but Python: they make an environment of
# their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-quick lint docs bench search faults clean

demo: $(VENV)/installed
	$(BIN)/bilevel demo

# Two processes with one thread each: numerical libraries would otherwise start as many threads as there are cores in
# each of them.
test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The mathematics and the small parts, in a few minutes; `make test` runs everything.
test-quick: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site; with BILEVEL_QUICK=1 the gallery's examples run in quick form.
docs: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html

bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/run.py

# Random problems, compared with differences, for as long as it takes.
search: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m search --problems 10000

# Damaged and forged files, kills, full disks: every end is a right load or a sentence.
faults: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults --jobs 2 --write tests/faults/CAMPAIGN.txt

clean:
	rm -rf $(VENV) .bench .mypy_cache .pytest_cache .ruff_cache .hypothesis docs/_build docs/api docs/gallery

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[all]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --editable ".[dev]"
	touch $@
