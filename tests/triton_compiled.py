"""What the compiler makes of the Triton kernels, without a GPU: every launch built ahead of time for every architecture, and the machine
code read.

    python tests/triton_compiled.py                      the figures as JSON
    python tests/triton_compiled.py docs/triton.md       writes them into the page's table

Not under TRITON_INTERPRET=1, where there is nothing to compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton

import triton_launches
from triton_launches import Launch

ARCHITECTURES = (80, 90, 100)
BEGIN, END = "<!-- figures: python tests/triton_compiled.py docs/triton.md -->", "<!-- end of figures -->"


def tool(name: str) -> str:
    """Of the CUDA tools that come with Triton."""
    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def figures(launch: Launch, architecture: int) -> dict[str, Any]:
    """Registers, bytes of shared and local memory, and how often which instruction stands in the code."""
    compiled = triton.compile(triton_launches.source(launch), target=triton_launches.target(architecture), options=dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool("cuobjdump"), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "stack": used["STACK"],
        "local": used["LOCAL"],
        "shared": compiled.metadata.shared,
        "loads": widths(code, "LDG"),
        "stores": widths(code, "STG"),
        "local_accesses": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "exponentials": len(re.findall(r"\bMUFU\.EX2\b", code)),
    }


def widths(code: str, instruction: str) -> dict[str, int]:
    """How many of the instruction there are for each width in bytes."""
    counts: dict[str, int] = {}
    for modifiers in re.findall(rf"\b{instruction}((?:\.\w+)+)", code):
        width = next((n for name, n in {".128": 16, ".64": 8, ".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2}.items() if name in modifiers), 4)
        counts[str(width)] = counts.get(str(width), 0) + 1
    return counts


def all_figures(architectures: Iterable[int] = ARCHITECTURES) -> list[dict[str, Any]]:
    wanted = [(key, launch, a) for a in architectures for key, launch in triton_launches.all_launches(a).items()]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda each: figures(each[1], each[2]), wanted)
        return [
            {"kernel": key[0], "dtype": key[1], "rows": key[2], "architecture": a, "constants": dict(launch.constants), **result}
            for (key, launch, a), result in zip(wanted, found)
        ]


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        f"Triton {triton.__version__}. Loads and stores of global memory: instructions of 16 bytes / of fewer. No kernel has spills, stack "
        "or local memory.",
        "",
        "| kernel | dtype | rows | sm | registers | shared | loads | stores | exponentials |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in found:
        wide = [f"{x[name].get('16', 0)} / {sum(x[name].values()) - x[name].get('16', 0)}" for name in ("loads", "stores")]
        kind = (f"`{x['kernel']}`", x["dtype"], x["rows"], f"{x['architecture']}")
        lines.append("| " + " | ".join((*kind, str(x["registers"]), str(x["shared"]), *wide, str(x["exponentials"]))) + " |")
    return "\n".join(lines)


def main() -> None:
    found = all_figures(map(int, sys.argv[2:]) if len(sys.argv) > 2 else ARCHITECTURES)
    if len(sys.argv) < 2 or sys.argv[1] == "-":
        json.dump(found, sys.stdout)
        return
    page = Path(sys.argv[1])
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
