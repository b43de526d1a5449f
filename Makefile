# `make test` and `make demo` set everything up by themselves; nothing needs to be installed by hand but Python ≥ 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: test demo lint types docs browser clean

$(READY): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and alone: any other package would pull in a newer build with gigabytes of GPU libraries
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements-dev.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

test: $(READY) browser lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	$(MAKE) docs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

# The report is tested in a real browser where one can be installed; elsewhere those tests say why they are skipped.
browser:
	@sh .ci/install-browser

demo: $(READY)
	$(BIN)/refold optimize example:bert-base --out out/bert-base --overwrite

clean:
	rm -rf $(VENV) out docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
