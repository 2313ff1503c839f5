"""Means over tokens that a trainer logs, on the device, without a host sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.checks import mask_rows, plain_tensor

if TYPE_CHECKING:
    from grpo_kernels.objective import GRPOLossOutput

__all__ = ["grpo_metrics"]


def grpo_metrics(output: GRPOLossOutput, completion_mask: Tensor | None, *, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Token means over the mask of a loss's output, each a 0-d float32 tensor on the device; 0 where there is no token.

    Args:
        output: what `fused_grpo_loss` or `grpo_loss` returned, (B, T).
        completion_mask: (B, T), the mask that the loss had; None: all tokens. Required, so that it is not forgotten.
        group: a torch.distributed process group; sums and counts are reduced over it, so every rank gets the global values.

    Returns:
        kl, entropy; clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/region_mean: fractions of tokens clipped below, above, either;
        clip_ratio/low_min, clip_ratio/high_max: the smallest and largest of the sequences' own fractions.

    Raises:
        ValueError, TypeError: a mask of another shape, device or type.

    >>> import torch
    >>> from grpo_kernels import grpo_loss
    >>> output = grpo_loss(torch.log(torch.tensor([[0.5, 1.0, 1.5]])), torch.ones(1), old_logps=torch.zeros(1, 3))
    >>> grpo_metrics(output, None)["clip_ratio/high_mean"]
    tensor(0.3333)
    """
    clipped = plain_tensor("output.clipped", output.clipped)
    active = mask_rows("completion_mask", completion_mask, clipped.shape, clipped)
    mask = torch.ones(clipped.shape, device=clipped.device) if active is None else active.float()
    lengths = mask.sum(-1)
    low, high = (clipped < 0) * mask, (clipped > 0) * mask
    used = mask > 0
    kl, entropy = (torch.where(used, x, 0).sum(dtype=torch.float32) for x in (output.kl, output.entropy))
    sums = torch.stack([lengths.sum(), kl, entropy, low.sum(), high.sum()])
    # Smallest and largest of the sequences' fractions; a sequence without a token has none, and one all-reduce takes both as maxima.
    absent = lengths == 0
    fractions = [torch.where(absent, -torch.inf, sign * x.sum(-1) / lengths.clamp(min=1)) for sign, x in ((-1, low), (1, high))]
    edges = torch.cat([torch.stack(fractions), torch.full((2, 1), -torch.inf, device=mask.device)], 1).amax(1)
    if group is not None:
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(edges, op=dist.ReduceOp.MAX, group=group)
    means = sums[1:] / sums[0].clamp(min=1)
    edges = torch.where(edges.isinf(), 0, edges)
    return {
        "kl": means[0],
        "entropy": means[1],
        "clip_ratio/low_mean": means[2],
        "clip_ratio/low_min": -edges[0],
        "clip_ratio/high_mean": means[3],
        "clip_ratio/high_max": edges[1],
        "clip_ratio/region_mean": means[2] + means[3],
    }
