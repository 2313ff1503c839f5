# One command to see it learn (make demo), one to check it (make test); `make help` lists the rest.
#
# Everything happens in .venv, against the wheel that is built and installed there: never against the source folder, which has no
# compiled module. A wheel carries the checksum of what it was made from (ID), so an old one is never taken for the current source,
# and nothing is built or installed twice.

PYTHON ?= python3
# test processes, one torch thread each
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
checksum = cksum | tr ' ' -
SOURCES = find README.md LICENSE MANIFEST.in CMakeLists.txt constraints.txt pyproject.toml setup.py cmake csrc grpo_kernels python \
	-type f ! -name '*.so' ! -name '*.pyc' | LC_ALL=C sort
PYTHON_ID := $(shell $(PYTHON) -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null | $(checksum))
ID := $(shell { echo '$(PYTHON_ID) $(CXX) $(CXXFLAGS) $(LDFLAGS) $(CMAKE_ARGS)'; $(SOURCES) | xargs cksum; } 2>/dev/null | $(checksum))
# stamp: this wheel is installed in .venv, with the extra $(1)
ready = $(VENV)/ready-$(ID)-$(1)

.PHONY: help demo test test-all lint bench bench-full wheel clean
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(call ready,trainer) ## train a small model from scratch, on the CPU, and show what it learned
	$(BIN)/grpo-train --demo --output-dir runs/demo

# grpo-train and pytest as scripts: `python -m` would put this folder first on the path. Tests that start `python -m` themselves are
# kept from it by PYTHONSAFEPATH (Python 3.11 on).
PYTEST = PYTHONSAFEPATH=1 $(BIN)/pytest
IN_PARALLEL = OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile

test: $(call ready,test) ## build, install and test the wheel
	$(IN_PARALLEL) -m 'not serial and not slow' tests
	$(PYTEST) -m 'serial and not slow' tests

test-all: $(call ready,test) ## the tests that CI has no time for as well
	$(IN_PARALLEL) -m 'not serial' tests
	$(PYTEST) -m serial tests

lint: $(call ready,dev) ## linters, formats and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

bench: $(call ready,bench) ## time and memory beside plain PyTorch, small sizes
	$(PYTEST) benchmarks -k smoke --benchmark-only

bench-full: $(call ready,bench) ## the same at full size
	$(PYTEST) benchmarks --benchmark-only

wheel: dist/.made-from-$(ID) ## only build the wheel, into dist/
	@ls dist/*.whl

clean: ## remove what these commands made, except runs/
	rm -rf $(VENV) dist build *.egg-info grpo_kernels/_C*.so

$(VENV)/ready-$(ID)-%: dist/.made-from-$(ID)
	@find $(VENV) -maxdepth 1 -name 'ready-*' ! -name 'ready-$(ID)-*' -delete
	$(BIN)/pip install -c constraints.txt "$$(ls dist/*.whl)[$*]"
	$(BIN)/pip install --quiet --force-reinstall --no-deps dist/*.whl # the version alone would not tell a changed source
	@touch $@

dist/.made-from-$(ID): $(VENV)/made-by-$(PYTHON_ID)
	@rm -f dist/*.whl dist/.made-from-*
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/pip wheel --no-deps -w dist .
	@touch $@

# What is needed before anything is downloaded. pip and CMake would say the same, minutes later and in many more lines.
compilers = $(if $(filter default,$(origin CXX)),c++ g++ clang++,$(firstword $(CXX)))
comma := ,
stop = { echo "error: $(1)" >&2; exit 1; }
$(VENV)/made-by-$(PYTHON_ID):
	@command -v $(PYTHON) >/dev/null || $(call stop,there is no $(PYTHON). Install Python 3.10 or newer$(comma) or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || $(call stop,$$($(PYTHON) -V 2>&1) is too old: Python 3.10 or newer is needed. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call stop,$$($(PYTHON) -V 2>&1) cannot make virtual environments. Debian and Ubuntu: apt install python3-venv)
	@$(PYTHON) -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || $(call stop,Python.h$(comma) the headers of $$($(PYTHON) -V 2>&1)$(comma) are missing. Debian and Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)
	@for name in $(compilers); do command -v $$name >/dev/null && exit; done; $(call stop,there is no C++ compiler ($(compilers)). Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++)
	@rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@
