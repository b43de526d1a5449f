# Every target sets up what it needs by itself; nothing needs to be installed by hand but Python ≥ 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Processes that tests start, and the next run, need not compile the same files again, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: check test wheel demo lint contracts types docs browser durations clean

$(READY): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and alone: any other package would pull in a newer build with gigabytes of GPU libraries
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements-dev.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# While working: everything but the slow tests, in about a minute.
check: $(READY) lint contracts types
	$(PYTEST) -m "not slow and not browser"

# What CI runs. What failed is run once more, alone: some tests compare times, and others may use the machine meanwhile.
test: $(READY) browser lint contracts types
	$(PYTEST) || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none
	$(MAKE) docs wheel

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Which package may import which; see docs/architecture.md.
contracts: $(READY)
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

# The report is tested in a real browser where one can be installed; elsewhere those tests say why they are skipped.
browser:
	@sh .ci/install-browser

# Runs everything and writes down which tests are slow (tests/slow.txt); `make check` leaves those out.
durations: $(READY)
	$(PYTEST) --write-slow

# dist/refold-….whl, used once in a fresh environment. See docs/install.md.
wheel: $(READY)
	.ci/check-wheel $(BIN)/python dist

demo: $(READY)
	$(BIN)/python benchmarks/demo.py --out out/demo

clean:
	rm -rf $(VENV) out dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
