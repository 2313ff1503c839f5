"""Peak extra memory from hidden states, each figure from a fresh process (hidden_memory.py); also in four times the rows, where ours grows
by dH alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hidden_memory import CONTESTANTS
from benchmarks.implementations import Missing
from benchmarks.inputs import Case

SHAPES = {
    "tiny": (4, 6, 1003, 24),
    "smoke": (4, 64, 32000, 256),
    "full": (4, 256, 151936, 896),
    "full_4096": (4, 1024, 151936, 896),
}
COPIES = 5  # of float32 logits: what naive_float holds at its peak, a little more
PROBE = Path(__file__).parent / "hidden_memory.py"


@pytest.fixture(scope="module")
def measured(case: Case) -> dict[str, int]:
    """contestant -> bytes, of this case so far."""
    return {}


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_hidden_memory(
    case: Case,
    contestant: str,
    benchmark: Any,
    measured: dict[str, int],
    keep_result: Callable[[str, str], None],
    absent: Callable[..., None],
) -> None:
    if contestant == "naive_float" and case.dtype == "float32":
        absent("hidden_memory", contestant, Missing("the same as naive for float32"))
    needed = COPIES * 4 * case.rows * case.vocab if contestant.startswith("naive") else 0
    if needed > (free := _available()):
        absent("hidden_memory", contestant, Missing(f"takes up to {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"))
    options = {"dtype": case.dtype, "rows": case.rows, "vocab": case.vocab, "width": case.width}
    command = [sys.executable, str(PROBE), contestant, *(f"--{name}={value}" for name, value in options.items())]
    child = benchmark.pedantic(subprocess.run, (command,), {"capture_output": True, "text": True}, rounds=1)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    if reason := found.get("missing"):
        absent("hidden_memory", contestant, Missing(reason))
    extra = measured[contestant] = found["extra_bytes"]
    shares = {f"of_{name}": extra / measured[name] for name in ("naive", "naive_float") if measured.get(name)}
    benchmark.extra_info |= {"extra_bytes": extra, "of_logits": extra / case.logits_bytes, **shares}
    keep_result("hidden_memory", contestant)


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
