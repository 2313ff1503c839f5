"""Every aggregation as one weight per token: mask, normaliser and scale in one tensor (MATH.md §4), so that kernels see no loss type."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.checks import Count
from grpo_kernels.rows import Sequences

__all__ = ["token_weights"]


def token_weights(
    active: Tensor | None,
    sequences: Sequences,
    loss_type: str,
    *,
    num_items_in_batch: Count = None,
    num_sequences: Count = None,
    num_processes: int = 1,
    max_completion_length: float | None = None,
    loss_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """w, one weight a token, with loss = sum w L; a masked token weighs 0.

    | loss_type | w |
    |---|---|
    | grpo, sapo | m / (B max(n_i, 1)) |
    | bnpo | m / max(sum m, 1), always local |
    | dr_grpo | m / (B max_completion_length) |
    | luspo | m / B |
    | dapo, cispo, vespo, reinforce | P m / num_items_in_batch, by default the local sum of m |

    n_i = sum_t m; B is `num_sequences`, by default the local number of sequences; P, `num_processes`, multiplies w wherever a global
    count is in it. Counts may be 0-d tensors, are never synchronised, and count as 1 where they are <= 0.
    """
    mask = torch.ones(sequences.shape, dtype=dtype, device=device) if active is None else active.to(dtype)
    if loss_type == "bnpo":
        return mask * (loss_scale / mask.sum().clamp(min=1))
    if loss_type in ("dapo", "cispo", "vespo", "reinforce"):
        total = mask.sum().clamp(min=1) if num_items_in_batch is None else _at_least_some(num_items_in_batch, dtype)
        return mask * (loss_scale * num_processes / total)
    count = max(sequences.count, 1) if num_sequences is None else _at_least_some(num_sequences, dtype)
    scale = loss_scale * num_processes / count
    if loss_type == "luspo":
        return mask * scale
    if max_completion_length is not None and loss_type == "dr_grpo":
        return mask * (scale / max_completion_length)
    return mask * scale / sequences.spread(sequences.sums(mask)).clamp(min=1)


def _at_least_some(count: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """A count <= 0, as of a batch with nothing to learn from, counts as 1."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, count.detach().to(dtype), 1)
    return count if count > 0 else 1
