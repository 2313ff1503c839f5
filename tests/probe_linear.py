"""Peak extra memory of one loss from hidden states on the CPU, in a process of its own; how, is told in probe_memory.py.

python tests/probe_linear.py --rows 1024 --vocab 151936 --columns 896 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from typing import Any

import torch

import grpo_kernels as gk

# frozen: the head needs no gradient; forward: no grad; naive: logits, float32, log_softmax, under autograd
MODES = ("token", "sequence", "frozen", "forward", "naive")
LENGTH = 64  # tokens a sequence


def measure(**options: Any) -> dict[str, Any]:
    """The measurement in a fresh process; options as on the command line."""
    arguments = [f"--{name}={value}" for name, value in options.items()]
    child = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {child.stderr}")
    return json.loads(child.stdout)


def _step(hidden: torch.Tensor, weight: torch.Tensor, mode: str, chunk_size: int | None, backend: str | None) -> torch.Tensor:
    """The call that is measured; whoever keeps its result keeps the gradients alive."""
    shape = hidden.shape[:2]
    ids = torch.arange(shape.numel()).view(shape) % len(weight)
    advantages, old = torch.linspace(-1, 1, len(hidden)), torch.full(shape, -torch.log(torch.tensor(float(len(weight)))).item())
    if mode == "naive":
        logps = (hidden @ weight.t()).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        ratio = (logps - old).exp()
        loss = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]).mean()
    else:
        level = "sequence" if mode == "sequence" else "token"
        with torch.set_grad_enabled(mode != "forward"):
            loss = gk.fused_linear_grpo_loss(
                hidden, weight, ids, advantages, old_logps=old, ref_logps=old, beta=0.04, importance_sampling_level=level,
                chunk_size=chunk_size, backend=backend,
            ).loss  # fmt: skip
    if mode != "forward":
        loss.backward()
    return loss


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _inputs(rows: int, vocab: int, columns: int, dtype: torch.dtype, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, weight = torch.randn(rows // LENGTH, LENGTH, columns).to(dtype), (0.02 * torch.randn(vocab, columns)).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(mode != "frozen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default=None)
    parser.add_argument("--mode", choices=MODES, default="token")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--columns", type=int, default=896, help="of the hidden states, D")
    parser.add_argument("--chunk_size", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    _step(*_inputs(LENGTH, 2048, 64, dtype, options.mode), options.mode, options.chunk_size, options.backend)
    hidden, weight = _inputs(options.rows, options.vocab, options.columns, dtype, options.mode)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    loss = _step(hidden, weight, options.mode, options.chunk_size, options.backend)
    peak = _status("VmHWM")
    assert loss.isfinite()
    print(json.dumps({**vars(options), "extra_bytes": peak - before}))


if __name__ == "__main__":
    main()
