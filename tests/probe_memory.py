"""Peak extra memory of one call on the CPU: what the process holds at most during it, above what it held before.

One child process a measurement (`measure`, or this file run as a script), because an allocator keeps what earlier calls freed. Inside it
the code path runs once on a small batch (imports, thread stacks, buffers of the runtime), the inputs are built, freed memory goes back to
the system, the kernel's high-water mark is reset (5 in /proc/self/clear_refs; ru_maxrss cannot be), and the call runs: VmHWM minus the
earlier VmRSS is the answer. Linux only.

    python tests/probe_memory.py --backend cpu --mode default --dtype bfloat16 --rows 256 --vocab 151936
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

# forward: without grad; naive: log_softmax, gather and the textbook loss under autograd; the others: forward and backward
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "one_pass": {"one_pass": True},
    "inplace": {"inplace": True},
    "one_pass+inplace": {"one_pass": True, "inplace": True},
    "sequence": {"importance_sampling_level": "sequence"},
}
MODES = ("forward", *FLAGS, "naive")
MAX_LENGTH = 64  # tokens a sequence


def measure(**options: Any) -> dict[str, Any]:
    """The measurement in a fresh process; options as on the command line."""
    arguments = [f"--{name}={value}" for name, value in options.items()]
    child = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {child.stderr}")
    return json.loads(child.stdout)


class _Produce(torch.autograd.Function):
    """Logits that are no leaf and whose producer needs no memory in its backward; it keeps the gradient, as a step would."""

    @staticmethod
    def forward(ctx, anchor, holder):  # type: ignore[no-untyped-def]
        return holder.pop()  # out of a list: a tensor argument would come back as a view, on which nothing is done in one pass in place

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.gradient = gradient
        return torch.zeros(()), None


def _inputs(rows: int, vocab: int, dtype: torch.dtype, mode: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = max(rows // MAX_LENGTH, 1)
    shape = (batch, rows // batch)
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(*shape, vocab, dtype=dtype).copy_(torch.randn(vocab, generator=generator))  # alike rows: made in no time
    if mode != "forward":
        logits = _Produce.apply(torch.zeros((), requires_grad=True), [logits])
        assert not logits._is_view()
    level = -torch.log(torch.tensor(float(vocab)))
    near = {name: level + torch.randn(shape, generator=generator) / 3 for name in ("old_logps", "ref_logps")}
    return logits, {
        "completion_ids": torch.randint(vocab, shape, generator=generator),
        "advantages": torch.randn(batch, generator=generator),
        "completion_mask": torch.rand(shape, generator=generator) < 0.9,
        **near,
    }


def _naive(
    logits: torch.Tensor,
    completion_ids: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    old_logps: torch.Tensor,
    ref_logps: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    logps = logits.log_softmax(-1).gather(-1, completion_ids[..., None]).squeeze(-1)
    ratio, d = (logps - old_logps).exp(), ref_logps - logps
    policy = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = (policy + beta * (d.exp() - d - 1)) * completion_mask
    return (loss.sum(-1) / completion_mask.sum(-1).clamp(min=1)).mean()


def _run(logits: torch.Tensor, inputs: dict[str, torch.Tensor], mode: str, backend: str) -> torch.Tensor:
    """The call that is measured; whoever keeps its result keeps the gradient alive."""
    with torch.set_grad_enabled(mode != "forward"):
        if mode == "naive":
            loss = _naive(logits, **inputs, beta=0.04)
        else:
            loss = gk.fused_grpo_loss(logits, **inputs, beta=0.04, backend=backend, **FLAGS.get(mode, {})).loss
    if mode != "forward":
        loss.backward()
    return loss


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _measure_here(rows: int, vocab: int, dtype: torch.dtype, mode: str, backend: str) -> dict[str, Any]:
    _run(*_inputs(4, 2048, dtype, mode), mode, backend)
    logits, inputs = _inputs(rows, vocab, dtype, mode)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = _status("VmRSS")
    loss = _run(logits, inputs, mode, backend)
    peak = _status("VmHWM")
    assert loss.isfinite()
    size = logits.numel() * logits.element_size()
    return {"logits_bytes": size, "extra_bytes": peak - before, "ratio": (peak - before) / size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--mode", choices=MODES, default="default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--threads", type=int, default=2, help="a thread may hold a row of its own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = _measure_here(options.rows, options.vocab, getattr(torch, options.dtype), options.mode, options.backend)
    print(json.dumps({**vars(options), **result}))


if __name__ == "__main__":
    main()
