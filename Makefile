# Everything runs in an environment of its own, .venv, which the first target that needs it creates.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
DEMO ?=
GALLERY ?=
NOTEBOOKS ?=
PYTEST ?=
SEEDS ?= 0:1000

# Tests of one file share fits and compiled programs: they stay on one worker.
WORKING := -n $(WORKERS) --dist loadfile

PY := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_TEST := $(VENV)/.ready-test
READY_DOCS := $(VENV)/.ready-docs

# Of the tests' time most goes into compiling programs that run for milliseconds. They are kept for a second run.
CACHED := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax_cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# `make slow` compiles as users do. Without lines of source code in programs a twelfth of the time is saved.
QUICKLY := XLA_FLAGS="$$($(PY) tests/xla_flags.py)" JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0

QUICK := architecture public_api equations errors clear_words products moments marginals golden_svgp golden_collapsed \
	golden_likelihoods kernels_golden natural_safety

# Tests of what `make docs` does, which `make pages` leaves to it.
OF_DOCS := site_builds_without_warnings examples_in_docstrings

.DEFAULT_GOAL := help
EXAMPLES := one_call dates regression classification gplvm counts survey survival digits multitask deep deep_kernel convolutional spectral streaming nuts thompson \
	large spatial neighbors seasons areal_counts

# What `make oldest` and `make newest` run: bounds, errors, training, diagnostics, conversion and tables, minutes each.
VERSIONS := architecture public_api equations errors golden_svgp golden_collapsed moments natural_safety fit fit_sources diagnostics sklearn \
	plots corners enumeration own_draws draws_anywhere inputs tables tabular_columns tabular_dates tabular_files tabular_text
NEWEST_PYTHON ?= python3.13

.PHONY: help installed demo snelson $(EXAMPLES) examples gallery notebooks corners test quick fuzz slow lint typecheck types docs site doctest pages commands check oldest \
	newest package clean

help:  ## show this list
	@echo "make <target>, where <target> is one of"
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  \1|/' | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

installed: $(READY_TEST) $(READY_DOCS)

demo: $(READY)  ## four sparse GP classifiers on real data: table, figure and NetCDF file in out/ (DEMO="--steps 500" etc.)
	$(PY) examples/demo.py $(DEMO)

snelson: $(READY)  ## one-dimensional regression: the second inducing set and the tight residual (DEMO="--data FILE.npz")
	$(PY) examples/snelson.py $(DEMO)

$(EXAMPLES): $(READY)
	$(PY) examples/$@.py $(DEMO)

examples: $(EXAMPLES)  ## all scripts but demo and snelson; also one by one: make deep, make counts, ...

gallery: $(READY)  ## run the examples and keep their tables and pictures for the documentation (GALLERY="counts deep": only these)
	$(PY) docs/gallery.py $(GALLERY)

notebooks: $(READY_DOCS)  ## execute the examples as notebooks, which the site offers; a cell that raises ends it (NOTEBOOKS="counts deep": only these)
	$(PY) docs/notebooks.py $(NOTEBOOKS)

test: $(READY_TEST)  ## the tests, without slow ones and those of tests/long.txt (PYTEST="-k likelihood" etc.)
	$(CACHED) $(QUICKLY) $(PY) -m pytest -q $(WORKING) $(PYTEST)

quick: $(READY_TEST)  ## tests that answer within a minute: bounds beside other libraries' values, derivatives, errors, rooms
	$(CACHED) $(QUICKLY) $(PY) -m pytest -q $(WORKING) $(QUICK:%=tests/test_%.py) $(PYTEST)

fuzz: $(READY_TEST)  ## random programs beside dense formulas; failing ones are printed (SEEDS=0:5000; SEEDS=17 for one again)
	$(PY) -m tests.fuzz --seeds $(SEEDS) --workers $(WORKERS)

slow: $(READY_TEST)  ## all tests
	$(CACHED) $(PY) -m pytest -q $(WORKING) --slow $(PYTEST)

lint: $(READY_TEST)  ## ruff: errors and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

typecheck: $(READY_TEST)  ## mypy
	$(PY) -m mypy

types: $(READY_TEST)  ## the types that a user's script sees: mypy --strict and pyright
	$(PY) -m pip install --quiet --disable-pip-version-check pyright
	$(PY) -m pytest -q --slow tests/test_typing.py
	$(VENV)/bin/pyright --pythonpath $(PY) tests/typing_user.py

corners: $(READY_TEST)  ## run every corner of NumPyro and write the table of docs/guide/numpyro.md
	$(PY) docs/corners.py

oldest: | $(PY)  ## tests with the oldest versions that pyproject.toml allows, constraints/oldest.txt
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/pip install --quiet --disable-pip-version-check -c constraints/oldest.txt -r constraints/oldest.txt
	build/oldest/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	build/oldest/bin/python -m pytest -q $(WORKING) $(VERSIONS:%=tests/test_%.py) $(PYTEST)

newest: | $(PY)  ## tests with the newest versions there are (NEWEST_PYTHON=python3.13)
	$(NEWEST_PYTHON) -m venv build/newest
	build/newest/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[test,examples]'
	build/newest/bin/python -m pytest -q $(WORKING) $(VERSIONS:%=tests/test_%.py) $(PYTEST)

docs: site doctest  ## the site, in docs/_build/html, warnings being errors; and the examples in docstrings

pages: $(READY_TEST)  ## the snippets of docs/ and README, and all of examples/, run small
	$(CACHED) $(QUICKLY) $(PY) -m pytest -q -n $(WORKERS) --dist worksteal --slow tests/test_docs.py tests/test_examples.py \
		tests/test_benchmarks.py::test_accelerator_runs_on_what_there_is \
		$(OF_DOCS:%=--deselect tests/test_docs.py::test_%)

commands: $(READY_TEST)  ## the commands that docs/ and README name, benchmarks too, run small; `make slow` has them
	$(CACHED) $(QUICKLY) $(PY) -m pytest -q -n $(WORKERS) --dist worksteal --slow tests/test_commands.py

site: $(READY_DOCS)
	$(PY) -m sphinx -q -W --keep-going -E -b html docs docs/_build/html
	BUILT_SITE=$(CURDIR)/docs/_build/html $(PY) -m pytest -q --slow tests/test_docs.py::test_site_builds_without_warnings

doctest: $(READY_DOCS)
	$(CACHED) $(QUICKLY) $(PY) -m pytest -q -n $(WORKERS) --dist worksteal --doctest-modules numpyro_orthgp

check: lint typecheck docs pages test  ## what continuous integration runs

package: $(READY_TEST)  ## wheel and sdist in dist/, checked; both are installed in bare environments, where README's first example runs
	$(PY) -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist build/clean build/from_sdist && $(PY) -m build --outdir dist .
	$(PY) -m twine check --strict dist/*
	$(PY) tests/distributions.py dist
	$(PYTHON) -m venv build/clean && build/clean/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && clean/bin/python ../tests/distributions.py --run ../README.md
	$(PYTHON) -m venv build/from_sdist && build/from_sdist/bin/pip install --quiet --disable-pip-version-check dist/*.tar.gz
	cd build && from_sdist/bin/python ../tests/distributions.py --run ../README.md

clean:  ## remove the environment, caches and outputs
	rm -rf $(VENV) out build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	$(PYTHON) -m venv $(VENV)

# A stamp per set of extras, newer than pyproject.toml once installed.
$(READY): pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[examples]'
	@touch $@

$(READY_TEST): pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test,examples]'
	@touch $@ $(READY)

$(READY_DOCS): pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[docs,examples]'
	@touch $@
