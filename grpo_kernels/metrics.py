"""Means over tokens that a trainer logs, on the device, without a host sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.checks import mask_rows, plain_tensor
from grpo_kernels.options import CHOICES
from grpo_kernels.packed import sequences_of

if TYPE_CHECKING:
    from grpo_kernels.options import GRPOLossOutput

__all__ = ["grpo_metrics"]


def grpo_metrics(
    output: GRPOLossOutput,
    completion_mask: Tensor | None,
    *,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Token means over the mask of a loss's output, each a 0-d float32 tensor on the device; 0 where there is no token.

    Args:
        output: what `fused_grpo_loss` or `grpo_loss` returned, (B, T) or packed (N,).
        completion_mask: (B, T) or (N,), the mask that the loss had; None: all tokens. Required, so that it is not forgotten.
        importance_sampling_level: as the loss had it. Where the ratio is a sequence's, clip ratios are means over sequences, of which one
            without a token counts as not clipped.
        cu_seqlens: (S + 1,), as the loss had it.
        group: a torch.distributed process group; sums and counts are reduced over it, so every rank gets the global values.

    Returns:
        kl, entropy; clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/region_mean: fractions of tokens clipped below, above, either;
        clip_ratio/low_min, clip_ratio/high_max: the smallest and largest of the sequences' own fractions, of those with a token.

    Raises:
        ValueError, TypeError: a mask or cu_seqlens of another shape, device or type, an unknown level.

    >>> import torch
    >>> from grpo_kernels import grpo_loss
    >>> output = grpo_loss(torch.log(torch.tensor([[0.5, 1.0, 1.5]])), torch.ones(1), old_logps=torch.zeros(1, 3))
    >>> grpo_metrics(output, None)["clip_ratio/high_mean"]
    tensor(0.3333)
    """
    if importance_sampling_level not in CHOICES["importance_sampling_level"]:
        expected = ", ".join(CHOICES["importance_sampling_level"])
        raise ValueError(f"importance_sampling_level: expected one of {expected}, got {importance_sampling_level!r}")
    clipped = plain_tensor("output.clipped", output.clipped)
    sequences = sequences_of("output.clipped", clipped, cu_seqlens)
    active = mask_rows("completion_mask", completion_mask, sequences, clipped)
    mask = torch.ones(clipped.shape, dtype=torch.float32, device=clipped.device) if active is None else active.float()
    kl, entropy = (torch.where(mask > 0, x, 0).sum(dtype=torch.float32) for x in (output.kl, output.entropy))
    lengths = sequences.sums(mask)
    lows, highs = sequences.sums((clipped < 0) * mask), sequences.sums((clipped > 0) * mask)
    low_fractions, high_fractions = lows / lengths.clamp(min=1), highs / lengths.clamp(min=1)
    if importance_sampling_level == "token":
        counted = [lows.sum(), highs.sum(), lengths.sum()]
    else:
        counted = [low_fractions.sum(), high_fractions.sum(), torch.ones_like(lengths).sum()]
    sums = torch.stack([lengths.sum(), kl, entropy, *counted])
    # Smallest and largest of the sequences' fractions; one all-reduce takes both as maxima, of which there may be none.
    edges = torch.where(lengths > 0, torch.stack([-low_fractions, high_fractions]), -torch.inf)
    edges = torch.cat([edges, mask.new_full((2, 1), -torch.inf)], 1).amax(1)
    if group is not None:
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(edges, op=dist.ReduceOp.MAX, group=group)
    tokens, kl, entropy, low, high, count = sums
    edges = torch.where(edges.isinf(), 0, edges)
    low, high = low / count.clamp(min=1), high / count.clamp(min=1)
    return {
        "kl": kl / tokens.clamp(min=1),
        "entropy": entropy / tokens.clamp(min=1),
        "clip_ratio/low_mean": low,
        "clip_ratio/low_min": -edges[0],
        "clip_ratio/high_mean": high,
        "clip_ratio/high_max": edges[1],
        "clip_ratio/region_mean": low + high,
    }
