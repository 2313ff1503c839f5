"""The definition: what every backend computes, in plain differentiable torch.

It takes any floating dtype (tests use float64), leaves every gradient to autograd, and imports nothing else of the package. The `torch`
backend differentiates `token_objective` as it stands here; `csrc/objective.h` is its translation, value and derivative side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "TokenObjective", "group_advantages", "process_advantages", "row_stats", "token_objective"]

MAX_LOG_RATIO = 80.0  # exp(80) times |advantage| <= 6000 is still a float32


class TokenObjective(NamedTuple):
    policy: Tensor  # policy term of each token, to be minimised
    kl: Tensor  # estimate of KL(policy || reference), before beta
    clipped: Tensor  # int8: -1 below the clip range, +1 above it, else 0


def row_stats(logits: Tensor, token_ids: Tensor, temperature: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of `token_ids` (...) and entropy in nats, from logits (..., V) and a temperature that broadcasts to (...)."""
    temperature = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device)[..., None]
    logps = ((logits - logits.detach().amax(-1, keepdim=True)) / temperature).log_softmax(-1)
    probs = logps.exp()
    surprisal = torch.where(probs == 0, 0.0, -logps)  # p log p is 0 at p = 0, where log p may be -inf
    return logps.gather(-1, token_ids[..., None]).squeeze(-1), (probs * surprisal).sum(-1)


def token_objective(
    logps: Tensor,
    advantages: Tensor,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float = float("inf"),
    dual_clip: float = float("inf"),
    max_log_ratio: float = MAX_LOG_RATIO,
) -> TokenObjective:
    """The clipped surrogate of PPO with the caps `delta` and `dual_clip`, and the k3 estimate; all tensors of one shape.

    Every choice is a `torch.where` on a strict comparison: at a tie the full gradient passes, where torch.min would halve it.
    """
    ratio = _log_ratio(logps, logps.detach() if old_logps is None else old_logps, max_log_ratio).exp()
    low, high = 1 - epsilon, 1 + epsilon_high
    policy = -torch.where(ratio > delta, delta, ratio) * advantages
    policy_clipped = -ratio.clamp(low, high) * advantages
    policy = torch.where(policy_clipped > policy, policy_clipped, policy)
    negative = advantages < 0
    policy_capped = -dual_clip * torch.where(negative, advantages, -1.0)
    policy = torch.where(negative & (policy_capped < policy), policy_capped, policy)

    kl = torch.zeros_like(logps)
    if ref_logps is not None:
        kl = _k3(-_log_ratio(logps, ref_logps, max_log_ratio))
    clipped = ((ratio > high) & (advantages > 0)).to(torch.int8) - ((ratio < low) & negative).to(torch.int8)
    return TokenObjective(policy, kl, clipped)


def _log_ratio(logps: Tensor, other_logps: Tensor, bound: float) -> Tensor:
    """logps - other_logps held within +-bound: beyond it the gradient is 0, at exactly the bound it passes, NaN stays NaN."""
    log_ratio = logps - other_logps
    # Equal log-probs have log-ratio 0 and gradient 1 also at -inf; a subtraction keeps no values, so its result may be written over.
    log_ratio.data.masked_fill_(logps == other_logps, 0.0)
    log_ratio = torch.where(log_ratio > bound, bound, log_ratio)
    return torch.where(log_ratio < -bound, -bound, log_ratio)


def _k3(d: Tensor) -> Tensor:
    """exp(d) - d - 1 (DeepSeekMath eq. 4), never negative. float32 cancels near 0 (11 % off at 1e-6), so there the series serves."""
    if d.dtype == torch.float64:
        return torch.expm1(d) - d
    near = d.abs() < 0.5
    x = torch.where(near, d, 0.0)
    series: Tensor | float = 1 / 40320
    for factorial in (5040, 720, 120, 24, 6, 2):
        series = series * x + 1 / factorial
    return torch.where(near, x * x * series, torch.exp(d) - 1 - d)


def group_advantages(
    rewards: Tensor, group: Tensor, *, scale_rewards: str = "group", baseline: str = "mean", ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """(rewards - baseline) / (std + eps) within each group, in float64; `group` (M,) gives each reward's group. NaN is left out."""
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    everything = rewards[~rewards.isnan()]
    for g in group.unique():
        members = (group == g) & ~rewards.isnan()
        r = rewards[members]
        if len(r) < 2 or bool((r == r[0]).all()):
            continue
        base = r.mean() if baseline == "mean" else (r.sum() - r) / (len(r) - 1)
        over = {"group": r, "batch": everything}.get(scale_rewards)
        advantages[members] = r - base if over is None else (r - base) / (over.std(correction=ddof) + eps)
    return advantages


def process_advantages(
    step_rewards: Tensor, step_ends: Tensor, group: Tensor, completion_length: int, *, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """DeepSeekMath §4.1.3: each token gets the sum of the normalised rewards of the steps that end at it or later (ends < 0: no step)."""
    real = step_ends >= 0
    pooled = torch.where(real, step_rewards.double(), torch.nan)
    normalised = group_advantages(pooled.flatten(), group[:, None].expand_as(pooled).flatten(), ddof=ddof, eps=eps).view_as(pooled)
    positions = torch.arange(completion_length, device=step_ends.device)
    reached = real[:, :, None] & (step_ends[:, :, None] >= positions)
    return (normalised[:, :, None] * reached).sum(1)
