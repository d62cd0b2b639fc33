# Needs Python 3.11 or newer and make; nothing else. The first target that needs it creates .venv
# with the versions pinned in constraints.txt; a later run finds it in place and installs nothing.
#
# To use an environment that is already there, name its interpreter; then nothing is created or
# installed, and poros is imported from the checkout:
#     make gpu-test PYTHON=python3

SHELL := /bin/sh
# Bytecode is written as modules are imported, not of all of them as they are installed.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
VENV_OLDEST := .venv-oldest
PYTHON ?= $(VENV)/bin/python

# The stamp's name is a checksum of what the environment was made from, so a changed pin reinstalls,
# while a fresh checkout or a restored cache, which change only file times, do not.
checksum = $(shell cat pyproject.toml $(1) | cksum | tr -s ' \t' '--')
STAMP := $(VENV)/.installed-$(call checksum,constraints.txt)
STAMP_OLDEST := $(VENV_OLDEST)/.installed-$(call checksum,constraints-oldest.txt)
# Only our own environment is ever made or changed.
READY := $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(STAMP))

PYTEST := -m pytest -q
# Test files share two worker processes; on a GPU there is one, since memory is measured there.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
COMMA := ,

# What one runs between edits: exactness, refusals, slots and streams, layouts, house rules.
QUICK := exact/test_cells faults/test_refusals faults/test_missing_waits faults/test_restore \
	unit/test_slots unit/test_visits unit/test_host unit/test_bytes \
	unit/test_layer_index unit/test_compare unit/test_registry \
	unit/test_tools unit/test_imports unit/test_logging unit/test_covers

.PHONY: help venv demo docs quick test test-all test-oldest gpu-test peft-tests lint format types

help:
	@echo "make demo         build, fine-tune and check a small model, end to end"
	@echo "make test         the test suite: on the CPU, without the slow tests"
	@echo "make quick        a selection of it, for between edits: 1 minute on 2 cores"
	@echo "make test-all     the slow tests as well"
	@echo "make test-oldest  the test suite on the oldest versions that pyproject.toml admits"
	@echo "make gpu-test     the tests that need a CUDA device"
	@echo "make peft-tests   PEFT's own tests of LoRA, with our operator (PEFT_SOURCE=DIR)"
	@echo "make lint         ruff: rules and format        make format  apply both"
	@echo "make types        mypy"
	@echo "make docs         the documentation, into site/"
	@echo "make venv         only create .venv"

venv: $(STAMP)

# What the console script `poros` does, spelled out so that it works uninstalled too.
demo: $(READY)
	@$(PYTHON) -c "import sys; from poros.cli.app import main; sys.argv[0] = 'poros'; sys.exit(main())" \
		demo

# Links in a temporary folder, as for mypy: the layout of the wheel.
docs: $(STAMP)
	@tree=$$(mktemp -d) && trap 'rm -rf "$$tree"' EXIT && mkdir "$$tree/poros" \
	&& ln -s "$(CURDIR)"/poros/* "$(CURDIR)/loaders" "$(CURDIR)/gates" "$$tree/poros/" \
	&& POROS_TREE="$$tree" NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build -d site

quick: $(READY)
	$(PYTHON) $(PYTEST) $(PARALLEL) -m "not gpu and not slow" $(QUICK:%=tests/%.py)

test: $(READY)
	$(PYTHON) $(PYTEST) $(PARALLEL) -m "not gpu and not slow" --durations=10

test-all: $(READY)
	$(PYTHON) $(PYTEST) $(PARALLEL) -m "not gpu" --durations=20

test-oldest: $(STAMP_OLDEST)
	$(VENV_OLDEST)/bin/python $(PYTEST) $(PARALLEL) -m "not gpu and not slow" --durations=10

# Without the check, a machine whose GPU is not seen would skip every test and report success.
gpu-test: $(READY)
	@$(PYTHON) -c "import sys, torch; torch.cuda.is_available() or sys.exit( \
		'gpu-test: expected a CUDA device, but torch ' + torch.__version__ + ' of ' + sys.executable \
		+ ' sees none. Run it on a machine with a GPU, with an interpreter whose torch is built for' \
		' CUDA: make gpu-test PYTHON=...')"
	$(PYTHON) $(PYTEST) -m gpu --durations=10

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# mypy reports poros.loaders and poros.gates as missing in a checkout, whether installed in editable
# mode or not, because it does not follow the package map. Links in a temporary folder give it the
# layout of the wheel, with nothing to build.
types: $(STAMP)
	@tree=$$(mktemp -d) && trap 'rm -rf "$$tree"' EXIT && mkdir "$$tree/poros" \
	&& ln -s "$(CURDIR)"/poros/* "$(CURDIR)/loaders" "$(CURDIR)/gates" "$(CURDIR)/examples" \
		"$$tree/poros/" \
	&& ln -s "$(CURDIR)/tools" "$$tree/" \
	&& cd "$$tree" && "$(CURDIR)/$(VENV)/bin/python" -m mypy -p poros -p tools \
		--config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache"

# $(1) is the folder of the environment, $(2) its pins, $(3) the extras. An environment left half made is made
# again. The build back end is pinned and installed first, so that the build of poros uses it too.
define install
	@if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
		base=; \
		for python in python3.11 python3.12 python3.13 python3 python; do \
			if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
				2>/dev/null; then base=$$python; break; fi; \
		done; \
		if [ -z "$$base" ]; then \
			echo "make: expected Python 3.11 or newer, with its venv module, as python3.11," \
				"python3.12, python3.13, python3 or python on PATH; found none." \
				"Install one (on Debian and Ubuntu the packages python3 and python3-venv)." >&2; \
			exit 1; \
		fi; \
		echo "Creating $(1) with $$($$base --version)"; \
		$$base -m venv --clear $(1) || exit 1; \
	fi
	@echo "Installing the versions of $(2) into $(1); the first time this takes a few minutes"
	@rm -f $(1)/.installed-*
	@$(1)/bin/python -m pip install -q --disable-pip-version-check --no-compile -c $(2) setuptools
	@$(1)/bin/python -m pip install -q --disable-pip-version-check --no-compile -c $(2) \
		--no-build-isolation -e '.[$(3)]'
	@touch $@
endef

$(STAMP):
	$(call install,$(VENV),constraints.txt,dev$(COMMA)finetune$(COMMA)docs)

$(STAMP_OLDEST):
	$(call install,$(VENV_OLDEST),constraints-oldest.txt,dev)

# PEFT's own tests of LoRA, with our operator in its modules. They want PEFT's test dependencies.
PEFT_TESTS := LoraConfig or lora or dora or Lora or Dora
peft-tests: $(READY)
	@test -d "$(PEFT_SOURCE)/tests" || { echo "peft-tests: expected PEFT_SOURCE=DIR, the unpacked" \
		"sdist of the installed PEFT, found '$(PEFT_SOURCE)'"; exit 2; }
	touch $(PEFT_SOURCE)/tests/__init__.py
	cd $(PEFT_SOURCE) && HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR)/tests:$$PYTHONPATH \
		$(if $(filter /%,$(PYTHON)),$(PYTHON),$(CURDIR)/$(PYTHON)) $(PYTEST) -c /dev/null --rootdir . \
		-p peft_plugin -p no:cacheprovider -k "$(PEFT_TESTS)" tests/test_lora_variants.py \
		tests/test_custom_models.py tests/test_initialization.py
