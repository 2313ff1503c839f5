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
comma := ,
checksum = cksum | tr ' ' -
SOURCES = find README.md LICENSE MANIFEST.in CMakeLists.txt constraints*.txt nvcc.txt pyproject.toml setup.py cmake csrc grpo_kernels python \
	-type f ! -name '*.so' ! -name '*.pyc' | LC_ALL=C sort
PYTHON_ID := $(shell $(PYTHON) -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null | $(checksum))
# Tests have CUDA kernels to test everywhere: without an nvcc of the system, the one that nvcc.txt names builds their wheel. The demo does
# not wait for that.
NVCC := $(or $(CUDACXX),$(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
ifeq ($(NVCC),)
OWN_NVCC := $(VENV)/nvcc/nvidia/cu13/bin/nvcc
CUDACXX_OF_TESTS := CUDACXX=$(CURDIR)/$(OWN_NVCC)
endif
FLAGS = $(CXX) $(CXXFLAGS) $(LDFLAGS) $(CMAKE_ARGS) $(GRPO_KERNELS_CUDA) $(TORCH_CUDA_ARCH_LIST) $(CUDAARCHS) $(CUDAFLAGS)
ID := $(shell { echo '$(PYTHON_ID) $(FLAGS) $(NVCC)'; $(SOURCES) | xargs cksum; } 2>/dev/null | $(checksum))

kind = $(if $(NVCC)$(filter test dev,$(1))$(wildcard dist/.made-from-$(ID)-cuda),cuda,cpu)
# stamp: this wheel is installed in .venv, with the extra $(1)
ready = $(VENV)/ready-$(ID)-$(kind)-$(1)

.PHONY: help demo test test-emulated test-all cuda-on-host lint bench bench-full wheel clean
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(call ready,trainer) ## train a small model from scratch, on the CPU, and show what it learned
	$(BIN)/grpo-train --demo --output-dir runs/demo

# grpo-train and pytest as scripts: `python -m` would put this folder first on the path. Tests that start `python -m` themselves are
# kept from it by PYTHONSAFEPATH (Python 3.11 on).
PYTEST = PYTHONSAFEPATH=1 GRPO_KERNELS_VERL=$(CURDIR)/$(VENV)/verl $(CUDACXX_OF_TESTS) $(BIN)/pytest
IN_PARALLEL = OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile
# GPU kernels on a CPU: Triton's interpreter, and the CUDA kernels as built by the target cuda-on-host
EMULATED = TRITON_INTERPRET=1 GRPO_KERNELS_TEST_BACKENDS=triton,cuda_on_host GRPO_KERNELS_CUDA_ON_HOST=$$(ls $(CURDIR)/$(ON_HOST)/_cuda_on_host.*) $(IN_PARALLEL)

test: $(call ready,test) $(VENV)/verl ## build, install and test the wheel
	$(IN_PARALLEL) -m 'not serial and not slow and not emulated' tests
	$(PYTEST) -m 'serial and not slow and not emulated' tests
	$(MAKE) test-emulated

test-emulated: cuda-on-host ## the GPU kernels alone, in emulators on the CPU
	$(EMULATED) -m 'emulated and not serial and not slow' tests

test-all: cuda-on-host $(VENV)/verl ## the tests that CI has no time for as well
	$(IN_PARALLEL) -m 'not serial and not emulated' tests
	$(PYTEST) -m 'serial and not emulated' tests
	$(EMULATED) -m emulated tests

# SANITIZE=address,undefined instruments it
ON_HOST = build/cuda-on-host$(addprefix -,$(subst $(comma),-,$(SANITIZE)))
cuda-on-host: $(call ready,test) ## build the CUDA kernels for the CPU, for tests, and print where the module is
	@$(CUDACXX_OF_TESTS) $(BIN)/cmake -S csrc/host -B $(ON_HOST) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) -DCUDA_ON_HOST_SANITIZE=$(SANITIZE) --log-level=WARNING
	@$(BIN)/cmake --build $(ON_HOST)
	@ls $(CURDIR)/$(ON_HOST)/_cuda_on_host.*

lint: $(call ready,dev) ## linters, formats and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc tests/native -name '*.h' -o -name '*.cpp' -o -name '*.cu*' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

bench: $(call ready,bench) ## time and memory beside plain PyTorch, small sizes
	$(PYTEST) benchmarks -k smoke --benchmark-only

bench-full: $(call ready,bench) ## the same at full size
	$(PYTEST) benchmarks --benchmark-only

wheel: dist/.made-from-$(ID)-$(kind) ## only build the wheel, into dist/
	@ls dist/*.whl

clean: ## remove what these commands made, except runs/
	rm -rf $(VENV) dist build *.egg-info grpo_kernels/_C*.so

$(VENV)/ready-$(ID)-cuda-%: dist/.made-from-$(ID)-cuda
	$(install)
$(VENV)/ready-$(ID)-cpu-%: dist/.made-from-$(ID)-cpu
	$(install)

# A CUDA build of torch comes with the triton that it needs; beside a CPU build constraints-cpu.txt chooses. The version of the wheel alone
# would not tell a changed source.
define install
@find $(VENV) -maxdepth 1 -name 'ready-*' ! -name 'ready-$(ID)-*' -delete
$(BIN)/pip install -c constraints.txt torch
cpu=$$($(BIN)/python -c 'import torch; print("" if torch.version.cuda else "-c constraints-cpu.txt")') && \
	$(BIN)/pip install -c constraints.txt $$cpu "$$(ls dist/*.whl)[$*]"
$(BIN)/pip install --quiet --force-reinstall --no-deps dist/*.whl
@touch $@
endef

dist/.made-from-$(ID)-cuda: $(OWN_NVCC)
dist/.made-from-$(ID)-cuda: CUDACXX_OF_WHEEL = $(CUDACXX_OF_TESTS)
dist/.made-from-$(ID)-cuda dist/.made-from-$(ID)-cpu: $(VENV)/made-by-$(PYTHON_ID)
	@rm -f dist/*.whl dist/.made-from-*
	$(CUDACXX_OF_WHEEL) PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/pip wheel --no-deps -w dist .
	@touch $@

# In a folder of its own: a CUDA build of torch has its own opinion of the versions.
$(VENV)/nvcc/%/nvcc: $(VENV)/made-by-$(PYTHON_ID) nvcc.txt
	@rm -rf $(VENV)/nvcc
	$(BIN)/pip install --no-deps --target $(VENV)/nvcc -r nvcc.txt
	@touch $@

# In a folder of its own: it asks for older versions than the other tests use. Empty where Python is one that verl does not take.
$(VENV)/verl: tests/verl.txt $(VENV)/made-by-$(PYTHON_ID)
	@rm -rf $@ && mkdir -p $@
	$(BIN)/pip install --no-deps --target $@ -r tests/verl.txt
	@touch $@

# What is needed before anything is downloaded. pip and CMake would say the same, minutes later and in many more lines.
compilers = $(if $(filter default,$(origin CXX)),c++ g++ clang++,$(firstword $(CXX)))
stop = { echo "error: $(1)" >&2; exit 1; }
$(VENV)/made-by-$(PYTHON_ID):
	@command -v $(PYTHON) >/dev/null || $(call stop,there is no $(PYTHON). Install Python 3.10 or newer$(comma) or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || $(call stop,$$($(PYTHON) -V 2>&1) is too old: Python 3.10 or newer is needed. Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call stop,$$($(PYTHON) -V 2>&1) cannot make virtual environments. Debian and Ubuntu: apt install python3-venv)
	@$(PYTHON) -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || $(call stop,Python.h$(comma) the headers of $$($(PYTHON) -V 2>&1)$(comma) are missing. Debian and Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)
	@for name in $(compilers); do command -v $$name >/dev/null && exit; done; $(call stop,there is no C++ compiler ($(compilers)). Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++)
	@rm -rf $(VENV) build/cuda-on-host*
	$(PYTHON) -m venv $(VENV)
	@touch $@
