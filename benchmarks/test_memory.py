"""Peak extra memory, each figure from a fresh process (tests/probe_memory.py says how). Its seconds are that process's whole life."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.implementations import IMPLEMENTATIONS, Missing
from benchmarks.inputs import Case

PROBE = Path(__file__).parent.parent / "tests" / "probe_memory.py"
# contestant -> the probe's mode. "naive" and all but "forward" are forward + backward.
MODES = {
    "naive": "naive",
    "forward": "forward",
    "ours": "default",
    "ours_one_pass": "one_pass",
    "ours_inplace_backward": "inplace",
    "ours_inplace": "one_pass+inplace",
}


@pytest.mark.parametrize("contestant", MODES)
def test_memory(case: Case, contestant: str, benchmark: Any, keep_result: Callable[[str, str], None], absent: Callable[..., None]) -> None:
    try:
        IMPLEMENTATIONS["ours"].needs()
    except Missing as error:
        absent("memory", contestant, error)
    options = {"mode": MODES[contestant], "dtype": case.dtype, "rows": case.rows, "vocab": case.vocab}
    command = [sys.executable, str(PROBE), *(f"--{name}={value}" for name, value in options.items())]
    child = benchmark.pedantic(subprocess.run, (command,), {"capture_output": True, "text": True}, rounds=1)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["logits_bytes"] == case.logits_bytes
    benchmark.extra_info |= {"extra_bytes": found["extra_bytes"], "of_logits": found["ratio"]}
    keep_result("memory", contestant)
