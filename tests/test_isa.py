"""Every instruction set that this machine has gives the right answers, in a child process each: it is chosen once, when the first
kernel runs. The suite itself runs the best one; what this machine lacks is listed among the skipped tests."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels import available_backends

TESTS = Path(__file__).parent
NAMES = ("baseline", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("portable",)
FILES = ("test_logprobs.py", "test_loss.py", "test_edges.py", "test_bits.py", "test_faults.py")
# Every dtype, vocabulary, mode and layout, every edge that a vector could get wrong.
SUBSET = (
    "both_gradients_are_within_budget or stay_in_their_range or every_pair_of_options or bits_of_its_copy or impossible_columns"
    " or degenerate_row or extreme_temperatures or largest_finite or constant_added or bits_in_every_batch or at_every_address"
    " or backward_rounds or torchs_rounding"
)
RUN = "import sys, pytest; from grpo_kernels import _C; assert _C.isa() == sys.argv[1]; sys.exit(pytest.main(sys.argv[2:]))"


def child(name: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"GRPO_KERNELS_ISA": name, "GRPO_KERNELS_TEST_BACKENDS": "cpu", "OMP_NUM_THREADS": "1"}
    # In the folder of the tests: Python would put the folder above, which holds sources without a compiled module, in front.
    return subprocess.run([sys.executable, *command], env=environment, cwd=TESTS, capture_output=True, text=True, timeout=900)


def backend_cpu() -> tuple[str, ...]:
    if "cpu" not in os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "cpu"):
        pytest.skip("GRPO_KERNELS_TEST_BACKENDS leaves out cpu")
    assert available_backends()["cpu"] == "available"
    from grpo_kernels import _C

    return _C.isas()


def test_the_best_instruction_set_is_chosen() -> None:
    isas = backend_cpu()
    from grpo_kernels import _C

    assert set(isas) <= set(NAMES) and isas[0] == NAMES[0]
    assert _C.isa() == os.environ.get("GRPO_KERNELS_ISA", isas[-1])


@pytest.mark.parametrize("name", NAMES)
def test_the_numerics_hold_on(name: str) -> None:
    isas = backend_cpu()
    if name not in isas:
        pytest.skip(f"this machine does not have {name}")
    from grpo_kernels import _C

    if name == _C.isa():
        return  # the whole suite runs on it
    options = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml"), "-k", SUBSET]
    done = child(name, "-c", RUN, name, *options, *FILES)
    assert done.returncode == 0, f"on {name}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    assert " passed" in done.stdout


def test_an_unusable_instruction_set_is_reported_with_the_reason() -> None:
    isas = backend_cpu()
    report = "import grpo_kernels; print(grpo_kernels.available_backends()['cpu'])"
    for name in ("sse9", *(name for name in NAMES if name not in isas)):
        done = child(name, "-c", report)
        assert f"GRPO_KERNELS_ISA={name}" in done.stdout, done.stdout + done.stderr
