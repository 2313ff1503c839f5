"""The Triton kernels as the compiler leaves them, for every architecture that is claimed, without a GPU. tests/triton_compiled.py builds
and reads them, in a process of its own that has no interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is an extra")

ROOT = Path(__file__).resolve().parents[1]
OVER_LOGITS = ("logprobs_forward", "logprobs_backward", "loss_and_grad", "scale")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
REGISTERS = 128  # of 65,536 for the 512 threads of a row's program: one program always fits
# Sweeps in a kernel's code that load, and that store: fill_row stands in the backward and in the one pass once, beside the gradient.
LOADS = {"logprobs_forward": 1, "logprobs_backward": 1, "loss_and_grad": 2, "scale": 1}
STORES = {"logprobs_forward": 0, "logprobs_backward": 2, "loss_and_grad": 2, "scale": 1}


def without_interpreter(*arguments: str) -> str:
    """What a Python without TRITON_INTERPRET prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "tests"), environment.get("PYTHONPATH"))))
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT / "tests")
    assert result.returncode == 0, result.stderr
    return result.stdout


@cache
def figures() -> list[dict[str, Any]]:
    return json.loads(without_interpreter("triton_compiled.py"))


def over_logits(rows: str) -> list[dict[str, Any]]:
    return [x for x in figures() if x["kernel"] in OVER_LOGITS and x["rows"] == rows]


def moves_whole_vectors(x: dict[str, Any]) -> bool:
    """Every sweep's access is 16 bytes wide; what is narrower is an argument of a row's own, the chosen logit or its gradient."""
    element = str(ITEMSIZE[x["dtype"]])
    repeat, chosen = x["constants"]["REPEAT"], int(x["kernel"] != "scale")
    return (
        x["loads"].get("16", 0) == repeat * LOADS[x["kernel"]]
        and x["stores"].get("16", 0) == repeat * STORES[x["kernel"]]
        and (element == "4" or (x["loads"].get(element, 0) == chosen and x["stores"].get(element, 0) <= chosen))
        and sum(x["loads"].values()) - x["loads"].get("16", 0) <= 12
    )


def test_every_kernel_compiles_for_every_architecture_and_dtype() -> None:
    built = {(x["kernel"], x["dtype"], x["rows"], x["architecture"]) for x in figures()}
    for architecture in (80, 90, 100):
        for kernel in OVER_LOGITS:
            for dtype in ITEMSIZE:
                assert {(kernel, dtype, rows, architecture) for rows in ("aligned", "unaligned")} <= built
        assert {kernel for kernel, _, _, a in built if a == architecture} > {"objective", "normalise", "sum_of_later_steps"}


def test_no_kernel_spills_or_touches_local_memory() -> None:
    for x in figures():
        assert (x["stack"], x["local"], x["local_accesses"]) == (0, 0, 0), x


def test_registers_and_shared_memory_are_within_budget() -> None:
    for x in figures():
        assert x["registers"] <= REGISTERS, x
        assert x["shared"] <= 256, x  # lanes are merged through it, once a row


def test_aligned_rows_are_loaded_and_stored_16_bytes_at_a_time() -> None:
    assert len(over_logits("aligned")) == 36
    for x in over_logits("aligned"):
        assert moves_whole_vectors(x), x


def test_the_check_of_widths_finds_rows_without_the_hint() -> None:
    assert len(over_logits("unaligned")) == 36
    for x in over_logits("unaligned"):
        assert not moves_whole_vectors(x), x
        assert "16" not in x["loads"] and "16" not in x["stores"], x  # such an address is a fault


def test_a_tile_costs_one_exponential_more_than_it_has_logits() -> None:
    for x in over_logits("aligned"):
        columns = x["constants"]["REPEAT"] * x["constants"]["PACK"]  # of a thread
        if x["kernel"] == "logprobs_forward":
            # and one where the lanes are merged; 3.2 gives a column to several lanes, and so has more to merge
            assert columns + 2 <= x["exponentials"] <= columns + 8, x


def test_the_committed_table_is_what_this_triton_makes() -> None:
    import triton

    page = (ROOT / "docs/triton.md").read_text()
    made_by = re.search(r"^Triton ([\d.]+)\. ", page, re.MULTILINE)
    assert made_by is not None
    rows = re.findall(r"^\| `(\w+)` \| (\w*) \| (\w*) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert {row[:4] for row in rows} == {(x["kernel"], x["dtype"], x["rows"], str(x["architecture"])) for x in figures()}
    if made_by[1] == triton.__version__:
        table = without_interpreter(
            "-c", f"import json, triton_compiled as c; print(c.table(json.loads({json.dumps(json.dumps(figures()))})))"
        )
        assert table.strip() in page, "python tests/triton_compiled.py docs/triton.md"
