"""Factors of the policy term, for `importance_weights` and `policy_weights`, made from log-probs and entropy; all are constants."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.checks import check_number, mask_rows, per_token, plain_tensor
from grpo_kernels.packed import sequences_of
from grpo_kernels.rows import Sequences

__all__ = ["ImportanceWeights", "high_entropy_mask", "off_policy_mask", "truncated_importance_weights"]

LOG_RATIO_BOUND = 80.0  # e^80 is still a float32


class ImportanceWeights(NamedTuple):
    """weights for `importance_weights`, detached: (B, T) or packed (N,) at level token, (B,) or (S,) at level sequence; 1 where masked.
    mismatch_kl (): the tokens' mean k3 estimate of KL(sampler || trainer), >= 0, to log."""

    weights: Tensor
    mismatch_kl: Tensor


def truncated_importance_weights(
    old_logps: Tensor,
    sampler_logps: Tensor,
    completion_mask: Tensor | None = None,
    *,
    level: str = "token",
    mode: str = "truncate",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
    cu_seqlens: Tensor | None = None,
) -> ImportanceWeights:
    """Ratio of the trainer's to the sampler's probability of what was sampled, bounded: the engine that generates (vLLM, SGLang) computes
    other log-probs than the trainer does (truncated importance sampling; bounds as TRL's).

    Args:
        old_logps: (B, T) or (N,), the trainer's own log-probs of the sampled tokens, before the step.
        sampler_logps: the same shape, the engine's. A NaN, a token that it could not score, counts as ratio 1.
        completion_mask: the same shape; a masked token is not read. None: all.
        level: "token", or "sequence": one ratio a sequence, exp of the sum of its log-ratios.
        mode: "truncate" (a ratio outside the bounds becomes the bound) or "mask" (it becomes 0).
        clip_min, clip_max: bounds, >= 0; None: none.
        cu_seqlens: (S + 1,) for packed rows.

    Returns:
        ImportanceWeights(weights, mismatch_kl).

    Raises:
        ValueError, TypeError: shapes, devices, unknown names, bounds that are negative or crossed.

    >>> import torch
    >>> truncated_importance_weights(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -3.0]])).weights
    tensor([[1., 3.]])
    """
    for name, value, choices in (("level", level, ("token", "sequence")), ("mode", mode, ("truncate", "mask"))):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    low = 0.0 if clip_min is None else check_number("clip_min", clip_min, least=0)
    high = float("inf") if clip_max is None else check_number("clip_max", clip_max, least=0)
    if low > high:
        raise ValueError(f"clip_min, clip_max: expected clip_min <= clip_max, got {clip_min} and {clip_max}")
    sequences, active = _batch("old_logps", old_logps, completion_mask, cu_seqlens)
    log_ratio = _difference("old_logps", old_logps, "sampler_logps", sampler_logps, sequences, active)
    held = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tokens = sequences.sums(_ones(log_ratio, active)).sum().clamp(min=1)
    mismatch_kl = ((torch.expm1(held) - held).clamp(min=0).sum(dtype=torch.float64) / tokens).to(held.dtype)
    if level == "sequence":
        held = sequences.sums(held).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)  # of held ones: inf - inf would be NaN
    ratio = held.exp()
    weights = ratio.clamp(low, high) if mode == "truncate" else torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    if active is not None and level == "token":
        weights = torch.where(active.bool(), weights, 1.0)
    return ImportanceWeights(weights, mismatch_kl)


def off_policy_mask(
    logps: Tensor,
    sampler_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    *,
    threshold: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """1 to keep, 0 to drop: sequences with a negative advantage that have moved away from the policy that sampled (DeepSeek-V3.2, arXiv
    2512.02556): mean over their tokens of sampler_logp - logp above `threshold`.

    Args:
        logps: (B, T) or (N,), under the current policy.
        sampler_logps: the same shape, under the policy (or engine) that sampled; NaN counts as no difference.
        advantages: (B,) or (S,), or one a token.
        completion_mask: the shape of logps; None: all.
        threshold: in nats a token.
        cu_seqlens: (S + 1,) for packed rows.

    Returns:
        For `policy_weights`, one value a token, float32 (float64 for float64 log-probs).

    Raises:
        ValueError, TypeError: shapes, devices, a threshold that is no number.

    >>> import torch
    >>> off_policy_mask(torch.tensor([[-3.0], [-3.0]]), torch.tensor([[-1.0], [-1.0]]), torch.tensor([1.0, -1.0]), threshold=0.5)
    tensor([[1.],
            [0.]])
    """
    check_number("threshold", threshold)
    sequences, active = _batch("logps", logps, completion_mask, cu_seqlens)
    moved = -_difference("logps", logps, "sampler_logps", sampler_logps, sequences, active)
    mean = sequences.sums(moved) / sequences.sums(_ones(moved, active)).clamp(min=1)
    advantages = per_token("advantages", advantages, sequences, logps, moved.dtype, per_sequence=True)
    return ((advantages >= 0) | (sequences.spread(mean) <= threshold)).to(moved.dtype)


def high_entropy_mask(
    entropy: Tensor, completion_mask: Tensor | None = None, *, top_entropy_quantile: float, group: dist.ProcessGroup | None = None
) -> Tensor:
    """1 at the `top_entropy_quantile` of tokens with the highest entropy, over the whole batch (arXiv 2506.01939), else 0.

    Args:
        entropy: (B, T) or (N,).
        completion_mask: the same shape; None: all.
        top_entropy_quantile: in (0, 1]; 0.2 keeps the fifth with the highest entropy. Ties with the threshold are kept.
        group: a torch.distributed group: the quantile is over the tokens of all its ranks.

    Returns:
        For `policy_weights`, the shape of entropy, float32; 0 where masked. No host sync without a group.

    Raises:
        ValueError, TypeError: shapes, devices, a quantile outside (0, 1].

    >>> import torch
    >>> high_entropy_mask(torch.tensor([[0.1, 0.9, 0.5, 0.3]]), top_entropy_quantile=0.25)
    tensor([[0., 1., 0., 0.]])
    """
    if check_number("top_entropy_quantile", top_entropy_quantile, above=0) > 1:
        raise ValueError(f"top_entropy_quantile: expected a number in (0, 1], got {top_entropy_quantile}")
    plain_tensor("entropy", entropy)
    sequences = Sequences(entropy.shape, entropy.shape[0] if entropy.dim() else 0)
    active = mask_rows("completion_mask", completion_mask, sequences, entropy)
    values = entropy.detach().float()
    values = (values if active is None else torch.where(active.bool(), values, torch.inf)).flatten()
    everyone = values if group is None else _gather(values, group)
    # numpy's and torch's linear quantile, at an index that stays on the device; inf sorts behind all real values
    ordered = torch.cat([everyone, everyone.new_full((1,), torch.inf)]).sort().values
    position = (1 - top_entropy_quantile) * ((ordered != torch.inf).sum() - 1).clamp(min=0).double()
    below, above = ordered[position.floor().long()], ordered[position.ceil().long()]
    threshold = torch.where(below == above, below, below + (above - below) * (position - position.floor()))
    kept = (values >= threshold) & (values != torch.inf)
    return kept.to(torch.float32).view(entropy.shape)


def _batch(name: str, logps: Tensor, completion_mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Sequences, Tensor | None]:
    plain_tensor(name, logps)
    sequences = sequences_of(name, logps, cu_seqlens)
    return sequences, mask_rows("completion_mask", completion_mask, sequences, logps)


def _difference(name: str, logps: Tensor, other_name: str, other: Tensor, sequences: Sequences, active: Tensor | None) -> Tensor:
    """logps - other, detached; 0 where masked, where they are equal (also at -inf) and where one of them is NaN."""
    dtype = torch.float64 if logps.dtype == torch.float64 else torch.float32
    logps = per_token(name, logps.detach(), sequences, logps, dtype)
    other = per_token(other_name, plain_tensor(other_name, other).detach(), sequences, logps, dtype)
    used = (logps != other) & ~logps.isnan() & ~other.isnan()
    return torch.where(used if active is None else used & active.bool(), logps - other, 0.0)


def _ones(like: Tensor, active: Tensor | None) -> Tensor:
    return torch.ones_like(like) if active is None else active.to(like.dtype)


def _gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks, padded with inf to the longest rank's number."""
    longest = torch.tensor(len(values), device=values.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    padded = torch.cat([values, values.new_full((int(longest) - len(values),), torch.inf)])
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered)
