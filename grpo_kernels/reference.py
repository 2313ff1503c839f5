"""The definition: what every backend computes, in plain differentiable torch.

It takes any floating dtype (tests use float64), leaves every gradient to autograd, and imports nothing else of the package. The `torch`
backend differentiates `token_objective` as it stands here; `csrc/objective.h` is its translation, value and derivative side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "KL_ESTIMATORS",
    "MAX_LOG_RATIO",
    "OBJECTIVES",
    "TokenObjective",
    "difference",
    "group_advantages",
    "hold",
    "k3",
    "named_params",
    "process_advantages",
    "row_stats",
    "times",
    "token_objective",
]

# Their order is their number in the kernels.
OBJECTIVES = ("clip", "cispo", "sapo", "reinforce")
KL_ESTIMATORS = ("k3", "k1", "k2", "abs", "k3_bias_corrected")

MAX_LOG_RATIO = 80.0  # exp(80) times |advantage| <= 6000 is still a float32


PARAMS = (
    "objective",
    "epsilon",
    "epsilon_high",
    "delta",
    "dual_clip",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "kl_estimator",
    "max_log_ratio",
)


def named_params(numbers: Sequence[float]) -> dict[str, Any]:
    """The keyword arguments of `token_objective` from the numbers that kernels are given."""
    named: dict[str, Any] = dict(zip(PARAMS, numbers))
    return {**named, "objective": OBJECTIVES[int(named["objective"])], "kl_estimator": KL_ESTIMATORS[int(named["kl_estimator"])]}


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
    log_ratio: Tensor | None = None,
    of_sequence: bool = False,
    objective: str = "clip",
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float = float("inf"),
    dual_clip: float = float("inf"),
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    kl_estimator: str = "k3",
    max_log_ratio: float = MAX_LOG_RATIO,
) -> TokenObjective:
    """Policy term, KL estimate and clip side of each token (MATH.md §3); all tensors of one shape.

    `log_ratio` replaces logps - old_logps (None: on-policy) by a sequence's own; `of_sequence`: its gradient is the sequence's too.
    Every choice is a `torch.where` on a strict comparison: at a tie the full gradient passes, where torch.min would halve it.
    """
    if log_ratio is None:
        log_ratio = difference(logps, old_logps)
    held = hold(log_ratio, max_log_ratio)
    ratio = held.exp()
    low, high = 1 - epsilon, 1 + epsilon_high
    positive, negative = advantages > 0, advantages < 0
    clipped = (positive & (ratio > high)).to(torch.int8) - (negative & (ratio < low)).to(torch.int8)
    if objective == "clip":
        policy = -torch.where(ratio > delta, delta, ratio) * advantages
        policy_clipped = -ratio.clamp(low, high) * advantages
        policy = torch.where(policy_clipped > policy, policy_clipped, policy)
        policy_capped = -dual_clip * torch.where(negative, advantages, -1.0)
        policy = torch.where(negative & (policy_capped < policy), policy_capped, policy)
    elif objective == "cispo":
        weight = ratio.detach()
        policy = -times(torch.where(weight > epsilon_high, epsilon_high, weight) * advantages, logps)
        clipped = (positive & (ratio > epsilon_high)).to(torch.int8)
    else:
        clipped = torch.zeros_like(clipped)
        if objective == "sapo":
            k = torch.where(positive, sapo_temperature_pos, torch.zeros_like(advantages) + sapo_temperature_neg)
            x = k * (ratio - 1)
            gate = torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))  # the side whose derivative s (1 - s) does not cancel
            policy = -advantages * gate * 4 / k
        else:
            policy = -times(advantages, logps)

    kl = torch.zeros_like(logps)
    if ref_logps is not None:
        d = -difference(logps, ref_logps)
        if kl_estimator == "k3_bias_corrected":
            kl = _bias_corrected_k3(logps, d, log_ratio, of_sequence, max_log_ratio)
        elif kl_estimator == "k3":
            kl = k3(hold(d, max_log_ratio))
        else:
            kl = {"k1": -d, "k2": d * d / 2, "abs": d.abs()}[kl_estimator]
    return TokenObjective(policy, kl, clipped)


class _Difference(torch.autograd.Function):
    """A subtraction whose value is 0 where both sides are equal, also at -inf, where autograd's own would be NaN."""

    @staticmethod
    def forward(ctx, logps, other_logps):  # type: ignore[no-untyped-def]
        return torch.where(logps == other_logps, 0.0, logps - other_logps)

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        return upstream, None


def difference(logps: Tensor, other_logps: Tensor | None = None) -> Tensor:
    """logps - other_logps (a constant); by default exactly 0 with gradient 1. NaN where logps is NaN."""
    return _Difference.apply(logps, logps.detach() if other_logps is None else other_logps)


def times(weight: Tensor, term: Tensor) -> Tensor:
    """weight * term, 0 times an infinite term being 0: a token without weight adds nothing, whatever its log-probability."""
    return weight * torch.where((weight == 0) & term.isinf(), 0.0, term)


def hold(log_ratio: Tensor, bound: float) -> Tensor:
    """Within +-bound, as everything that is exponentiated: beyond it the gradient is 0, at exactly the bound it passes, NaN stays NaN."""
    log_ratio = torch.where(log_ratio > bound, bound, log_ratio)
    return torch.where(log_ratio < -bound, -bound, log_ratio)


def k3(d: Tensor) -> Tensor:
    """exp(d) - d - 1 (DeepSeekMath eq. 4), never negative. float32 cancels near 0 (11 % off at 1e-6), so there the series serves."""
    if d.dtype == torch.float64:
        return torch.expm1(d) - d
    near = d.abs() < 0.5
    x = torch.where(near, d, 0.0)
    series: Tensor | float = 1 / 40320
    for factorial in (5040, 720, 120, 24, 6, 2):
        series = series * x + 1 / factorial
    return torch.where(near, x * x * series, torch.exp(d) - 1 - d)


def _bias_corrected_k3(logps: Tensor, d: Tensor, log_ratio: Tensor, of_sequence: bool, bound: float) -> Tensor:
    """ratio k3(d), the one term whose gradient is written by hand. Value and gradient stop at the float32 maximum.

    A token's own ratio: ratio (logp - ref_logp); autograd through the product adds two terms that cancel (8 % off at d = 1e-3 in float32).
    A sequence's: ratio (1 - e^d) to the token and ratio k3(d) to the sequence's log-ratio; autograd would overflow on the way.
    """
    largest = torch.finfo(torch.float32).max

    def capped(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, 0.0).detach().clamp(-largest, largest)

    ratio = hold(log_ratio, bound).exp().detach()
    free, d_free = log_ratio.abs() <= bound, d.abs() <= bound
    held = hold(d, bound)
    value = (ratio * k3(held)).detach().clamp(max=largest)
    if not of_sequence:
        return value + capped(ratio * -d, free) * difference(logps)
    return value + capped(ratio * -torch.expm1(held), d_free) * difference(logps) + capped(value, free) * difference(log_ratio)


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
