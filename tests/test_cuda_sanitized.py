"""The CUDA kernels on a CPU under AddressSanitizer and UndefinedBehaviorSanitizer, and faults that have to be seen.

They are built once more for that, with kernels beside them that have a fault each (native/planted.cu), and run in child processes: a
sanitizer's runtime has to be loaded before Python. A part of the tests here; all of them, and more time, in `make test-all`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated("cuda_on_host")

TESTS = Path(__file__).resolve().parent
# One process runs this file (pytest -n --dist loadfile), so that the build is made once.
FILES = ("test_cuda_on_host.py", "test_edges.py", "test_advantages.py")
# Every split in every layout, dtype and mode, whatever a row may hold, every kernel.
PART = "test_edges or test_advantages or every_split_is_right or outside_the_row or minus_infinity_alone or finds_nothing or launches"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # In the folder of the tests: Python would put the folder above, which holds sources without a compiled module, in front.
    return subprocess.run(
        [*map(str, command)], cwd=TESTS, env=inherited | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that runs the sanitized kernels as the only backend."""
    import ninja
    import pybind11

    import cmake

    folder = tmp_path_factory.mktemp("sanitized")
    tool = Path(cmake.CMAKE_BIN_DIR) / "cmake"
    options = {
        "CUDA_ON_HOST_SANITIZE": "address,undefined",
        "CUDA_ON_HOST_WITH": TESTS / "native/planted.cu",
        "CMAKE_CXX_FLAGS_RELEASE": "-O1",  # compiles in 51 s, at -O3 in 129
        "CMAKE_MAKE_PROGRAM": Path(ninja.BIN_DIR) / "ninja",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    configured = run(tool, "-S", TESTS.parent / "csrc/host", "-B", folder, "-G", "Ninja", *(f"-D{k}={v}" for k, v in options.items()))
    assert configured.returncode == 0, configured.stdout
    built = run(tool, "--build", folder)
    assert built.returncode == 0, built.stdout
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, flags=re.MULTILINE)[1]
    # libstdc++ too: AddressSanitizer looks for what throws exceptions when it starts.
    runtimes = [run(compiler, f"-print-file-name={name}").stdout.strip() for name in ("libasan.so", "libstdc++.so.6")]
    if not all(Path(runtime).is_absolute() for runtime in runtimes):
        pytest.skip(f"{compiler} has no libasan.so to load before Python: g++ has")
    return {
        "LD_PRELOAD": " ".join(runtimes),
        # Python frees little at its end; a test's probe of forbidden memory wants its signal.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "GRPO_KERNELS_CUDA_ON_HOST": str(next(folder.glob("_cuda_on_host.*.so"))),
        "GRPO_KERNELS_TEST_BACKENDS": "cuda_on_host",
        "OMP_NUM_THREADS": "1",
    }


PLANTED = """
import ctypes, os, sys
planted = ctypes.CDLL(os.environ["GRPO_KERNELS_CUDA_ON_HOST"]).planted
planted.argtypes, planted.restype = [ctypes.c_char_p], ctypes.c_char_p
print("said:", planted(sys.argv[1].encode()).decode())
"""


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("sound", "^said: $"),
        ("writes_behind_the_array", "AddressSanitizer: heap-buffer-overflow(?s:.*)WRITE of size 4(?s:.*)writes_behind_the_array"),
        ("reads_behind_the_array", "AddressSanitizer: heap-buffer-overflow(?s:.*)READ of size 4(?s:.*)reads_behind_the_array"),
        ("writes_behind_a_local_array", "AddressSanitizer: stack-buffer-overflow|index 4 out of bounds for type"),
        ("loads_a_misaligned_vector", "said: .*: block 0: a misaligned access"),
        ("stores_a_misaligned_vector", "said: .*: block 0: a misaligned access"),
        ("writes_behind_shared_memory", "said: .*: block 0: an access outside the shared memory of the block"),
        ("reads_shared_memory_that_nobody_wrote", "said: .*: thread 0 reads shared memory that nobody wrote, byte 0"),
        ("two_threads_write_one_word", "said: .*: race in shared memory, byte 0: thread 0 wrote, thread 1 writes, no barrier between"),
        ("reads_without_a_barrier", "said: .*: race in shared memory, byte 0: thread 0 wrote, thread 1 reads, no barrier between"),
        ("overwrites_without_a_barrier", "said: .*: race in shared memory, byte 0: thread 63 read, thread 0 writes, no barrier between"),
        ("half_of_the_block_waits", "said: .*: a barrier or a shuffle that some threads never reach"),
        ("an_integer_overflows", "runtime error: signed integer overflow(?s:.*)an_integer_overflows"),
    ],
)
def test_a_planted_fault_is_seen(kernel: str, fault: str, sanitized: dict[str, str]) -> None:
    process = run(sys.executable, "-c", PLANTED, kernel, **sanitized)
    assert re.search(fault, process.stdout, flags=re.MULTILINE), process.stdout
    assert (process.returncode == 0) == ("said: " in process.stdout)


LONGER_ROWS = """
import sys
import torch
import grpo_kernels as gk
assert gk.available_backends()["cuda_on_host"] == "available"
gradients, factor = torch.zeros(1000), torch.full((), 2.0)
vocab = 1000 + int(sys.argv[1])
sys.modules["_cuda_on_host"].cuda.scale((0, 1, 1, vocab), (gradients.data_ptr(), vocab, vocab), factor.data_ptr(), (0, 0))
print("returned")
"""


@pytest.mark.parametrize("columns", [0, 1, 8])
def test_a_real_kernel_that_is_told_of_more_columns_than_there_are_is_seen(columns: int, sanitized: dict[str, str]) -> None:
    """torch's memory is watched: a kernel that went beyond a row's end anywhere in the tests below would be."""
    process = run(sys.executable, "-c", LONGER_ROWS, str(columns), **sanitized)
    assert ("returned" in process.stdout) == (columns == 0), process.stdout
    assert bool(re.search("AddressSanitizer: heap-buffer-overflow(?s:.*)scale_kernel", process.stdout)) == (columns > 0), process.stdout


def suite(sanitized: dict[str, str], *arguments: str) -> int:
    """Runs tests; every one must pass. Returns how many did."""
    # -s: what a sanitizer says before it ends the process would be lost with what pytest had caught.
    process = run(sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *arguments, **sanitized)
    assert process.returncode == 0, process.stdout[-10000:]
    assert not re.search("runtime error|AddressSanitizer", process.stdout), process.stdout
    return int(re.search(r"(\d+) passed", process.stdout)[1])


def test_a_part_of_the_suite_is_clean(sanitized: dict[str, str]) -> None:
    assert suite(sanitized, "-m", "emulated and not serial and not slow", *FILES, "-k", PART) >= 150


@pytest.mark.slow  # all of it
def test_the_suite_is_clean(sanitized: dict[str, str]) -> None:
    assert suite(sanitized, "-m", "emulated and not serial", f"--ignore={Path(__file__).name}", ".") > 1000
