"""What nvcc made of the CUDA kernels, without a GPU: the machine code in the installed module, read with the tools that come with Triton.

    python tests/cuda_compiled.py                      the figures as JSON
    python tests/cuda_compiled.py docs/cuda.md         writes them into the page's table

A module, or an object of nvcc's, may be named after the page.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: python tests/cuda_compiled.py docs/cuda.md -->", "<!-- end of figures -->"
WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
# _ZN...21logprobs_forward_kernelINS_3any8BFloat16EEEv...; loss_and_grad_kernel's second argument: whether a cluster holds the row
MANGLED = re.compile(r"\d([a-z][a-z_]*)_kernel(?:I(?:\w*?\d(Float32|BFloat16|Float16)E)?(?:Lb([01]))?([fd])?)?")


class Sweep(NamedTuple):
    """A loop over packs of a row: instructions that stand in it. A pack's are there twice, for whole steps and for the last one."""

    exponentials: int
    loads: dict[str, int]  # width in bytes -> how many, of global memory
    stores: dict[str, int]
    shared_loads: dict[str, int]
    shared_stores: dict[str, int]


def tool() -> str:
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None, "cuobjdump comes with Triton"
    return str(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")


def output(*arguments: str | Path) -> str:
    return subprocess.run([tool(), *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def compiler(module: Path) -> str:
    """The version of nvcc, "13.0.88"."""
    found = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", module.read_bytes())
    assert found, f"{module} holds no machine code of nvcc's"
    return found[1].decode()


def kernels(text: str) -> Iterator[tuple[int, str, str]]:
    """(architecture, mangled name, what is said of it) of what cuobjdump prints."""
    for code in re.split(r"^arch = sm_", text, flags=re.MULTILINE)[1:]:
        architecture = int(re.match(r"\d+", code)[0])  # type: ignore[index]
        for function in re.split(r"Function *:? ", code)[1:]:
            name, _, said = function.partition("\n")
            yield architecture, name.rstrip(":"), said


def kind(name: str) -> tuple[str, str] | None:
    """(kernel, dtype), None where it is no kernel of ours."""
    found = MANGLED.search(name)
    if found is None:
        return None
    kernel, dtype, holds, out = found.groups()
    variant = {"0": " (portable)", "1": " (cluster)", None: ""}[holds]
    return kernel + variant, {"f": "float32", "d": "float64", None: ""}[out] if dtype is None else dtype.lower()


def widths(code: list[str], instruction: str) -> dict[str, int]:
    """How many of the instruction there are for each width in bytes."""
    found = [match[1] for line in code if (match := re.match(rf"{instruction}((?:\.\w+)*) ", line))]
    return dict(Counter(str(next((n for name, n in WIDTHS.items() if name in modifiers), 4)) for modifiers in found))


def exponentials(code: list[str]) -> int:
    return sum(line.startswith("MUFU.EX2") for line in code)


def instructions(said: str) -> list[tuple[int, str]]:
    """(address, instruction without its predicate)"""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][^;]*) ?;", said)
    return [(int(address, 16), line + " ") for address, line in found]


def sweeps(code: list[tuple[int, str]]) -> list[Sweep]:
    """The innermost loops that hold both exponentials and accesses of 16 bytes, in their order."""
    jumps = [(int(match[1], 16), at) for at, line in code if (match := re.match(r"BRA\S* .*\b0x([0-9a-f]+)", line))]
    loops = sorted({(begin, end) for begin, end in jumps if begin < end})
    found = []
    for begin, end in loops:
        if any(begin <= a and b <= end and (a, b) != (begin, end) for a, b in loops):
            continue
        body = [line for at, line in code if begin <= at <= end]
        sweep = Sweep(exponentials(body), *(widths(body, name) for name in ("LDG", "STG", "LDS", "STS")))
        if sweep.exponentials and any("16" in counts for counts in sweep[1:]):
            found.append(sweep)
    return found


def figures(module: Path) -> list[dict[str, Any]]:
    """Of every kernel and architecture: registers, bytes of static shared and of local memory, accesses of global memory, its sweeps."""
    code = {key[:2]: key[2] for key in kernels(output("-sass", module))}
    found = []
    for architecture, name, said in kernels(output("--dump-resource-usage", module)):
        which = kind(name)
        if which is None:
            continue
        used = {what: int(value) for what, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said)}
        listing = instructions(code[architecture, name])
        lines = [line for _, line in listing]
        found.append(
            {
                "kernel": which[0],
                "dtype": which[1],
                "architecture": architecture,
                "registers": used["REG"],
                "stack": used["STACK"],
                "local": used["LOCAL"],
                "shared": used["SHARED"],
                "local_accesses": sum(re.match(r"LDL|STL", line) is not None for line in lines),
                "loads": widths(lines, "LDG"),
                "stores": widths(lines, "STG"),
                "sweeps": [sweep._asdict() for sweep in sweeps(listing)],
            }
        )
    return sorted(found, key=lambda x: (x["architecture"], x["kernel"], x["dtype"]))


def table(found: list[dict[str, Any]], version: str) -> str:
    local = max(x[name] for x in found for name in ("stack", "local"))
    lines = [
        f"nvcc {version}. Loads and stores of global memory: instructions of 16 bytes / of fewer; exponentials of each sweep over a row, "
        f"for one pack. Shared memory: bytes beside the launcher's. Stack, spills and local memory: {local} bytes in every kernel.",
        "",
        "| kernel | dtype | sm | registers | shared | loads | stores | exponentials |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for x in found:
        wide = [f"{x[name].get('16', 0)} / {sum(x[name].values()) - x[name].get('16', 0)}" for name in ("loads", "stores")]
        counts = ", ".join(str(sweep["exponentials"]) for sweep in x["sweeps"])
        kind = (f"`{x['kernel']}`", x["dtype"], str(x["architecture"]))
        lines.append("| " + " | ".join((*kind, str(x["registers"]), str(x["shared"]), *wide, counts)) + " |")
    return "\n".join(lines)


def main() -> None:
    page = sys.argv[1] if len(sys.argv) > 1 else "-"
    module = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(str(importlib.import_module("grpo_kernels._C").__file__))
    version, found = compiler(module), figures(module)
    if page == "-":
        json.dump(found, sys.stdout)
        return
    before, rest = Path(page).read_text().split(BEGIN)
    Path(page).write_text(f"{before}{BEGIN}\n\n{table(found, version)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
