# One file of commands for people and for CI. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
USABLE := $(VENV)/.usable
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint types imports pytest docs soak browser format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

DEMO   := --iterations 250 --eval-every 25 --log-every 25 --checkpoint-every 250
demo: $(USABLE)  ## train a small SphereNet and its CNN twin on embedded digits, and show both (two minutes)
	rm -rf demo
	$(BIN)/spherenet train $(DEMO) --output demo/spherenet
	$(BIN)/spherenet train $(DEMO) --operator none --output demo/cnn
	$(BIN)/spherenet report demo/spherenet demo/cnn --title "A SphereNet and its CNN twin on 4,000 digits" -o demo/report.html

test: lint types imports docs pytest  ## every check and every test, as CI runs them (makes the environment first)

$(USABLE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(READY): $(USABLE)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: $(READY)  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## static types of the package
	$(BIN)/mypy

imports: $(READY)  ## the directions in which packages may import each other
	$(BIN)/lint-imports --no-logo

docs: $(READY)  ## the documentation site in site/, warnings as errors; open site/index.html
	PYTHONPATH=docs/extensions $(BIN)/zensical build --strict --clean

pytest: $(READY) browser  ## the tests alone
	$(BIN)/python -m pytest --numprocesses 2

SOAK   ?= tests/faults
soak: $(READY)  ## the fault tests with their full counts, and the table of docs/reliability.md (an hour on a busy machine)
	SPHERENET_SOAK=1 $(BIN)/python -m pytest $(SOAK)

browser:  ## Debian's chromium for the tests of pages, where it is missing and we may install it
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -y -q chromium; } || \
	echo "chromium is not here and cannot be installed: the tests of pages are skipped"

format: $(READY)  ## rewrite the sources in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
