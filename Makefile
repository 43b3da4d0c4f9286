# `make train` and `make test` work on a fresh machine with Python 3.11 and make: each makes .venv if need be.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_VENV := .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
ENVS_READY := $(BENCH_VENV)/.envs-ready
LOWEST_VENV := .venv-lowest
LOWEST_READY := $(LOWEST_VENV)/.ready
LOWEST_TESTS := core envs episodes modules metrics replay runners/test_runner.py learners/test_learner.py \
	learners/test_optimizers.py learners/test_numpy_q_learning.py algorithms/test_ppo.py checkpoint loggers
SAMPLES_VENV := .venv-samples
SAMPLES_READY := $(SAMPLES_VENV)/.ready
SERVICES_VENV := .venv-services
SERVICES_READY := $(SERVICES_VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
# Outside the clone, so that nothing of the clone is found there.
WALK_VENV := $(or $(TMPDIR),/tmp)/corral-walk$(subst /,-,$(CURDIR))
WALK_READY := $(WALK_VENV)/.ready
# Blocks of code on these pages have at most 88 characters per line, which fit the site.
NARROW_PAGES := $(wildcard docs/*.md docs/*/*.md)

.DEFAULT_GOAL := help
.PHONY: help train test pytest check slow lowest services samples wheel walk campaign bench bench-quick defaults tuned quality docs format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# torch goes first and alone: asked for together with the rest, pip may take a build with CUDA. Bytecode is made on all
# cores at the end, which takes half as long as pip does; some packages hold templates that are no Python.
$(READY): requirements/torch.txt requirements/base.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --requirement requirements/torch.txt
	$(BIN)/pip install --quiet --no-compile --requirement requirements/base.txt --requirement requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

train: $(READY) ## train PPO on CartPole-v1 to a mean return of 450, with the settings of examples/cartpole.yaml
	$(BIN)/corral train --config examples/cartpole.yaml

check: $(READY) ## lint, types, spelling and plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 88 $(NARROW_PAGES)
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python tools/check_english.py

# The processes that tests start find bytecode, and do not compile the sources again.
test pytest slow lowest: export PYTHONDONTWRITEBYTECODE =

# mypy has one thread, so the tests begin next to the checks.
test: $(READY) ## check, and all tests that are not slow
	@$(MAKE) --no-print-directory --jobs 2 check pytest

pytest: $(READY)
	$(BIN)/python -m pytest -n 3

slow: $(READY) ## the tests that `make test` leaves out, mostly second forms on real Ray and in processes
	$(BIN)/python -m pytest -n 2 -m slow

$(LOWEST_READY): requirements/lowest.txt pyproject.toml
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/pip install --quiet --no-compile --requirement requirements/lowest.txt
	@touch $@

# Native vector envs of Gymnasium 1.1 raise in __del__ where their constructor raised.
lowest: $(LOWEST_READY) ## the fast tests of the core, with the lowest version of each dependency that pyproject.toml declares
	PYTHONPATH=$(CURDIR)/src $(LOWEST_VENV)/bin/python -m pytest -n 3 -W ignore::pytest.PytestUnraisableExceptionWarning \
		$(addprefix tests/,$(LOWEST_TESTS))

$(SAMPLES_READY): requirements/torch.txt requirements/base.txt requirements/dev.txt requirements/samples.txt
	$(PYTHON) -m venv $(SAMPLES_VENV)
	$(SAMPLES_VENV)/bin/pip install --quiet --requirement requirements/torch.txt
	$(SAMPLES_VENV)/bin/pip install --quiet --constraint requirements/base.txt --constraint requirements/dev.txt \
		--requirement requirements/samples.txt
	@touch $@

samples: $(SAMPLES_READY) ## write the sample files of other programs that tests read, with the pinned versions
	$(SAMPLES_VENV)/bin/python tests/make_foreign_samples.py

$(SERVICES_READY): $(READY) requirements/services.txt
	$(PYTHON) -m venv $(SERVICES_VENV)
	$(SERVICES_VENV)/bin/pip install --quiet --requirement requirements/torch.txt
	$(SERVICES_VENV)/bin/pip install --quiet --requirement requirements/base.txt --requirement requirements/services.txt
	$(SERVICES_VENV)/bin/pip install --quiet hatchling editables
	$(SERVICES_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

services: $(SERVICES_READY) ## the tests of the loggers, with Weights & Biases, MLflow and Trackio
	$(SERVICES_VENV)/bin/python -m pytest -n 2 tests/loggers

# With the newest versions, each of $(PYTHONS) is tried: make wheel PYTHONS="python3.11 python3.12 python3.13".
PYTHONS ?= $(PYTHON)
wheel: $(READY) ## build the wheel, and try it in clean environments, with the lowest and the newest versions of what it needs
	rm -rf dist build && mkdir build
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	sed 's/\[.*\]//' requirements/lowest.txt > build/lowest.txt
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/pip install --quiet --constraint build/lowest.txt "$$(ls dist/corral-*.whl)[report,tensorboard]"
	build/lowest/bin/python tools/smoke.py
	set -e; for python in $(PYTHONS); do \
		newest=build/newest-$$(basename $$python); \
		$$python -m venv $$newest; \
		$$newest/bin/pip install --quiet --requirement requirements/torch.txt; \
		$$newest/bin/pip install --quiet "$$(ls dist/corral-*.whl)[report,tensorboard]"; \
		$$newest/bin/python tools/smoke.py; \
	done

$(WALK_READY): requirements/torch.txt pyproject.toml
	rm -rf $(WALK_VENV)
	$(PYTHON) -m venv $(WALK_VENV)
	$(WALK_VENV)/bin/pip install --quiet --requirement requirements/torch.txt
	$(WALK_VENV)/bin/pip install --quiet "$$(ls dist/corral-*.whl)[all]"
	@touch $@

walk: $(READY) ## run all commands and blocks of the README and of docs/ with the installed wheel, from empty folders; PAGES="docs/cli.md" chooses some
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@$(MAKE) --no-print-directory $(WALK_READY)
	$(WALK_VENV)/bin/pip install --quiet --no-deps --force-reinstall dist/corral-*.whl
	cd / && env -u PYTHONPATH $(WALK_VENV)/bin/python $(CURDIR)/tests/docs/walk.py $(PAGES)

campaign: $(READY) ## a thousand runs in which something fails, with a table in benchmarks/RELIABILITY.md; 200 faults of runners on each engine; 200 kills of savers
	$(BIN)/python benchmarks/campaign.py
	NUM_FAULTS=200 $(BIN)/python -m pytest -m "" tests/faults/test_campaign.py
	NUM_KILLS=200 NUM_FUZZED_FILES=10000 $(BIN)/python -m pytest -m "" tests/checkpoint/test_killed_savers.py \
		tests/checkpoint/test_hostile_files.py tests/faults/test_fuzzed_files.py

$(BENCH_READY): requirements/torch.txt benchmarks/requirements-rivals.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet --requirement requirements/torch.txt
	$(BENCH_VENV)/bin/pip install --quiet --requirement benchmarks/requirements-rivals.txt
	@touch $@

bench: $(READY) $(BENCH_READY) ## measure against RLlib and Stable-Baselines3, and write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/run.py --rivals-python $(BENCH_VENV)/bin/python

bench-quick: $(READY) $(BENCH_READY) ## the main measures of `make bench`, two pairs each, in 15 minutes
	$(BIN)/python benchmarks/run.py --main --rivals-python $(BENCH_VENV)/bin/python

$(ENVS_READY): $(READY) $(BENCH_READY) benchmarks/requirements-envs.txt
	$(BIN)/pip install --quiet --requirement benchmarks/requirements-envs.txt
	$(BENCH_VENV)/bin/pip install --quiet --requirement benchmarks/requirements-envs.txt
	@touch $@

defaults: $(ENVS_READY) ## compare what the default settings learn with Stable-Baselines3's, and write benchmarks/DEFAULTS.md
	$(BIN)/python benchmarks/defaults.py --sb3-python $(BENCH_VENV)/bin/python

tuned: $(ENVS_READY) ## measure what the tuned settings learn, and write benchmarks/TUNED.md; days for all of them
	$(BIN)/python benchmarks/tuned.py

quality: $(ENVS_READY) ## measure env steps and CPU seconds to a return, and write benchmarks/QUALITY.md; ONLY="ENV ENV:ROW" measures a part
	$(BIN)/python benchmarks/quality.py --sb3-python $(BENCH_VENV)/bin/python $(if $(ONLY),--only $(ONLY))

$(DOCS_READY): $(READY) requirements/docs.txt
	$(BIN)/pip install --quiet --requirement requirements/docs.txt
	@touch $@

docs: $(DOCS_READY) ## build the documentation into site/; REPOSITORY=https://host/owner/name adds links to a repository
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --builder html docs site

format: $(READY) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/ruff format --line-length 88 $(NARROW_PAGES)

clean: ## remove everything that make made
	rm -rf $(VENV) $(BENCH_VENV) $(LOWEST_VENV) $(SAMPLES_VENV) $(SERVICES_VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
