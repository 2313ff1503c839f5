"""The four modes of the loss on a batch small enough to be compared whole, with every per-token tensor and a mask that is not all ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

FLAGS: dict[str, dict[str, bool]] = {
    "default": {},
    "one_pass": {"one_pass": True},
    "inplace": {"inplace": True},
    "one_pass+inplace": {"one_pass": True, "inplace": True},
}
OPTIONS: dict[str, Any] = {"beta": 0.1, "entropy_coef": 0.05}  # so that every term has a gradient


def small_batch(dtype: torch.dtype = torch.float32, *, spare: bool = False) -> dict[str, Tensor]:
    """Arguments of fused_grpo_loss, B = 2, T = 3, V = 11; two of the five active tokens are clipped."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3 + spare, 11, generator=generator).to(dtype)
    ids = torch.randint(11, (2, 3), generator=generator)
    logps = logits[:, :3].double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratios = torch.tensor([[0.5, 1.05, 1.6], [0.9, 0.6, 1.1]])
    return {
        "logits": logits,
        "completion_ids": ids,
        "advantages": torch.tensor([1.5, -0.7]),
        "old_logps": (logps - ratios.log()).float(),
        "ref_logps": (logps + torch.tensor([[0.5, -0.3, 1.0], [-1.0, 0.1, 0.0]])).float(),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }


def loss_and_leaf(inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """The loss on a copy of a leaf (so that inplace may write over it), and that leaf."""
    leaf = inputs["logits"].clone().requires_grad_()
    return gk.fused_grpo_loss(**{**inputs, "logits": leaf.clone()}, **options).loss, leaf


def gradient(inputs: dict[str, Any], **options: Any) -> Tensor:
    """dlogits."""
    loss, leaf = loss_and_leaf(inputs, **options)
    loss.backward()
    return leaf.grad


def without_logits(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of grpo_loss."""
    return {name: x for name, x in inputs.items() if name not in ("logits", "completion_ids")}
