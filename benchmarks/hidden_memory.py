"""Peak extra memory of one contestant from hidden states on the CPU, in this process; how, is told in tests/probe_memory.py. Linux only.

python benchmarks/hidden_memory.py ours --dtype bfloat16 --rows 1024 --vocab 151936 --width 896
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # behind the installed packages

import torch
from torch import Tensor

from benchmarks.hidden import LOGPS, LOSSES, Hidden
from benchmarks.hidden_arena import LOSSES as NAMES
from benchmarks.implementations import Missing
from benchmarks.inputs import Case

BATCH = 4
CONTESTANTS = ["naive", "naive_float", *(name for name in NAMES if not name.startswith("naive")), "ours_frozen", "ours_forward"]


def step(name: str, inputs: Hidden) -> Tensor:
    """The call that is measured; whoever keeps its result keeps the gradients alive."""
    if name == "ours_forward":
        with torch.no_grad():
            return LOGPS["cpu"](inputs)
    inputs.weight.requires_grad_(name != "ours_frozen")
    loss = LOSSES[NAMES[name.removesuffix("_frozen")]](inputs)
    loss.backward()
    return loss.detach()


def extra_bytes(action: Callable[[], object]) -> int:
    """What the process holds at most during it, above what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = action()
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--threads", type=int, default=2, help="a thread may hold a row of its own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        step(options.contestant, Hidden.unscored(Case("cpu", "", BATCH, 4, 1003, options.dtype), 24))  # imports, thread stacks
    except Missing as reason:
        print(json.dumps({**vars(options), "missing": str(reason)}))
        return
    inputs = Hidden.unscored(Case("cpu", "", BATCH, options.rows // BATCH, options.vocab, options.dtype), options.width)
    print(json.dumps({**vars(options), "extra_bytes": extra_bytes(lambda: step(options.contestant, inputs))}))


if __name__ == "__main__":
    main()
