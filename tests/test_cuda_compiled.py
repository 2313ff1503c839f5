"""The CUDA kernels as nvcc leaves them, for every architecture in the wheel, without a GPU: tests/cuda_compiled.py reads the machine code
of the installed module. `make test` installs one that has it; a build in place may have none."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cuda_compiled
from cuda_compiled import ROOT

pytest.importorskip("triton", reason="cuobjdump comes with Triton, which is an extra")
MODULE = importlib.import_module("grpo_kernels._C")
pytestmark = pytest.mark.skipif(not MODULE.cuda_archs(), reason="this build has no CUDA kernels: nvcc was missing, or unwanted")

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
OVER_LOGITS = ("logprobs_forward", "logprobs_backward", "loss_and_grad (portable)", "loss_and_grad (cluster)", "scale")
# 65,536 a multiprocessor: four blocks of 256 threads that sweep once, two of 384 that sweep twice, six of 128 of the advantages
REGISTERS = {"loss_and_grad (portable)": 80, "loss_and_grad (cluster)": 80, "normalise": 80}
VECTORS = 2  # of 16 bytes, a pack


@cache
def figures() -> list[dict[str, Any]]:
    return cuda_compiled.figures(Path(MODULE.__file__))


def of(kernel: str) -> list[dict[str, Any]]:
    found = [x for x in figures() if x["kernel"] == kernel]
    assert len(found) == len(MODULE.cuda_archs()) * len(ITEMSIZE)
    return found


def pack(x: dict[str, Any]) -> int:
    return VECTORS * 16 // ITEMSIZE[x["dtype"]]


def both_ways(x: dict[str, Any]) -> dict[str, int]:
    """Accesses of a pack: 16 bytes wide in whole steps and in the last one, an element at a time for a row that is misaligned or ends."""
    return {"16": 2 * VECTORS, str(ITEMSIZE[x["dtype"]]): pack(x)}


def test_every_kernel_is_there_for_every_architecture_and_dtype() -> None:
    built = {(x["kernel"], x["dtype"], x["architecture"]) for x in figures()}
    for architecture in MODULE.cuda_archs():
        assert {(kernel, dtype, architecture) for kernel in OVER_LOGITS for dtype in ITEMSIZE} <= built
        others = {(x["kernel"], x["dtype"]) for x in figures() if x["architecture"] == architecture and x["kernel"] not in OVER_LOGITS}
        assert others == {("objective", ""), ("normalise", "float32"), ("normalise", "float64"), ("steps_ahead", "")}


def test_no_kernel_spills_or_touches_local_memory() -> None:
    for x in figures():
        assert (x["stack"], x["local"], x["local_accesses"]) == (0, 0, 0), x


def test_registers_and_shared_memory_are_within_budget() -> None:
    for x in figures():
        assert x["registers"] <= REGISTERS.get(x["kernel"], 64), x
        assert x["shared"] in ((0, 1024) if x["architecture"] >= 90 else (0,)), x  # CUDA's own; all else the launcher asks for


def test_rows_are_loaded_and_stored_16_bytes_at_a_time() -> None:
    for x in of("logprobs_forward"):
        assert [sweep["loads"] for sweep in x["sweeps"]] == [both_ways(x)] and "16" not in x["stores"], x
    for x in of("logprobs_backward"):
        assert [(sweep["loads"], sweep["stores"]) for sweep in x["sweeps"]] == [(both_ways(x), both_ways(x))], x
    for x in of("loss_and_grad (portable)"):
        assert [(sweep["loads"], sweep["stores"]) for sweep in x["sweeps"]] == [(both_ways(x), {}), (both_ways(x), both_ways(x))], x
    for x in of("scale"):
        assert (x["loads"].get("16"), x["stores"].get("16")) == (2 * VECTORS, 2 * VECTORS), x


def test_a_cluster_keeps_the_row_in_shared_memory_16_bytes_at_a_time() -> None:
    """Logits are loaded by the first sweep alone."""
    for x in of("loss_and_grad (cluster)"):
        first, second = x["sweeps"]
        assert (first["loads"], first["shared_stores"], first["stores"]) == (both_ways(x), {"16": VECTORS}, {}), x
        assert (second["loads"], second["shared_loads"], second["stores"]) == ({}, {"16": VECTORS}, both_ways(x)), x


def test_a_pack_costs_one_exponential_more_than_it_has_logits() -> None:
    for x in of("logprobs_forward"):
        assert [sweep["exponentials"] for sweep in x["sweeps"]] == [pack(x) + 1], x
    for x in of("logprobs_backward"):
        assert [sweep["exponentials"] for sweep in x["sweeps"]] == [pack(x)], x
    for x in of("loss_and_grad (portable)") + of("loss_and_grad (cluster)"):
        assert [sweep["exponentials"] for sweep in x["sweeps"]] == [pack(x) + 1, pack(x)], x


def test_the_committed_table_is_what_this_nvcc_makes() -> None:
    page = (ROOT / "docs/cuda.md").read_text()
    made_by = re.search(r"^nvcc ([\d.]+)\. ", page, re.MULTILINE)
    rows = re.findall(r"^\| `([^`]+)` \| (\w*) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert made_by is not None
    here = {x["architecture"] for x in figures()}
    assert {row[:3] for row in rows if int(row[2]) in here} == {(x["kernel"], x["dtype"], str(x["architecture"])) for x in figures()}
    version = cuda_compiled.compiler(Path(MODULE.__file__))
    if made_by[1] == version and here == {80, 90, 100}:
        assert cuda_compiled.table(figures(), version) in page, "python tests/cuda_compiled.py docs/cuda.md"
