"""Every kernel of a backend on small rows of every kind, each answer compared: what compute-sanitizer is given to watch.

compute-sanitizer --tool memcheck python benchmarks/exercise.py cuda
compute-sanitizer --tool racecheck python benchmarks/exercise.py cuda
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

# One element; less than a vector; a partial last vector; several steps of a block; a row that a cluster shares.
VOCABS = (1, 3, 1025, 5003, 40960)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
FLAGS: list[dict[str, Any]] = [
    {}, {"one_pass": True, "inplace": True}, {"one_pass": True}, {"inplace": True}, {"importance_sampling_level": "sequence"},
]  # fmt: skip


def inputs(vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    g = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(2, 4, vocab + 3, generator=g) * 3).to(dtype)
    ids = torch.randint(vocab, (2, 3), generator=g)
    logits[0, 1, : vocab // 2] = -torch.inf
    logits[0, 1, ids[0, 1]] = 1.0
    near = -math.log(vocab) - 5 * torch.rand(2, 3, generator=g)
    return {
        "logits": logits, "completion_ids": ids, "advantages": torch.tensor([1.0, -0.5]), "old_logps": near, "ref_logps": near - 0.3,
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "importance_weights": torch.tensor([[0.5], [1.5]]),
    }  # fmt: skip


def answers(given: dict[str, Any], device: str, backend: str, aligned: bool, flags: dict[str, Any]) -> list[Tensor]:
    """Outputs and gradient of the loss; the logits start at the row's own address, or one element behind."""
    moved = {name: x.to(device) for name, x in given.items()}
    leaf = moved.pop("logits").clone().requires_grad_()
    vocab = leaf.shape[-1] - 3
    storage = leaf * 1
    logits = storage[..., :vocab] if aligned else storage[:, :3, 1 : vocab + 1]
    output = gk.fused_grpo_loss(logits.clone() if aligned else logits, **moved, beta=0.1, entropy_coef=0.01, backend=backend, **flags)
    output.loss.backward()
    return [x.detach().float().cpu() for x in (*output, leaf.grad)]


def advantages(device: str, backend: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    rewards, ends = torch.randn(12, 5, generator=g).to(device), torch.randint(9, (12, 5), generator=g).to(device)
    groups = torch.randint(4, (12,), generator=g).to(device)
    found = [gk.group_advantages(rewards[:, 0], 4, scale_rewards=scale, backend=backend) for scale in ("group", "batch", "none")]
    found.append(gk.group_advantages(rewards[:, 0], group_ids=groups, baseline="leave_one_out", backend=backend))
    found += [
        gk.process_advantages(rewards, ends, 9, 4, backend=backend),
        gk.process_advantages(rewards, ends, 9, group_ids=groups, backend=backend),
    ]
    return [x.cpu() for x in found]


def exercise(backend: str, device: str, vocabs: Sequence[int], few: bool) -> int:
    cases = 0
    for vocab, dtype in itertools.product(vocabs, DTYPES[: 2 if few else 3]):
        given = inputs(vocab, dtype)
        for aligned, flags in itertools.product((True, False), FLAGS[: 2 if few else len(FLAGS)]):
            got, want = answers(given, device, backend, aligned, flags), answers(given, "cpu", "torch", aligned, flags)
            for x, y in zip(got, want):
                torch.testing.assert_close(x, y, rtol=2**-7 if dtype != torch.float32 else 1e-4, atol=1e-5)
            cases += 1
    for x, y in zip(advantages(device, backend), advantages("cpu", "torch")):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    return cases + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("vocabs", nargs="*", type=int, default=VOCABS)
    parser.add_argument("--few", action="store_true", help="the default and the one pass in two dtypes: a sanitizer takes its time")
    options = parser.parse_args()
    device, force_split = "cpu", None
    if options.backend in ("triton", "cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        device = "cuda"
    if options.backend == "cuda":
        import grpo_kernels._C as native

        force_split = native.cuda.force_split
    for split in (0, 1, 2, 4, 8) if force_split else (0,):  # over how many blocks a row is split; 0: as the table says
        if force_split:
            force_split(split)
        cases = exercise(options.backend, device, options.vocabs, options.few)
        print(f"{options.backend}{f', {split} blocks a row' if split else ''}: {cases} cases are right", flush=True)


if __name__ == "__main__":
    main()
