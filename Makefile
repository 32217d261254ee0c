# The one list of commands. Every target works from a clean clone with python 3.11 or newer and pip: the first one
# creates .venv, which is created again when pyproject.toml or constraints.txt change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
PACKAGE := '.[all,dev]'
SIDE_BY_SIDE := -n 3 --dist worksteal

# Debian's packages, where this user may install them: jpegtran stores JPEGs in tiles, chromium shows the pages.
install_package = { test "$$(id -u)" = 0 && export DEBIAN_FRONTEND=noninteractive && \
	{ apt-get install -y --no-install-recommends $(1) || \
	{ apt-get update && apt-get install -y --no-install-recommends $(1); }; }; }

# Settings of the caller for other Pythons must not leak into this one.
unexport PYTHONHOME PYTHONPATH PYTEST_ADDOPTS VIRTUAL_ENV
# The tests start hundreds of processes: without bytecode each compiles the library again, a third of its time.
unexport PYTHONDONTWRITEBYTECODE

# Says nothing when the command succeeds, and all of its output when it fails.
quietly = output=$$($(1) 2>&1) || { printf '%s\n' "$$output" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench docs dist fix clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(STAMP) ## see it work
	@$(BIN)/penstock demo

test: $(STAMP) ## what a change has to pass
	@$(MAKE) --no-print-directory check & checking=$$!; \
	$(BIN)/pytest $(SIDE_BY_SIDE); passed=$$?; \
	wait $$checking && exit $$passed

test-all: check ## the same with the full counts; takes long
	@PENSTOCK_FULL=1 $(BIN)/pytest $(SIDE_BY_SIDE) --timeout=1200 -o faulthandler_timeout=1200

check: $(STAMP) ## lint, format, types and import layers
	@$(call quietly,$(BIN)/ruff check .)
	@$(call quietly,$(BIN)/ruff format --check .)
	@$(call quietly,$(BIN)/mypy)
	@$(call quietly,$(BIN)/basedpyright --pythonpath $(BIN)/python)
	@$(call quietly,$(BIN)/lint-imports --no-logo)

bench: $(STAMP) ## measure Penstock beside its peers; CASE=images PEERS=webdataset,torch ROUNDS=3 for a part of it
	@$(BIN)/python benchmarks/run.py $(CASE) $(if $(PEERS),--peers $(PEERS)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(BENCH)

docs: $(STAMP) ## build the site into build/site, strictly and without a network
	@$(call quietly,NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict)
	@echo 'python -m http.server -d build/site shows it'

dist: $(STAMP) ## build the wheel and the sdist, and try both in an empty environment
	@rm -rf dist
	@$(call quietly,$(BIN)/python -m build --no-isolation --outdir dist .)
	@$(BIN)/python tests/try_dist.py dist

fix: $(STAMP) ## let lint and format repair what they can
	@$(call quietly,$(BIN)/ruff check --fix .)
	@$(call quietly,$(BIN)/ruff format .)

clean: ## remove what the other targets created
	@rm -rf .venv benchmarks/.data benchmarks/.envs .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The first call that asks for torch must see the pin of torch: hence one call, with the constraints.
$(STAMP): pyproject.toml constraints.txt
	@echo 'Setting up .venv: a minute or two, once.' >&2
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@$(call quietly,$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e $(PACKAGE))
	@command -v jpegtran >/dev/null || $(call install_package,libjpeg-turbo-progs) >/dev/null 2>&1 || echo 'jpegtran is not installed: tiles will not be tested with it.' >&2
	@{ command -v chromium && command -v chromedriver; } >/dev/null || $(call install_package,chromium chromium-driver fonts-dejavu-core) >/dev/null 2>&1 || echo 'chromium is not installed: the pages of penstock view will not be tested in a browser.' >&2
	@touch $@
