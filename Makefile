# Commands for developers and for CI. `make` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
USABLE := $(VENV)/.usable
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check lint types imports audit lock fast pytest docs results soak sanitizers browser hosts format wheel wheel-windows \
        test-wheel test-torch clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

DEMO   := --iterations 250 --eval-every 25 --log-every 25 --checkpoint-every 250
demo: $(USABLE)  ## train a small SphereNet and its CNN twin on embedded digits and compare them (two minutes)
	rm -rf demo
	$(BIN)/spherenet train $(DEMO) --output demo/spherenet
	$(BIN)/spherenet train $(DEMO) --operator none --output demo/cnn
	$(BIN)/spherenet report demo/spherenet demo/cnn --title "A SphereNet and its CNN twin on 4,000 digits" -o demo/report.html

check: lint types imports fast  ## lint, types, import rules and fast tests (under 90 seconds on two cores)

test: $(READY)  ## all checks, and all tests but the slow ones (creates the environment first)
	$(MAKE) --no-print-directory --jobs 2 lint types imports docs
	SPHERENET_SITE=site SITE_URL='$(SITE_URL)' $(MAKE) --no-print-directory pytest SELECT='-m "not slow"'

test-all: $(READY)  ## all checks and all tests, as in CI
	$(MAKE) --no-print-directory --jobs 2 lint types imports docs
	SPHERENET_SITE=site SITE_URL='$(SITE_URL)' $(MAKE) --no-print-directory pytest

# LOCKED=1 installs the files whose hashes are in requirements.lock and nothing else, as CI does.
LOCKED ?=
INSTALL_LOCKED := $(BIN)/pip install --quiet --require-hashes --requirement requirements.lock && \
                  $(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . --editable paper
$(USABLE): pyproject.toml paper/pyproject.toml constraints.txt setup.py $(wildcard src/spherenet/kernels/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(INSTALL_LOCKED),$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[report]' --editable paper)
	touch $@

$(READY): $(USABLE)
	$(if $(LOCKED),$(INSTALL_LOCKED),$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable paper)
	touch $@

PROSE  := src paper/spherenet_paper paper/tests paper/tools tests docs examples benchmarks tools $(wildcard *.md)
lint: $(READY)  ## check style, formatting, spelling, declared dependencies and licenses of the installed packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $(PROSE)
	$(BIN)/deptry src
	$(BIN)/pip-licenses --from=mixed --partial-match --fail-on='GPL;GNU' --ignore-packages codespell --summary

# uv resolves; torch is the build for CPUs. Use TORCH_INDEX= and UV_FIND_LINKS=FOLDER for files that were downloaded.
LOCK   := uv pip compile --quiet --generate-hashes --no-annotate --custom-compile-command 'make lock' --python-version 3.11
lock:  ## write requirements.lock (Linux x86-64), build.lock and release.lock (all systems) with hashes; requires uv
	$(LOCK) pyproject.toml --extra dev --constraint constraints.txt --python-platform x86_64-manylinux_2_28 \
	--index-strategy unsafe-best-match $(addprefix --extra-index-url=,$(TORCH_INDEX)) --output-file requirements.lock
	for group in build release; do $(LOCK) --universal --group pyproject.toml:$$group --output-file $$group.lock; done

audit:  ## compare the locked versions with published vulnerabilities (requires a network)
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE_TOOLS)
	$(RELEASE)/bin/pip-audit --disable-pip --require-hashes $(foreach file,build release requirements,--requirement $(file).lock)

types: $(READY)  ## check static types of the package
	$(BIN)/mypy

imports: $(READY)  ## check the direction of imports between packages
	$(BIN)/lint-imports --no-logo

SITE_URL ?= $(shell sed -n 's/^Documentation = "\(.*\)"$$/\1/p' pyproject.toml)
docs: $(READY)  ## build the documentation in site/, warnings as errors; open site/index.html
	SITE_URL='$(SITE_URL)' PYTHONPATH=docs/extensions $(BIN)/zensical build --strict --clean

FAST   := tests/ops tests/optim tests/regularizers tests/models tests/losses/test_registry.py \
          tests/losses/test_annealing.py tests/losses/test_invalid_arguments.py tests/runs/test_run_directory.py \
          tests/docs/test_markdown.py tests/test_package.py
fast: $(READY)  ## run the fast tests only
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses 2 $(FAST)

pytest: $(READY) browser hosts  ## run all tests, or those of e.g. SELECT='-m "not slow"'
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(SELECT)

results: $(READY)  ## write verdicts.csv, docs/results.md, its figure and the table of README.md from the runs in paper/results
	$(BIN)/python -m spherenet_paper.report

SOAK   ?= tests/faults paper/tests/cli/test_fuzz.py
soak: $(READY) hosts  ## run the fault tests with their full counts and write the table of docs/reliability.md (about an hour)
	SPHERENET_SOAK=1 $(BIN)/python -m pytest $(SOAK)

sanitizers: $(READY)  ## run the C++ kernels under the address and undefined-behavior sanitizers
	$(MAKE) --no-print-directory soak SOAK=tests/faults/test_native_memory.py

browser:  ## install chromium for the tests of pages, if it is missing and apt is available
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -y -q chromium; } || \
	echo "chromium is not available: the tests of pages are skipped"

hosts:  ## install iproute2 for the tests of several hosts, if it is missing and apt is available
	@command -v ip >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -y -q iproute2; } || \
	echo "iproute2 is not available: the tests of several hosts are skipped"

format: $(READY)  ## reformat the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

RELEASE := $(VENV)-release
RELEASE_TOOLS := $(RELEASE)/bin/pip install --quiet --require-hashes --requirement release.lock
wheel:  ## build sdist, native wheel and pure Python wheel in dist/ and check them
	test -x $(RELEASE)/bin/auditwheel || { $(PYTHON) -m venv $(RELEASE) && $(RELEASE_TOOLS); }
	rm -rf build dist
	$(RELEASE)/bin/python -m build --no-isolation --outdir dist/raw
	PATH="$(abspath $(RELEASE))/bin:$$PATH" $(RELEASE)/bin/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist dist/raw/*.whl
	SPHERENET_PURE=1 $(RELEASE)/bin/python -m build --no-isolation --wheel --outdir dist
	mv dist/raw/*.tar.gz dist && rm -r dist/raw build
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/check-wheel-contents dist/*.whl

wheel-windows:  ## build the native wheel for Windows on any system in dist/ (it is not run)
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE_TOOLS) && $(RELEASE)/bin/pip install --quiet ziglang==0.17.0
	SPHERENET_CROSS=windows $(RELEASE)/bin/python -m build --no-isolation --wheel --outdir dist
	rm -rf build

test-wheel: $(READY) wheel  ## install each wheel of dist/ in a new environment without a compiler and run it
	SPHERENET_WHEELS=dist $(BIN)/python -m pytest tests/test_wheel.py

VERSION ?= 2.10.0
TORCH_INDEX ?=
OTHER  := $(VENV)-torch-$(VERSION)
test-torch:  ## test with another version of torch, e.g. make test-torch VERSION=2.10.0
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$(VERSION)'
	$(OTHER)/bin/pip install --quiet --editable '.[report,plot,onnx,sklearn,hub,test]' --editable paper 'torch==$(VERSION)'
	$(OTHER)/bin/python -m pytest --numprocesses 2 @tests/portable.txt tests/kernels tests/training

clean:  ## remove the environment and all generated files
	rm -rf $(VENV) $(VENV)-release $(VENV)-torch-* build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
